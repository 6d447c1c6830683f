"""What a person sees of a run: progress while it goes, a table when it is done.

Invariant: progress goes to stderr, and so does everything else where stdout carries JSON.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from onefill.plan import RULES
from onefill.rollout import Tally
from onefill.types import Group

__all__ = ["RolloutProgress", "show_group", "show_messages", "show_summary"]

_QUIET_EVERY_S = 10.0
_REASONS = {rule.name: rule.reason for rule in RULES}


class RolloutProgress:
    """A bar on a terminal, a line every ten seconds elsewhere.

    Args:
        console: writes to stderr.
        total: groups wanted, or None where the data decides.
        tally: the run's books.
    """

    def __init__(self, *, console: Console, total: int | None, tally: Tally) -> None:
        self._tally = tally
        self._console = console
        self._total = total
        self._started = self._shown = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("groups", total=total, detail="")

    def __enter__(self) -> RolloutProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def on_group(self, _: Group) -> None:
        """Shows a delivery."""
        if self._console.is_terminal:
            self._bar.update(self._task, completed=self._tally.groups_done, detail=self._detail())
        elif time.monotonic() - self._shown >= _QUIET_EVERY_S:
            self._shown = time.monotonic()
            of = f"/{self._total}" if self._total else ""
            self._console.print(f"groups {self._tally.groups_done}{of}, {self._detail()}", highlight=False)

    def _detail(self) -> str:
        elapsed = max(time.monotonic() - self._started, 1e-6)
        reward = f", reward {self._tally.reward.mean:.3f}" if self._tally.reward.count else ""
        speed = self._tally.response_tokens / elapsed
        return f"{self._tally.samples_done} samples, {speed:,.0f} tokens/s{reward}"


def show_summary(console: Console, summary: Mapping[str, Any]) -> None:
    """Prints the summary as a table."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    for name, value in _rows(summary):
        table.add_row(name, escape(value))
    console.print(table)


def _rows(s: Mapping[str, Any]) -> list[tuple[str, str]]:
    forms = ", ".join(f"{count} {form}" for form, count in s["groups_by_strategy"].items() if count)
    prompt, saved = s["prompt_tokens"], s["saved_tokens"]
    share = f" ({saved / prompt:.0%} saved by sharing)" if prompt else ""
    reasons = ", ".join(f"{count} {reason}" for reason, count in s["finish_reasons"].items() if count)
    rows = [
        ("groups", f"{s['groups_done']} done, {s['groups_failed']} failed" + (f" ({forms})" if forms else "")),
        ("samples", f"{s['samples_done']}" + (f" ({reasons})" if reasons else "")),
        ("requests", f"{s['requests_sent']} sent, {s['requests_retried']} retried"),
        ("prompt tokens", f"{prompt:,}, of which {s['prefill_tokens']:,} prefilled{share}"),
        ("response tokens", f"{s['response_tokens']:,} at {s['tokens_per_s']:,.1f} tokens/s"),
        ("wall time", f"{s['wall_s']:.1f} s"),
    ]
    if s["reward_mean"] is not None:
        failed = f", {s['rewards_failed']} failed" if s["rewards_failed"] else ""
        rows.append(("reward", f"mean {s['reward_mean']:.3f}, std {s['reward_std']:.3f}{failed}"))
    if s["duplicate_samples"]:
        rows.append(("copies", f"{s['duplicate_samples']} samples repeat an earlier one of their group"))
    for rule, count in s["ineligible"].items():
        rows.append(("not native", f"{count} groups: {rule}: {_REASONS.get(rule, 'see warnings')}"))
    return rows


def show_messages(console: Console, summary: Mapping[str, Any]) -> None:
    """Prints warnings and errors, the errors last, since the last line is the one that is read."""
    for line in summary["warnings"]:
        console.print(f"[yellow]warning:[/] {escape(line)}", highlight=False, soft_wrap=True)
    for line in summary["errors"]:
        console.print(f"[red]error:[/] {escape(line)}", highlight=False, soft_wrap=True)


def show_group(console: Console, group: Group) -> None:
    """Prints one group: its prompt's last words and each response with its reward."""
    console.print(f"[bold]one group:[/] {escape(_question(group))}  [dim]label[/] {escape(str(group.prompt.label))}")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for header in ("#", "reward", "tokens", "finish", "response"):
        table.add_column(
            header, no_wrap=True, overflow="ellipsis", justify="right" if header != "response" else "left"
        )
    for sample in group.samples:
        reward = "-" if sample.reward is None else f"{sample.reward:.2f}"
        text = " ".join(sample.text.split())
        table.add_row(str(sample.index), reward, str(sample.tokens.size), str(sample.finish_reason), escape(text))
    console.print(table)


def _question(group: Group) -> str:
    prompt = group.prompt
    if prompt.messages:
        content = prompt.messages[-1].get("content")
        words = content if isinstance(content, str) else str(content)
    else:
        words = prompt.text or f"{prompt.tokens.size if prompt.tokens is not None else 0} token ids"
    words = " ".join(words.split())
    return words if len(words) <= 100 else f"... {words[-96:]}"
