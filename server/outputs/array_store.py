"""Arrays that wait to be fetched: `.npy` files in a folder that processes share, each with a share of the bytes.

A process knows from its memory what its subfolder holds. An id is the subfolder's name and a random number, so that
every process finds every array. A file's modification time is when it expires; who deletes an array makes it expire
now. Who reads one has it locked (`flock`), so that its bytes count; nobody ever waits for a lock.
"""

import errno
import fcntl
import os
import re
import secrets
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from io import BytesIO, FileIO
from math import ceil
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from routed_experts.server.outputs import folders
from routed_experts.server.settings import DEFAULT_LIFETIME_S, Settings

_ID = re.compile("[0-9a-f]{48}")
_BLOCK_BYTES = 4096  # files take whole blocks
_TRIES = 10  # to use a folder that others may be removing
_WARNING_S = 60.0
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StoreError(Exception):
    """The folder cannot be used."""


class StoreFullError(StoreError):
    """The array does not fit into the store."""


class UnknownArrayError(LookupError):
    """No process that has a subfolder here made the id."""


class ArrayGoneError(LookupError):
    """The array has expired or was deleted."""


class StoredArray(NamedTuple):
    """A stored array."""

    id: str
    path: Path
    expires: int  # Unix time in seconds


class ArrayStore:
    """The share of a process in a folder of arrays, with a limit of bytes and a lifetime.

    Its subfolder is made when it is first needed, and again if somebody removed it. What ended processes left in a
    folder that is kept belongs to it from then on.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int | None = None,  # of all `count` processes; by default half of the space that is free at first
        lifetime_s: float = DEFAULT_LIFETIME_S,  # until an array expires
        keeps: bool = True,  # whether arrays outlive the process
        rank: int = 0,  # of this process among `count`
        count: int = 1,
    ) -> None:
        self.folder, self.lifetime_s = folder, lifetime_s
        self.is_in_memory = folders.MEMORY in folder.resolve().parents  # nobody who reads a file waits for a disk
        self.max_bytes = None if max_bytes is None else max_bytes // count  # of this process
        self.used_bytes = 0  # also of files that are being written, or are gone and still read
        self.tells_paths = False  # whether references name the files
        self._keeps, self._rank, self._count = keeps, rank, count
        self._name = ""  # of the subfolder
        self._owned: dict[str, FileIO] = {}  # the files that say so, by the names of subfolders
        self._held: OrderedDict[str, tuple[float, int]] = OrderedDict()  # expiry, bytes; by id, in the order of expiry
        self._read: dict[str, tuple[float, int]] = {}  # gone, but somebody reads them
        self._counting, self._opening = threading.Lock(), threading.RLock()
        # Several threads would take twice the CPU time, and keep the event loop waiting for Python's lock.
        self.writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="routed-experts-store")
        self._next_warning = 0.0

    def is_time_to_warn(self) -> bool:
        """True once a minute: a full store is a reason for each array."""
        if is_time := time.monotonic() >= self._next_warning:
            self._next_warning = time.monotonic() + _WARNING_S
        return is_time

    def open(self, lost: str = "") -> str:
        """The name of this process's subfolder. Makes one if there is none, or only the one called `lost`.
        Raises `StoreError`."""
        with self._opening:
            for attempt in range(_TRIES):
                if self._name != lost:
                    break
                try:
                    self._open(lost)
                except OSError as error:
                    if not isinstance(error, FileNotFoundError) or attempt == _TRIES - 1:
                        raise StoreError(f"{self.folder} cannot be used: {error.strerror}") from error
        return self._name

    def _open(self, lost: str) -> None:
        folders.private_folder(self.folder)
        if not (self._name or self._keeps):
            Finalize(None, self.close, exitpriority=0)  # `atexit` does nothing in a process of another
        self._give_up()
        left = []
        for name, owner in folders.without_process(self.folder):
            is_mine = name != lost and (not self._keeps or int(name[:2], 16) % self._count == self._rank)
            if is_mine and (files := folders.tidy(self.folder / name, self._keeps)):
                self._owned[name] = owner
                left += [(about.st_mtime, name + stem, _blocks(about.st_size)) for stem, about in files]
            else:
                owner.close()
        with self._counting:
            for expires, key, size in sorted(left):
                self._held[key] = expires, size
                self.used_bytes += size
        name, self._owned[name] = folders.new_subfolder(self.folder, self._rank)
        if self.max_bytes is None:
            disk = os.statvfs(self.folder)
            self.max_bytes = (disk.f_bavail * disk.f_frsize + self.used_bytes) // 2 // self._count
        self._name = name

    def _give_up(self) -> None:
        """Forgets the subfolders and what they hold."""
        with self._counting:
            self.used_bytes -= sum(size for _, size in [*self._held.values(), *self._read.values()])
            self._held.clear()
            self._read.clear()
        while self._owned:
            _, owner = self._owned.popitem()
            fcntl.flock(owner, fcntl.LOCK_UN)  # processes that were forked may have the file open
            owner.close()

    def close(self) -> None:
        """Gives up the subfolder; with its arrays, if they are not kept. No other method may run."""
        self.writer.shutdown(cancel_futures=True)
        self._give_up()
        if not self._keeps:
            folders.remove_unused(self.folder)

    def has_room(self, num_bytes: int) -> bool:
        """Whether `num_bytes` more surely fit."""
        return self._name != "" and self.max_bytes is not None and self.used_bytes + num_bytes <= self.max_bytes

    def make_room(self, num_bytes: int) -> str | None:
        """Why `num_bytes` more do not fit when what is gone was removed; None if they do. Raises `StoreError`."""
        name = self.open()
        if not self.has_room(num_bytes):
            if not (self.folder / name).is_dir():
                self.open(lost=name)
            self.sweep(num_bytes)
        return None if self.has_room(num_bytes) else f"{self.used_bytes} of {self.max_bytes} bytes are used"

    def put(self, array: NDArray[Any]) -> StoredArray:
        """Stores `array`, which must be C-contiguous. Raises `StoreFullError` if it does not fit, `StoreError` if it
        cannot be written."""
        header = _header(array.dtype.str, array.shape)
        size = _blocks(len(header) + array.nbytes)
        while not self._take(size):
            if lacking := self.make_room(size):
                raise StoreFullError(lacking)
        name = self._name
        try:
            try:
                stored = self._write(name, header, array)
            except FileNotFoundError:  # somebody removed the folder, or renamed it
                stored = self._write(self.open(lost=name), header, array)
        except (OSError, StoreError) as error:
            self._take(-size)
            kind = StoreFullError if getattr(error, "errno", None) in _FULL else StoreError
            raise kind(f"{self.folder} cannot be written to: {error}") from error
        with self._counting:
            self._held[stored.id] = stored.expires, size
        return stored

    def _take(self, size: int) -> bool:
        """Counts `size` bytes more, if they fit."""
        with self._counting:
            if fits := size < 0 or self.has_room(size):
                self.used_bytes += size
        return fits

    def _write(self, name: str, header: bytes, array: NDArray[Any]) -> StoredArray:
        number, expires = secrets.token_hex(16), ceil(time.time() + self.lifetime_s)
        path, unfinished = (f"{self.folder}/{name}/{number}.{suffix}" for suffix in ("npy", "tmp"))
        try:
            with open(unfinished, "xb", opener=folders.open_private) as file:
                file.write(header)
                file.write(array.reshape(-1).view(np.uint8).data)
                file.flush()
                os.utime(file.fileno(), (expires, expires))
            os.rename(unfinished, path)
        except OSError:
            with suppress(OSError):
                os.unlink(unfinished)
            raise
        return StoredArray(name + number, Path(path), expires)

    def _path(self, key: str) -> Path:
        if not _ID.fullmatch(key):
            raise UnknownArrayError(key)
        return self.folder / key[: folders.NAME_LENGTH] / f"{key[folders.NAME_LENGTH :]}.npy"

    def read(self, key: str) -> FileIO:
        """The file of an array of any process, whose bytes count until it is closed. Raises `UnknownArrayError`,
        `ArrayGoneError`, `StoreError`."""
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
            if key in self._held:
                self._remove(key)
            else:
                folders.tell(path.parent, key)  # if that is lost, its bytes count until it expires
                folders.remove_unread(path)
        except FileNotFoundError:
            raise ArrayGoneError(key) from None
        except OSError as error:
            raise StoreError(f"{path} cannot be deleted: {error.strerror}") from error

    def sweep(self, num_bytes: int | None = None) -> int:
        """Removes what is gone; of expired arrays only as many as it takes for `num_bytes` to fit, if given. Returns
        the bytes that are used then."""
        with self._opening:
            deleted = [key for owner in self._owned.values() for key in folders.told(owner)]
        for key in [*deleted, *self._read]:
            self._remove(key)
        while num_bytes is None or not self.has_room(num_bytes):
            with self._counting:
                key, (expires, _) = next(iter(self._held.items()), ("", (float("inf"), 0)))
            if expires >= time.time():
                break
            self._remove(key)
        return self.used_bytes

    def _remove(self, key: str) -> None:
        """Removes an array of this process that is gone; at the next sweep, if somebody reads it."""
        with self._counting:
            held = self._held.pop(key, None) or self._read.pop(key, None)
        if held is None:
            return
        is_removed = False
        with suppress(OSError):  # tried again too
            is_removed = folders.remove_unread(self._path(key))
        with self._counting:
            if is_removed:
                self.used_bytes -= held[1]
            else:
                self._read[key] = held


def store_with(settings: Settings, default: Path, rank: int = 0, count: int = 1) -> ArrayStore:
    """Creates the store; `default` is the folder if the settings name none."""
    folder = settings.routed_experts_store
    about = settings.routed_experts_store_bytes, settings.routed_experts_store_seconds, folder is not None
    store = ArrayStore(default if folder is None else Path(folder), *about, rank, count)
    store.tells_paths = settings.routed_experts_store_paths
    return store


def _blocks(size: int) -> int:
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES


@lru_cache
def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    buffer = BytesIO()
    described = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, described)  # type: ignore[no-untyped-call]
    return buffer.getvalue()
