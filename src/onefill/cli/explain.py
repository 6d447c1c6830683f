"""`onefill explain`: which strategy each group would get, rule by rule, and why. Sends no prompt."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections import Counter
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from onefill.cli.rollout import DataPath, EngineUrl, JsonFlag, Key, TomlFile, settings_from
from onefill.cli.session import Connected, LazyTokenizer, connect, new_ids, open_source
from onefill.cli.settings import RolloutSettings
from onefill.engine import check
from onefill.errors import DataError
from onefill.plan import RULES, Capabilities, Context, Plan, Strategy, plan
from onefill.types import Group

__all__ = ["explain"]

_SHOWN = 20


def explain(
    ctx: typer.Context,
    engine: EngineUrl = None,
    model: Annotated[str | None, typer.Option(help="Model of the embedded engine.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Directory or hub name.")] = None,
    data: DataPath = None,
    task: Annotated[str | None, typer.Option(help="A task instead of files.")] = None,
    prompt_key: Key = None,
    label_key: Key = None,
    image_key: Key = None,
    video_key: Key = None,
    audio_key: Key = None,
    groups: Annotated[
        int | None, typer.Option(help="Groups to look at (default 16 of a task, all of a file).")
    ] = None,
    group_size: Annotated[int | None, typer.Option(help="Samples a group (default 8).")] = None,
    strategy: Annotated[str | None, typer.Option(help="auto, native, split:K or fanout.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message, put first.")] = None,
    apply_chat_template: Annotated[
        bool | None, typer.Option("--apply-chat-template/--raw", help="For string prompts.")
    ] = None,
    group_reward: Annotated[str | None, typer.Option(help="The group reward that the run would use.")] = None,
    group_reward_required: Annotated[
        bool | None, typer.Option("--group-reward-required", help="No native groups without --group-reward.")
    ] = None,
    config: TomlFile = None,
    json: JsonFlag = False,
) -> None:
    """Show which strategy each group would get on this engine, rule by rule, and why."""
    settings = settings_from(ctx, config)
    report = asyncio.run(_explain(settings, Console(stderr=True)))
    if json:
        sys.stdout.buffer.write(orjson.dumps(report, option=orjson.OPT_INDENT_2) + b"\n")
    else:
        _show(Console(), report)


async def _explain(settings: RolloutSettings, stderr: Console) -> dict[str, Any]:
    log = lambda line: stderr.print(escape(line), highlight=False)  # noqa: E731 - one word for one thing
    async with connect(settings, log=log) as connected:
        return await asyncio.to_thread(_report, settings, connected)


def _report(settings: RolloutSettings, connected: Connected) -> dict[str, Any]:
    engine, ids = connected.engines[0], new_ids()
    context = Context(
        engine.capabilities,
        seed=settings.seed,
        group_reward=settings.group_reward is not None,
        group_reward_required=settings.group_reward_required,
    )
    strategy = Strategy.parse(settings.strategy)
    rows: list[dict[str, Any]] = []
    for item in itertools.islice(open_source(settings).read(), settings.groups_wanted):
        outcome = item.error or _prepared(item.prompt, settings, connected.tokenizer)
        if isinstance(outcome, DataError):
            rows.append({"group": "", "error": str(outcome)})
            continue
        planned = plan(outcome, strategy=strategy, context=context, new_id=ids)
        try:
            check(planned.requests[0], connected.clients[0].limits)
        except DataError as error:
            rows.append({"group": outcome.id, "error": str(error)})
            continue
        rows.append(_row(outcome, planned))
    return {
        "engine": engine.url,
        "strategy": settings.strategy,
        "capabilities": _capabilities(engine.capabilities),
        "engines_that_differ": _differing(connected),
        "groups": rows,
        "rules": _rules(rows),
    }


def _prepared(prompt: Any, settings: RolloutSettings, tokenizer: LazyTokenizer) -> Group | DataError:
    try:
        return Group.of(tokenizer.prepare(prompt), settings.group_size, settings.sampling())
    except DataError as error:
        return error


def _row(group: Group, planned: Plan) -> dict[str, Any]:
    return {
        "group": group.id,
        "prompt_tokens": int(planned.requests[0].tokens.size),
        "media": len(group.prompt.media),
        "strategy": str(planned.form),
        "requests": [request.n for request in planned.requests],
        "barred_by": [rule.name for rule in planned.barred_by],
    }


def _rules(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    counts = Counter(name for row in rows for name in row.get("barred_by", ()))
    return [{"rule": rule.name, "groups": counts[rule.name], "reason": rule.reason} for rule in RULES]


def _differing(connected: Connected) -> dict[str, list[str]]:
    """Other engines of the run whose capabilities are not those of the first, and in what."""
    first = _capabilities(connected.engines[0].capabilities)
    differing = {}
    for engine in connected.engines[1:]:
        other = _capabilities(engine.capabilities)
        if names := [name for name, value in first.items() if other[name] != value]:
            differing[engine.url] = names
    return differing


def _capabilities(capabilities: Capabilities) -> dict[str, Any]:
    names = [name for name in Capabilities.__dataclass_fields__ if name != "evidence"]
    shown = {name: getattr(capabilities, name) for name in names}
    return {name: str(value) if isinstance(value, str) else value for name, value in shown.items()}


def _show(console: Console, report: dict[str, Any]) -> None:
    console.print(f"engine [bold]{escape(report['engine'])}[/], asked for [bold]{report['strategy']}[/]")
    for url, names in report["engines_that_differ"].items():
        console.print(f"[yellow]engine {escape(url)} differs in {', '.join(names)}[/]: explain it by itself")
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for header in ("group", "prompt tokens", "strategy", "requests", "barred by"):
        table.add_column(header)
    good = [row for row in report["groups"] if "error" not in row]
    for row in good[:_SHOWN]:
        sizes = Counter(row["requests"])
        requests = ", ".join(f"{count} x n={n}" for n, count in sizes.items())
        barred = ", ".join(row["barred_by"]) or "-"
        table.add_row(escape(row["group"]), str(row["prompt_tokens"]), row["strategy"], requests, barred)
    console.print(table)
    if len(good) > _SHOWN:
        console.print(f"... and {len(good) - _SHOWN} more groups", highlight=False)
    forms = Counter(row["strategy"] for row in good)
    console.print("\ntotal: " + ", ".join(f"{count} {form}" for form, count in forms.items()), highlight=False)
    _show_rules(console, report, len(good))
    for row in report["groups"]:
        if "error" in row:
            console.print(f"[red]bad row:[/] {escape(row['error'])}", highlight=False)


def _show_rules(console: Console, report: dict[str, Any], total: int) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for header in ("rule", "bars", "because"):
        table.add_column(header)
    for rule in report["rules"]:
        bars = f"[yellow]{rule['groups']} of {total}[/]" if rule["groups"] else "none"
        table.add_row(rule["rule"], bars, rule["reason"] if rule["groups"] else f"[dim]{rule['reason']}[/]")
    console.print()
    console.print(table)
