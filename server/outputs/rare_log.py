"""A log of what goes wrong again and again."""

import logging
import time

INTERVAL_S = 60.0


class RareLog:
    """Logs one message a minute, and with it how many were left out since the one before."""

    def __init__(self, logger: logging.Logger, level: int) -> None:
        self._logger = logger
        self._level = level
        self._next_at = 0.0  # by the monotonic clock
        self._num_left_out = 0

    def log(self, message: str, *args: object, exc_info: Exception | None = None) -> None:
        if time.monotonic() < self._next_at:
            self._num_left_out += 1
            return
        if self._num_left_out:
            message += " (%d more like this were not logged)"
            args += (self._num_left_out,)
        self._logger.log(self._level, message, *args, exc_info=exc_info)
        self._num_left_out = 0
        self._next_at = time.monotonic() + INTERVAL_S
