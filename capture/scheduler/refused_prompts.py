"""Prompts that programs stream in, and of which a chunk was refused.

vLLM keeps such a prompt as one request, which waits for its next chunk. Each chunk comes as a request
with its id and `resumable`, and the end of all as one that is not resumable. An API process waits
for one end of each chunk.
"""

from typing import Any


class RefusedPrompts:
    """Their ids, until their API process says that no chunk comes any more. vLLM would take a chunk
    that comes before that for a new prompt, without what came before it."""

    def __init__(self) -> None:
        self._ids: set[str] = set()

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, request: Any) -> bool:
        """Whether this is a chunk, or the end, of a prompt of which a chunk was refused."""
        return request.request_id in self._ids

    def add(self, chunk: Any) -> None:
        """Called when a chunk is refused."""
        self._ids.add(chunk.request_id)

    def forget(self, request_id: str) -> None:
        """Called when no chunk comes any more."""
        self._ids.discard(request_id)
