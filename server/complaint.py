"""How a command reports that it cannot be carried out."""

import sys


class CommandError(Exception):
    """A command line that cannot be carried out. The message says what to change."""


def complain(message: object) -> int:
    """Prints what is wrong with a command line; returns the exit status for it."""
    print(f"routed-experts: {message}", file=sys.stderr)
    return 2
