"""`onefill rollout`: from prompts to rewarded groups on disk."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.markup import escape

from onefill.cli.session import Connected, connect, new_ids, open_source
from onefill.cli.settings import RolloutSettings, load_settings
from onefill.cli.show import RolloutProgress, show_group, show_messages, show_summary
from onefill.data.source import OnError
from onefill.errors import ConfigError, DataError
from onefill.plan import Strategy
from onefill.reward import Rewarder
from onefill.rollout import Dispatcher, Outcome, PromptReader, Rollout, RolloutOptions, Tally
from onefill.rollout.sink import NullSink, ParquetSink
from onefill.types import Group

_GC_THRESHOLDS = (100_000, 50, 100)

__all__ = ["Report", "roll_out", "rollout", "run_async", "settings_from"]

EngineUrl = Annotated[
    list[str] | None,
    typer.Option(metavar="URL|local", help="An engine, or `local` for the embedded one (default). Repeatable."),
]
DataPath = Annotated[
    list[str] | None, typer.Option(metavar="PATH", help="JSONL or Parquet: file, directory or glob. Repeatable.")
]
Key = Annotated[str | None, typer.Option(help="Key of a row, dotted for nested ones; found by itself if usual.")]
TomlFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="TOML file with the same names; flags win over it.")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, all else on stderr.")]


def rollout(
    ctx: typer.Context,
    engine: EngineUrl = None,
    model: Annotated[str | None, typer.Option(help="Model of the embedded engine (default smollm2-135m).")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Directory or hub name; by default what the engine names, if it is here.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of the embedded engine.")] = None,
    data: DataPath = None,
    task: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A reasoning-gym task instead of files (default arithmetic)."),
    ] = None,
    prompt_key: Key = None,
    label_key: Key = None,
    image_key: Key = None,
    video_key: Key = None,
    audio_key: Key = None,
    system: Annotated[str | None, typer.Option(help="A system message, put first.")] = None,
    apply_chat_template: Annotated[
        bool | None,
        typer.Option("--apply-chat-template/--raw", help="For string prompts; by default where there is a template."),
    ] = None,
    shuffle: Annotated[bool | None, typer.Option("--shuffle/--in-order", help="Shuffle the data by --seed.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data (default 1).")] = None,
    groups: Annotated[
        int | None, typer.Option(help="Stop after so many (default: 16 of a task, all of a file).")
    ] = None,
    group_size: Annotated[int | None, typer.Option(help="Samples a group (default 8).")] = None,
    strategy: Annotated[
        str | None, typer.Option(metavar="auto|native|split:K|fanout", help="How groups are sent (default auto).")
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Response tokens at most (default 128).")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy (default 1.0).")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling (default 1.0, off).")] = None,
    top_k: Annotated[int | None, typer.Option(help="Most likely k only (default -1, off).")] = None,
    min_p: Annotated[float | None, typer.Option(help="Probability floor against the best (default 0, off).")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends a response. Repeatable.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the task, the shuffle and the embedded engine (default 0).")
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            help="math, exact, choice, reasoning-gym or module:function, for each sample (a task has its own)."
        ),
    ] = None,
    group_reward: Annotated[str | None, typer.Option(help="module:function, called once a group.")] = None,
    reward_timeout: Annotated[
        float | None, typer.Option(help="Seconds that one reward may take (default 30).")
    ] = None,
    group_reward_required: Annotated[
        bool | None,
        typer.Option(
            "--group-reward-required", help="No native groups without --group-reward (as some trainers need)."
        ),
    ] = None,
    request_timeout: Annotated[
        float | None, typer.Option(help="Seconds that one request may take, queueing included (default 3600).")
    ] = None,
    concurrency: Annotated[int | None, typer.Option(help="Samples in flight at most (default 256).")] = None,
    on_error: Annotated[
        OnError | None, typer.Option(help="What a bad row or a failed group does (default fail).")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Gets samples.parquet and summary.json.")] = None,
    config: TomlFile = None,
    json: JsonFlag = False,
) -> None:
    """Roll out prompt groups: n samples of every prompt, rewarded, in one table."""
    settings = settings_from(ctx, config)
    stderr = Console(stderr=True)
    with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():  # a reward may print
        report = run_async(roll_out(settings, stderr=stderr))
    if json:
        sys.stdout.buffer.write(orjson.dumps(report.summary) + b"\n")
        show_messages(stderr, report.summary)
    else:
        stdout = Console()
        if report.example:
            show_group(stdout, report.example)
            stdout.print()
        show_summary(stdout, report.summary)
        show_messages(stderr, report.summary)
        if settings.out and report.summary["groups_done"]:
            stdout.print(f"written to {escape(str(settings.out))}: samples.parquet, summary.json", highlight=False)
    if report.exit_code:
        raise typer.Exit(report.exit_code)


def settings_from(ctx: typer.Context, config: Path | None) -> RolloutSettings:
    """The settings that a command's flags and its `--config` file give together."""
    flags = {name: value for name, value in ctx.params.items() if name not in ("config", "json")}
    return load_settings(flags, config)


def run_async(main: Coroutine[Any, Any, Report]) -> Report:
    """Runs on uvloop where it is installed.

    Replies are tens of thousands of short-lived lists that hold no cycles; the default collector walks the whole heap
    for them again and again, which cost 7 % of the client's CPU (`benchmarks/client_overhead.py`).
    """
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    try:
        import uvloop  # noqa: PLC0415 - not on every platform
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)  # type: ignore[no-any-return, unused-ignore]


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a run.

    Args:
        summary: the object that `--json` prints.
        exit_code: 0 done, 1 failed or interrupted, 2 bad input.
        example: a group to show, or None.
    """

    summary: dict[str, Any]
    exit_code: int
    example: Group | None = None


async def roll_out(settings: RolloutSettings, *, stderr: Console) -> Report:
    """Runs a rollout from its settings to its summary.

    Raises:
        OnefillError: the run could not start (no engine, no data, a bad setting).
    """

    def log(line: str) -> None:
        stderr.print(line, markup=False, highlight=False, soft_wrap=True)

    source = open_source(settings)  # bad input is told before an engine is started
    rewarder = Rewarder.from_names(
        reward=settings.reward_name, group_reward=settings.group_reward, timeout_s=settings.reward_timeout
    )
    tally = Tally(asked=Strategy.parse(settings.strategy).form)
    for line in settings.idle_options():
        tally.warnings.add(line)
    try:
        async with connect(settings, log=log) as connected:
            examples = _Examples()
            sink = ParquetSink(settings.out) if settings.out else NullSink()
            with RolloutProgress(console=stderr, total=settings.groups_wanted, tally=tally) as progress:

                def on_group(group: Group) -> None:
                    examples.offer(group)
                    progress.on_group(group)

                run = Rollout(
                    prompts=PromptReader(source.read(), connected.tokenizer.prepare),
                    dispatcher=_dispatcher(settings, connected, tally),
                    options=_options(settings),
                    tally=tally,
                    rewards=rewarder,
                    sink=sink,
                    on_group=on_group,
                )
                outcome = await _until_done_or_ctrl_c(run)
            summary = _summary(settings, tally, outcome, connected)
    finally:
        if rewarder:
            await rewarder.aclose()
    return Report(summary, _exit_code(outcome, tally), examples.best)


class _Examples:
    """Keeps the group that shows most: one where rewards differ, else the first."""

    def __init__(self) -> None:
        self.best: Group | None = None

    def offer(self, group: Group) -> None:
        if self.best is None or (_spread(group) and not _spread(self.best)):
            self.best = group


def _spread(group: Group) -> bool:
    return len({sample.reward for sample in group.samples}) > 1


def _dispatcher(settings: RolloutSettings, connected: Connected, tally: Tally) -> Dispatcher:
    return Dispatcher(
        engines=connected.engines,
        strategy=Strategy.parse(settings.strategy),
        new_id=new_ids(),
        tally=tally,
        seed=settings.seed,
        group_reward=settings.group_reward is not None,
        group_reward_required=settings.group_reward_required,
    )


def _options(settings: RolloutSettings) -> RolloutOptions:
    return RolloutOptions(
        group_size=settings.group_size,
        sampling=settings.sampling(),
        groups=settings.groups_wanted,
        concurrency=settings.concurrency,
        on_error=settings.on_error,
    )


async def _until_done_or_ctrl_c(run: Rollout) -> Outcome:
    """The first Ctrl-C (or SIGTERM) stops the run cleanly; the next one is Python's own."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def stop() -> None:
        run.stop()
        for number in signals:
            loop.remove_signal_handler(number)

    for number in signals:
        loop.add_signal_handler(number, stop)
    try:
        return await run.run()
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _summary(settings: RolloutSettings, tally: Tally, outcome: Outcome, connected: Connected) -> dict[str, Any]:
    if outcome.interrupted:
        tally.warnings.add(
            f"interrupted: {tally.groups_done} finished groups were kept, {outcome.dropped} unfinished were dropped"
        )
    elif outcome.dropped:
        tally.warnings.add(f"the run ended early: {outcome.dropped} unfinished groups were dropped")
    summary = tally.summary(
        wall_s=outcome.wall_s, requests_sent=connected.requests_sent, requests_retried=connected.requests_retried
    )
    if settings.out and (tally.groups_done or not (settings.out / "samples.parquet").exists()):
        _write_summary(settings.out / "summary.json", summary)
    return summary


def _write_summary(path: Path, summary: dict[str, Any]) -> None:
    part = path.with_suffix(".json.part")
    part.write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2) + b"\n")
    part.replace(path)


def _exit_code(outcome: Outcome, tally: Tally) -> int:
    if isinstance(outcome.error, ConfigError | DataError):
        return 2
    nothing = tally.groups_done == 0 and (tally.groups_failed or tally.rows_skipped)
    return 1 if outcome.error or outcome.interrupted or nothing else 0
