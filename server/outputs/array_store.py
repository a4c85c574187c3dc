"""Arrays that wait to be fetched: `.npy` files in a folder that processes share, each with a share
of the bytes.

A process knows from its memory what its subfolder holds. An id is the subfolder's name and a random
number, so that every process finds every array. A file's modification time is when it expires: one
that is not written to its end has expired, and who deletes an array makes it expire. Who reads one
has it locked (`flock`), so that its bytes count; nobody waits for another process.
"""

import fcntl
import os
import re
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from heapq import heappop, heappush
from io import BytesIO, FileIO
from math import ceil
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from routed_experts.server.outputs import folders
from routed_experts.server.settings import DEFAULT_LIFETIME_S, Settings
from routed_experts.server.vllm_api import get_logger

logger = get_logger(__name__)

_ID = re.compile("[0-9a-f]{48}")
_BLOCK_BYTES = 4096  # files take whole blocks
_TRIES = 10  # to use a folder that others may be removing
_WARNING_S = 60.0
_GONE = 1000  # ids that stay in memory until they would have expired


class StoreError(Exception):
    """The folder cannot be used, or the array does not fit."""


class UnknownArrayError(LookupError):
    """No process that has a subfolder here made the id."""


class ArrayGoneError(LookupError):
    """The array has expired or was deleted."""


class StoredArray(NamedTuple):
    """A stored array."""

    id: str
    path: Path
    expires: int  # Unix time in seconds

    def reference(
        self, array: NDArray[Any], start: int, missing: int, **more: Any
    ) -> dict[str, Any]:
        """What a reference says of `array` [layers, n, K], which is stored here and begins at
        position `start`."""
        num_layers, num_rows, top_k = array.shape
        about = {
            "shape": [num_rows, num_layers, top_k],
            "dtype": array.dtype.name,
            "start": start,
            "missing": missing,
        }
        return {"id": self.id, **more, **about, "bytes": array.nbytes, "expires": self.expires}


class ArrayStore:
    """The share of a process in a folder of arrays, with a limit of bytes and a lifetime.

    Its subfolder is made when it is first needed, and again if somebody removed it. What ended
    processes left in a folder that is kept belongs to it from then on.
    """

    def __init__(
        self,
        folder: Path,
        # of all `count` processes; by default half of the space that is free at first
        max_bytes: int | None = None,
        lifetime_s: float = DEFAULT_LIFETIME_S,  # until an array expires
        keeps: bool = True,  # whether arrays outlive the process
        rank: int = 0,  # of this process among `count`
        count: int = 1,
    ) -> None:
        self.folder, self.lifetime_s = folder, lifetime_s
        self.max_bytes = None if max_bytes is None else max_bytes // count  # of this process
        self.used_bytes = 0  # also of files that are being written, or are gone and still read
        self._keeps, self._rank, self._count = keeps, rank, count
        self._name = ""  # of the subfolder
        self._owned: dict[str, FileIO] = {}  # the files that say so, by the names of subfolders
        # in bytes, by id, of arrays of this process and of ended ones
        self._sizes: dict[str, int] = {}
        # a heap; 0 for what is gone and still read. Some ids are gone.
        self._expiries: list[tuple[float, str]] = []
        # for what stands above; free while arrays are written and removed
        self._lock = threading.RLock()
        # Several threads would take twice the CPU time, and keep the event loop waiting for
        # Python's lock.
        self.writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="routed-experts-store")
        self._next_warning = 0.0
        if not keeps:
            # `atexit` does nothing in a process of another
            Finalize(None, self.close, exitpriority=0)

    def warn(self, message: str, *args: Any) -> None:
        """Logs a warning, once a minute, because a full store is a reason to log for each array."""
        if time.monotonic() >= self._next_warning:
            self._next_warning = time.monotonic() + _WARNING_S
            logger.warning(message, *args)

    def open(self, lost: str = "") -> str:
        """This process's subfolder, which is made if there is none, or only one called `lost`.
        Raises `StoreError`."""
        with self._lock:
            tries = iter(range(_TRIES))
            while self._name in ("", lost):
                try:
                    self._open(keeps=self._keeps or lost != "")
                except OSError as error:
                    if not isinstance(error, FileNotFoundError) or next(tries, None) is None:
                        raise StoreError(
                            f"{self.folder} cannot be used: {error.strerror}"
                        ) from error
            return self._name

    def _open(self, keeps: bool) -> None:
        self._name = ""
        folders.private_folder(self.folder)
        self._give_up()
        self._adopt(keeps)
        name, self._owned[name] = folders.new_subfolder(self.folder, self._rank)
        if self.max_bytes is None:
            disk = os.statvfs(self.folder)
            self.max_bytes = (disk.f_bavail * disk.f_frsize + self.used_bytes) // 2 // self._count
        self._name = name

    def _adopt(self, keeps: bool) -> None:
        """Takes over what ended processes of this rank left, or removes what any left. Raises
        OSError."""
        for name, owner in folders.without_process(self.folder):
            is_mine = not keeps or int(name[:2], 16) % self._count == self._rank
            if not is_mine or not (files := folders.tidy(self.folder / name, keeps)):
                owner.close()
                continue
            with self._lock:
                self._owned[name] = owner
                for stem, about in files:
                    self._hold(name + stem, about.st_mtime, _blocks(about.st_size))
                    self.used_bytes += self._sizes[name + stem]

    def _give_up(self) -> None:
        """Forgets the subfolders and what they hold."""
        self.used_bytes -= sum(self._sizes.values())
        self._sizes.clear()
        self._expiries.clear()
        while self._owned:
            _, owner = self._owned.popitem()
            fcntl.flock(owner, fcntl.LOCK_UN)  # processes that were forked may have the file open
            owner.close()

    def close(self) -> None:
        """Gives up the subfolder; with its arrays, if they are not kept. No other method may
        run."""
        self.writer.shutdown(cancel_futures=True)
        self._give_up()
        if not self._keeps:
            folders.remove_unused(self.folder)

    def has_room(self, num_bytes: int) -> bool:
        """Whether `num_bytes` more surely fit."""
        return (
            self._name != ""
            and self.max_bytes is not None
            and self.used_bytes + num_bytes <= self.max_bytes
        )

    def make_room(self, num_bytes: int) -> None:
        """Removes expired and deleted arrays until `num_bytes` more fit. Raises `StoreError` if
        they do not."""
        name = self.open()
        if not self.has_room(num_bytes):
            if not (self.folder / name).is_dir():
                self.open(lost=name)
            self.sweep(num_bytes)
        if not self.has_room(num_bytes):
            raise StoreError(f"{self.used_bytes} of {self.max_bytes} bytes are used")

    def put(self, array: NDArray[Any]) -> StoredArray:
        """Stores `array`, which must be C-contiguous. Raises `StoreError` if it does not fit or
        cannot be written."""
        header = npy_header(array.dtype.str, array.shape)
        size = _blocks(len(header) + array.nbytes)
        while not self._reserve(size):
            self.make_room(size)
        try:
            name = self.open()
            try:
                stored = self._write(name, header, array)
            except FileNotFoundError:  # somebody removed the folder, or renamed it
                stored = self._write(self.open(lost=name), header, array)
        except (OSError, StoreError) as error:
            with self._lock:
                self.used_bytes -= size
            raise StoreError(f"{self.folder} cannot be written to: {error}") from error
        self._hold(stored.id, stored.expires, size)
        return stored

    def _hold(self, key: str, expires: float, size: int) -> None:
        with self._lock:
            self._sizes[key] = size
            heappush(self._expiries, (expires, key))
            # most are of arrays that were deleted
            if len(self._expiries) > 2 * len(self._sizes) + _GONE:
                self._expiries = sorted(
                    (at, key) for at, key in self._expiries if key in self._sizes
                )

    def _reserve(self, size: int) -> bool:
        with self._lock:
            if fits := self.has_room(size):
                self.used_bytes += size
        return fits

    def _write(self, name: str, header: bytes, array: NDArray[Any]) -> StoredArray:
        number, expires = secrets.token_hex(16), ceil(time.time() + self.lifetime_s)
        path = f"{self.folder}/{name}/{number}.npy"
        try:
            with FileIO(path, "x", opener=folders.open_private) as file:
                folders.write_all(file, header)
                folders.write_all(file, array.reshape(-1).view(np.uint8).data)
                os.utime(file.fileno(), (expires, expires))
        except OSError:
            with suppress(OSError):
                os.unlink(path)
            raise
        return StoredArray(name + number, Path(path), expires)

    def _path(self, key: str) -> Path:
        if not _ID.fullmatch(key):
            raise UnknownArrayError(key)
        return self.folder / key[: folders.NAME_LENGTH] / f"{key[folders.NAME_LENGTH :]}.npy"

    def read(self, key: str) -> FileIO:
        """An array's file, whose bytes count until it is closed. Raises the errors of this
        module."""
        path = self._path(key)
        try:
            file = FileIO(path, opener=folders.open_private)
        except FileNotFoundError:
            raise (ArrayGoneError if path.parent.is_dir() else UnknownArrayError)(key) from None
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}") from error
        with suppress(BlockingIOError):  # else it is being removed
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            found = os.fstat(file.fileno())
            if found.st_nlink and found.st_mtime >= time.time():
                return file
        file.close()
        raise ArrayGoneError(key)

    def delete(self, key: str) -> None:
        """Deletes an array of any process. Raises as `read` does."""
        self.read(key).close()
        path = self._path(key)
        try:
            os.utime(path, (0, 0), follow_symlinks=False)
            if not self._expire(key):
                folders.tell(path.parent, key)  # if that is lost, its bytes count until it expires
                folders.remove_unread(path)
        except FileNotFoundError:
            raise ArrayGoneError(key) from None
        except OSError as error:
            raise StoreError(f"{path} cannot be deleted: {error.strerror}") from error
        self.sweep(0)

    def _expire(self, key: str) -> bool:
        """Lets an array of this process expire; False if it is another's."""
        with self._lock:
            if is_held := key in self._sizes:
                heappush(self._expiries, (0, key))
        return is_held

    def sweep(self, num_bytes: int | None = None) -> int:
        """Removes what is gone; of expired arrays only as many as it takes for `num_bytes` to fit,
        if given. If not, takes over what ended processes left too. Returns the bytes that are used
        then."""
        if num_bytes is None and self._name:
            with suppress(OSError):
                self._adopt(keeps=True)
        with self._lock:
            for key in [key for owner in self._owned.values() for key in folders.told(owner)]:
                self._expire(key)
        unremoved = []
        while (gone := self._pop_gone(num_bytes)) is not None:
            with suppress(OSError):  # then as if somebody reads it
                if folders.remove_unread(self._path(gone[0])):
                    with self._lock:
                        self.used_bytes -= gone[1]
                    continue
            unremoved.append(gone)
        for key, size in unremoved:
            self._hold(key, 0, size)
        return self.used_bytes

    def _pop_gone(self, num_bytes: int | None) -> tuple[str, int] | None:
        """The next array to remove, and its bytes."""
        with self._lock:
            while self._expiries and (expires := self._expiries[0][0]) < time.time():
                if expires and num_bytes is not None and self.has_room(num_bytes):
                    break
                _, key = heappop(self._expiries)
                if (size := self._sizes.pop(key, None)) is not None:
                    return key, size
        return None


def store_with(settings: Settings, default: Path, rank: int = 0, count: int = 1) -> ArrayStore:
    """Creates the store; `default` is the folder if the settings name none."""
    folder = settings.routed_experts_store
    about = (
        settings.routed_experts_store_bytes,
        settings.routed_experts_store_seconds,
        folder is not None,
    )
    return ArrayStore(default if folder is None else Path(folder), *about, rank, count)


def _blocks(size: int) -> int:
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES


@lru_cache
def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The first bytes of a `.npy` file of an array in C order."""
    buffer = BytesIO()
    described = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, described)  # type: ignore[no-untyped-call]
    return buffer.getvalue()
