"""Console output: errors, tables, and progress if standard error is a terminal."""

import sys
from collections.abc import Iterable
from typing import Any, TypeVar

Item = TypeVar("Item")


class CommandError(Exception):
    """A command cannot run. The message says what is wrong and what to change."""


def complain(message: object) -> int:
    """Prints an error message; returns the exit status."""
    print(f"routed-experts: {message}", file=sys.stderr)
    return 2


def say(text: str) -> None:
    """Prints a progress message if standard error is a terminal."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def progress(items: Iterable[Item], **options: object) -> Iterable[Item]:
    """Shows a progress bar if standard error is a terminal and tqdm is installed. `options` are
    those of tqdm."""
    try:
        from tqdm import tqdm
    except ImportError:  # a client's installation does not have it
        return items
    return tqdm(items, disable=None, **options)


def hide_transformers_progress() -> None:
    """Disables the progress bars of transformers unless standard error is a terminal."""
    if not sys.stderr.isatty():
        from transformers.utils import logging

        logging.disable_progress_bar()


def sentence_of(error: BaseException) -> str:
    """The first line of what vLLM or transformers say of a model or its configuration."""
    text = _of_pydantic(error) if callable(getattr(error, "errors", None)) else str(error).strip()
    sentence = text.partition("\n")[0] or "vLLM rejects these arguments without a reason"
    return sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."


def _of_pydantic(error: Any) -> str:
    """The first error, without the link and the value."""
    first = error.errors()[0]
    field, message = ".".join(map(str, first["loc"])), str(first["msg"])
    raised = message.removeprefix("Value error, ")  # by vLLM, which names the field
    return f"{field}: {message}" if field and raised == message else raised
