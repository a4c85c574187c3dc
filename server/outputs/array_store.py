"""Arrays by reference: where they live, who deletes them, and what a full store does.

**Where.** An array is one `.npy` file, in a folder (`--routed-experts-store`; by default one in
/dev/shm for this port) or in a bucket (`s3://`, `gs://`, `az://`). Its name is `HOUR/ID.npy`. The id
says when the array expires, in seconds, and goes on with a random number that nobody can guess, and
a checksum; the hour is the one in which it expires. So an id alone leads to the array, on every
server that has the folder or bucket, and nothing is handed over when a server ends or is killed.

**Who deletes.** A client with `DELETE`; the server, if the client left before the part with the
reference was sent; and every server of the folder or bucket, which sweep it for arrays whose time has passed.
`routed-experts serve` removes the folder of its port, which nobody named, when it starts and stops.

**Full.** A folder has a limit of bytes, which `Folder` counts; a bucket has its own.
An array that does not fit or cannot be written is a `StoreError`: the response then has it inline, or
is an error with status 507. A reference is made when its array has been written to the end.
"""

import logging
import re
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from routed_experts.protocol.buckets import is_broken_url, is_bucket
from routed_experts.protocol.codec import CodecError, read_npy_header
from routed_experts.server.outputs.buckets import Bucket
from routed_experts.server.outputs.folders import Folder, hour_of
from routed_experts.server.outputs.npy import NPY_HEADER_BYTES, npy_file
from routed_experts.server.outputs.rare_log import RareLog
from routed_experts.server.outputs.threads import Threads
from routed_experts.server.settings import DEFAULT_LIFETIME_S, Settings
from routed_experts.server.vllm_api import get_logger

logger = get_logger(__name__)

_ID = re.compile("[0-9a-f]{40}")
ANSWERS_AT_ONCE = 16
"""How many answers write to a bucket at once. Others wait for one of them to end."""
READS_AT_ONCE = 16
_SILENT_S = 5.0
"""A bucket is gone if a request fails after so long, all tries included: others would as well."""
_GONE_S = 10.0
"""How long nothing is written to a bucket that is gone."""


class StoreError(Exception):
    """The store cannot be used, or the array does not fit."""


class UnknownArrayError(LookupError):
    """There never was such an array: no server made the id."""


class ArrayGoneError(LookupError):
    """The array has expired or was deleted, or is in another store."""


class StoredArray(NamedTuple):
    """A stored array."""

    id: str
    expires: int  # Unix time in seconds
    place: str  # the path of its file, or the address of the object (`s3://…`)
    url: str | None = None  # signed, of an object: whoever has it may read the array

    @property
    def path(self) -> Path:
        """Of an array in a folder."""
        return Path(self.place)

    def reference(
        self, array: NDArray[Any], start: int, missing: int, **more: Any
    ) -> dict[str, Any]:
        """What a reference says of `array` [layers, n, K], which is stored here and begins at
        position `start`."""
        num_layers, num_rows, top_k = array.shape
        return {
            "id": self.id,
            **more,
            "shape": [num_rows, num_layers, top_k],
            "dtype": array.dtype.name,
            "start": start,
            "missing": missing,
            "bytes": array.nbytes,
            "expires": self.expires,
        }


class ArrayStore:
    """The arrays of a folder, with a limit of bytes, or of a bucket; and their lifetime."""

    def __init__(
        self,
        place: Path | str,  # a folder, or the URL of a bucket
        # of a folder; by default half of the space that is free at first
        max_bytes: int | None = None,
        lifetime_s: float = DEFAULT_LIFETIME_S,  # until an array expires
    ) -> None:
        if is_broken_url(place):
            raise ValueError(f"{place}: pass a URL as text, with both slashes, not as a Path")
        self.bucket = Bucket(str(place)) if is_bucket(place) else None
        self.folder = None if self.bucket else Path(str(place).removeprefix("file://"))
        self.place = self.bucket.url if self.bucket else str(self.folder)
        self.lifetime_s = lifetime_s
        self._objects = self.bucket or Folder(Path(self.folder or ""), max_bytes)
        self._is_open = False
        self._opening = threading.Lock()
        # For a folder, several threads would take twice the CPU time, and keep the event loop
        # waiting for Python's lock. Those of a bucket wait for the network.
        self.writer = Threads(ANSWERS_AT_ONCE if self.bucket else 1, "routed-experts-store")
        # Copies of large arrays, one at a time: the event loop would compete with all for a core.
        self._copying = threading.Lock()
        # for whatever else waits for a disk or a bucket; nothing of the server waits behind it
        self.reader = Threads(READS_AT_ONCE, "routed-experts-store-reads")
        # A full store is a reason to log for each array.
        self.warnings = RareLog(logger, logging.WARNING)
        self._gone_until = 0.0  # of a bucket, on the monotonic clock

    @property
    def used_bytes(self) -> int:
        """Of a folder, by all servers; 0 of a bucket, which counts its bytes itself."""
        return self._objects.used_bytes

    def open(self) -> None:
        """At the first call, makes the folder and counts what it has, or tries whether the bucket
        can be written to. Raises `StoreError`."""
        if self._is_open:
            return
        with self._opening:
            if self._is_open:
                return
            with self._errors("cannot be used"):
                if isinstance(self._objects, Bucket):
                    key, _ = _new_id(self.lifetime_s)
                    self._objects.try_out(name_of(key))
                    self._objects.sign(name_of(key), "GET", self.lifetime_s)
                else:
                    self._objects.open()
            self._is_open = True

    @contextmanager
    def _errors(self, what: str, key: str = "") -> Iterator[None]:
        """Raises the system's errors as those of this module."""
        began = time.monotonic()
        try:
            yield
            self._gone_until = 0.0
        except OSError as error:
            if key and isinstance(error, FileNotFoundError):
                raise _not_there(key) from None
            if time.monotonic() - began >= _SILENT_S:
                self._gone_until = time.monotonic() + _GONE_S
            raise StoreError(f"{self.place} {what}: {error.strerror or error}") from error

    def _try_bucket(self) -> None:
        """Raises `StoreError` if the bucket is gone: all who wait to write to it would wait half a
        minute, a few at a time."""
        if self.bucket is not None and time.monotonic() < self._gone_until:
            raise StoreError(f"{self.place} does not answer")

    def sweep(self) -> int:
        """Removes arrays that have expired, of all servers. Returns the bytes of the others in a
        folder."""
        with self._errors("cannot be swept"):
            self._objects.sweep()
        return self.used_bytes

    def put(self, array: NDArray[Any], **metadata: str) -> StoredArray:
        """Stores `array`, whose last axis is contiguous; an object of a bucket also has the
        `metadata`. Raises `StoreError` if it does not fit or cannot be written."""
        self._try_bucket()
        with self._copying:
            file = npy_file(array)
        key, expires = _new_id(self.lifetime_s)
        name = name_of(key)
        self.open()
        with self._errors("cannot be written to"):
            self._objects.put(name, file.data, metadata)
            url = None if self.bucket is None else self._url_of_new(self.bucket, name)
        return StoredArray(key, expires, f"{self.place}/{name}", url)

    def _url_of_new(self, bucket: Bucket, name: str) -> str:
        """The signed URL of an object, which is deleted if there is none."""
        try:
            return bucket.sign(name, "GET", self.lifetime_s)
        except OSError:
            with suppress(OSError):
                bucket.delete(name)
            raise

    def size(self, key: str) -> int:
        """The bytes of an array's file. Raises the errors of this module."""
        name = name_of(key)
        if expiry_of(key) < time.time():
            raise _not_there(key)
        if self.bucket is not None:
            self.open()
        with self._errors("cannot be read", key):
            return self._objects.size(name)

    def read(self, key: str, spans: Iterable[tuple[int, int]]) -> bytes:
        """Bytes of an array's file: each span is the first and the one after the last. Raises as
        `size` does."""
        with self._errors("cannot be read", key):
            return self._objects.read(name_of(key), spans)

    def header(self, key: str) -> tuple[tuple[int, int, int], np.dtype[Any]]:
        """The shape [layers, rows, experts per token] and the dtype of an array. Raises as `size`
        does, and `CodecError` for a file that is damaged."""
        size = self.size(key)
        header = self.read(key, [(0, NPY_HEADER_BYTES)])
        shape, dtype, order = read_npy_header(BytesIO(header))
        if order != "C" or NPY_HEADER_BYTES + prod(shape) * dtype.itemsize != size:
            raise CodecError("its header and its size do not fit")
        return shape, dtype

    def signed_url(self, key: str, method: str) -> str:
        """Where a client without keys reads an array of a bucket until it expires."""
        assert self.bucket is not None
        self.size(key)
        seconds = max(expiry_of(key) - time.time(), 1)
        with self._errors("cannot be read", key):
            return self.bucket.sign(name_of(key), method, seconds)

    def delete(self, key: str) -> None:
        """Deletes an array of any server. Raises as `size` does."""
        self.size(key)
        with self._errors("cannot be changed", key):
            self._objects.delete(name_of(key))

    def discard(self, key: str) -> None:
        """Deletes an array that no client was told of. If that fails, it goes when it expires."""
        with suppress(LookupError, StoreError):
            self._try_bucket()
            with self._errors("cannot be changed", key):
                self._objects.delete(name_of(key))


def _new_id(lifetime_s: float) -> tuple[str, int]:
    """An id, and when its array expires."""
    expires = ceil(time.time() + lifetime_s)
    begin = f"{expires:08x}{secrets.token_hex(12)}"
    return begin + _checksum(begin), expires


def _checksum(begin: str) -> str:
    """The end of an id. It is no secret: it tells ids that were cut off, mistyped or made up from
    those of arrays that are gone."""
    return f"{crc32(begin.encode()):08x}"


def _not_there(key: str) -> LookupError:
    """Why nothing is stored by this id, which has the form of one."""
    begin = key[:-8]
    end = key[-8:]
    return ArrayGoneError(key) if end == _checksum(begin) else UnknownArrayError(key)


def name_of(key: str) -> str:
    """The name of an array in a folder or bucket. Raises `UnknownArrayError` for what is no id."""
    if not _ID.fullmatch(key):
        raise UnknownArrayError(key)
    return f"{hour_of(expiry_of(key))}/{key}.npy"


def expiry_of(key: str) -> int:
    return int(key[:8], 16)


def store_with(settings: Settings, default: Path) -> ArrayStore:
    """Creates the store; `default` is the folder if the settings name none."""
    return ArrayStore(
        settings.routed_experts_store or default,
        settings.routed_experts_store_bytes,
        settings.routed_experts_store_seconds,
    )
