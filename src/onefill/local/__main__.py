"""`python -m onefill.local`: the embedded engine as a process of its own."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from onefill.errors import ConfigError
from onefill.local import serve
from onefill.local.config import ServeConfig
from onefill.local.models import known

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the flags and serves. Returns the exit status: 0 stopped, 2 not startable."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    values = vars(_parser().parse_args(argv))
    try:
        serve(ServeConfig(**values))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m onefill.local",
        description="Serve a model on the CPU with SGLang's HTTP protocol.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = ServeConfig()
    names = ", ".join(known())
    for flag, kind, about in (
        ("model", str, f"{names}, a local directory or a hub name"),
        ("host", str, "address to listen on"),
        ("port", int, "TCP port; 0 picks a free one"),
        ("threads", int, "torch threads; 0 lets torch decide"),
        ("max-running-requests", int, "most samples that decode together"),
        ("max-total-tokens", int, "size of the KV cache in tokens; bounds the memory"),
        ("max-batch-tokens", int, "most tokens of one forward pass"),
        ("page-size", int, "tokens of a cache block"),
        ("context-length", int, "longest prompt plus response; 0 takes the model's"),
        ("seed", int, "seed of the sampler; none draws one"),
        ("weight-version", str, "name of the weights loaded at start"),
        ("parent-pid", int, "stop when this process is gone; 0 watches nobody"),
    ):
        name = flag.replace("-", "_")
        parser.add_argument(f"--{flag}", type=kind, default=getattr(default, name), help=about)
    for flags, name, about in (
        (("--deterministic", "--enable-deterministic-inference"), "deterministic", "sample by the request's seed"),
        (("--disable-radix-cache",), "disable_radix_cache", "share no prefixes between requests"),
    ):
        parser.add_argument(*flags, dest=name, action="store_true", help=about)
    return parser


if __name__ == "__main__":
    sys.exit(main())
