"""`onefill serve`: the embedded engine alone."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["serve"]


def serve(
    model: Annotated[
        str, typer.Option(help="A known name (`onefill models list`), a local directory or a hub name.")
    ] = "smollm2-135m",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="TCP port; 0 picks a free one and prints it.")] = 30000,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves the choice to torch.")] = 0,
    max_running_requests: Annotated[int, typer.Option(help="Samples that decode together at most.")] = 64,
    max_total_tokens: Annotated[
        int, typer.Option(help="Size of the KV cache in tokens, over all samples: bounds the memory.")
    ] = 32768,
    max_batch_tokens: Annotated[int, typer.Option(help="Tokens of one forward pass at most.")] = 512,
    context_length: Annotated[int, typer.Option(help="Longest prompt plus response; 0 is the model's own.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampler; without it, it draws one.")] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Sample by `sampling_seed`, as SGLang's deterministic mode does.")
    ] = False,
    disable_radix_cache: Annotated[
        bool, typer.Option("--disable-radix-cache", help="Share no prefix between requests.")
    ] = False,
    weight_version: Annotated[str, typer.Option(help="Name of the weights that are loaded at start.")] = "default",
) -> None:
    """Serve a model on CPU with SGLang's protocol. Needs `pip install 'onefill\\[local]'`."""
    from onefill.cli.extras import need_local  # noqa: PLC0415 - torch is loaded where it is used

    need_local()
    from onefill.local import ServeConfig  # noqa: PLC0415
    from onefill.local import serve as run  # noqa: PLC0415

    run(
        ServeConfig(
            model=model,
            host=host,
            port=port,
            threads=threads,
            max_running_requests=max_running_requests,
            max_total_tokens=max_total_tokens,
            max_batch_tokens=max_batch_tokens,
            context_length=context_length,
            seed=seed,
            deterministic=deterministic,
            disable_radix_cache=disable_radix_cache,
            weight_version=weight_version,
        )
    )
