"""The `onefill` command: thin; every command is a few lines over the rooms."""

from onefill.cli.app import main

__all__ = ["main"]
