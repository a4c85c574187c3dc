"""How a command says that it cannot be carried out."""

import sys


def complain(message: object) -> int:
    """Says what is wrong with a command line; returns the exit status for it."""
    print(f"routed-experts: {message}", file=sys.stderr)
    return 2
