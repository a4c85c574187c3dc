"""How much memory routing as an input takes in this process, and the limit of it."""

from contextlib import ExitStack
from http import HTTPStatus

from starlette.exceptions import HTTPException

_RETRY_AFTER_S = 1
INPUT_BYTES_FLAG = "--routed-experts-input-bytes"


class InputMemory:
    """Counts the bytes of running requests. It is only used in the event loop."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0

    def take(self, num_bytes: int, request_end: ExitStack) -> None:
        """Counts `num_bytes` until `request_end`.

        Raises:
            HTTPException: other requests have what is needed; it comes back when they end.
        """
        if self.used_bytes + num_bytes > self.max_bytes:
            raise HTTPException(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"Running requests have {self.used_bytes} bytes of routing as an input, this one "
                f"needs {num_bytes}, and the limit is {self.max_bytes} ({INPUT_BYTES_FLAG}): try "
                "again when others have ended.",
                {"Retry-After": str(_RETRY_AFTER_S)},
            )
        self.used_bytes += num_bytes
        request_end.callback(self._give_back, num_bytes)

    def _give_back(self, num_bytes: int) -> None:
        self.used_bytes -= num_bytes
