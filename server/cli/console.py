"""What commands print: errors, and progress where standard error is a terminal."""

import sys


class CommandError(Exception):
    """A command line that cannot be carried out. The message says what to change."""


def complain(message: object) -> int:
    """Prints what is wrong with a command line; returns the exit status for it."""
    print(f"routed-experts: {message}", file=sys.stderr)
    return 2


def say(text: str) -> None:
    """What is being done now, as a line on standard error where that is a terminal."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def hide_transformers_progress() -> None:
    """Takes the bars away that transformers draws wherever standard error goes, unless that is a terminal."""
    if not sys.stderr.isatty():
        from transformers.utils import logging

        logging.disable_progress_bar()
