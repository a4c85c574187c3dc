"""How what takes long says so: to people at a terminal, and to nobody else."""

import sys


def say(text: str) -> None:
    """What is being done now, as a line on standard error where that is a terminal."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def hush_transformers() -> None:
    """Takes the bars away that transformers draws wherever standard error goes, unless that is a terminal."""
    if not sys.stderr.isatty():
        from transformers.utils import logging

        logging.disable_progress_bar()
