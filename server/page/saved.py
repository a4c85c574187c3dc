"""Reads the files of responses that are opened in the page."""

import json
from collections.abc import Iterator
from io import StringIO

from routed_experts.protocol.saved import ModelInfo, page_lines

READ_PATH = "/v1/routed_experts/saved"
MAX_BYTES = 32 << 20
TOO_LARGE = f"Files of more than {MAX_BYTES >> 20} MiB at once: open them with routed-experts view."


def read(body: bytes) -> Iterator[str]:
    """The lines of `page_lines` for files in a request's body, `[[name, text], …]`. Raises `ValueError` for another."""
    try:
        files = [(str(name), StringIO(text)) for name, text in json.loads(body)]
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError("The body must be a list of files, each [name, text].") from error
    return page_lines(files, ModelInfo())
