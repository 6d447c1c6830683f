"""`python -m onefill`: the `onefill` command."""

from onefill.cli import main

main()
