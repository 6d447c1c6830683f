"""`onefill models`: the models that the embedded engine knows by name."""

from __future__ import annotations

from typing import Annotated

import typer

from onefill.cli.extras import need_local

__all__ = ["models"]

models = typer.Typer(help="Models that the embedded engine knows by name.", no_args_is_help=True)


@models.command("list")
def list_models() -> None:
    """List the known models and whether each is here."""
    from onefill.local.models import fetched, known  # noqa: PLC0415 - only where it is used

    for name, what in known().items():
        here = "here" if fetched(name) else "not fetched"
        typer.echo(f"{name:16} {here:12} {what}")


@models.command()
def pull(name: Annotated[str, typer.Argument(help="A name of `onefill models list`.")]) -> None:
    """Fetch a model once; later calls find it in the cache. Prints its directory."""
    need_local()
    from onefill.local.models import pull as fetch  # noqa: PLC0415 - only where it is used

    typer.echo(fetch(name))
