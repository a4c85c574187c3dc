"""Arrays as objects of a bucket, which servers of many hosts share: `PREFIX/HOUR/ID.npy`."""

import string
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import quote

from routed_experts.protocol.buckets import bucket_at, bucket_errors
from routed_experts.server.outputs.folders import ARRAY, HOUR, hour_of

_SKEW_S = 900.0
"""How far clocks of hosts may be apart: as far as S3 allows."""


_METADATA_LENGTH = 256
"""Of a value. S3 takes 2 KiB for all of an object."""
_AS_THEY_ARE = string.punctuation.replace("%", "")


def _metadata(value: str) -> str:
    """A value as every store takes it: in ASCII, and percent-encoded as in URLs."""
    return quote(value[:_METADATA_LENGTH], safe=_AS_THEY_ARE)


class Bucket:
    """The objects below a URL, which counts and limits their bytes itself. All methods raise
    OSError."""

    used_bytes = 0

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._objects: Any = None

    def open(self) -> None:
        """Reads the environment."""
        self._objects = bucket_at(self.url)

    def try_out(self, name: str) -> None:
        """Writes an object and deletes it."""
        self.open()
        self.put(name, b"trial", {})
        self.delete(name)

    def put(self, name: str, content: bytes | memoryview, metadata: dict[str, str]) -> None:
        """Writes an object; returns when all who ask for it get it."""
        attributes = {"Content-Type": "application/octet-stream"}
        attributes |= {fact: _metadata(value) for fact, value in metadata.items()}
        with bucket_errors(self.url):
            self._objects.put(name, content, attributes=attributes)

    def size(self, name: str) -> int:
        with bucket_errors(self.url):
            size: int = self._objects.head(name)["size"]
            return size

    def read(self, name: str, spans: Iterable[tuple[int, int]]) -> bytes:
        """The bytes of `spans`, each of which is the first byte and the one after the last."""
        starts, ends = zip(*spans, strict=True)
        with bucket_errors(self.url):
            return b"".join(self._objects.get_ranges(name, starts=starts, ends=ends))

    def delete(self, name: str) -> None:
        with bucket_errors(self.url):
            self._objects.delete(name)

    def sign(self, name: str, method: str, seconds: float) -> str:
        """A URL for whoever has no keys."""
        import obstore

        with bucket_errors(self.url):
            return str(obstore.sign(self._objects, method, name, timedelta(seconds=seconds)))

    def sweep(self) -> None:
        """Deletes the hours that have passed, which a rule of the bucket may have done before."""
        last_hour = hour_of(time.time() - _SKEW_S)
        with bucket_errors(self.url):
            for hour in self._objects.list_with_delimiter()["common_prefixes"]:
                if HOUR.fullmatch(hour) and hour < last_hour:
                    for objects in self._objects.list(hour):
                        names = [entry["path"] for entry in objects]
                        ours = [name for name in names if ARRAY.fullmatch(name[len(hour) + 1 :])]
                        if ours:
                            with suppress(FileNotFoundError):  # another server was faster
                                self._objects.delete(ours)
