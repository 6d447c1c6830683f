"""The `onefill` command and its exit codes: 0 done, 1 a run that failed, 2 bad usage or input.

Invariant: an `OnefillError` never ends in a traceback; its message is the last line on stderr.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from onefill import __version__
from onefill.cli.explain import explain
from onefill.cli.models import models
from onefill.cli.rollout import rollout
from onefill.cli.serve import serve
from onefill.errors import ConfigError, DataError, OnefillError

__all__ = ["app", "main"]

app = typer.Typer(
    name="onefill",
    help="Roll out prompt groups for RL: prefill once, sample n.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(rollout)
app.command()(explain)
app.command()(serve)
app.add_typer(models, name="models")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"onefill {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Roll out prompt groups for RL: prefill once, sample n."""


def main() -> None:
    """Runs the command and turns errors into exit codes."""
    try:
        app()
    except OnefillError as error:
        Console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2 if isinstance(error, ConfigError | DataError) else 1)
