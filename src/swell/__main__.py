"""`python -m swell` is the `swell` command."""

from swell.cli import main

main()
