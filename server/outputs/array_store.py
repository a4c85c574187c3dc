"""Arrays that wait to be fetched: one `.npy` file each, in a folder that the processes of a host may share."""

import asyncio
import errno
import fcntl
import hashlib
import hmac
import os
import re
import secrets
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from io import BytesIO
from math import ceil
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

DEFAULT_LIFETIME_S, LONGEST_LIFETIME_S = 3600.0, 1e9

_SUFFIX, _UNFINISHED = ".npy", ".tmp"
_ID_BYTES, _PROOF_BYTES = 16, 8
_OWN_NAME = re.compile(rf"[0-9a-f]{{{2 * (_ID_BYTES + _PROOF_BYTES)}}}({re.escape(_SUFFIX)}|{re.escape(_UNFINISHED)})")
_TRIES = 10
"""Attempts to open a folder that another process may be removing."""
_COUNTER_BYTES = 8
_CLOSED = -1
_BLOCK_BYTES = 4096
"""Files take whole blocks."""
_WRITE_S = 600.0
"""Seconds after which a file that is still being written was left behind by a process that ended."""
_RETRY_S = 1.0
"""Seconds between two searches of a full store for expired arrays."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MEMORY = Path("/dev/shm")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def default_folder(name: str) -> Path:
    """The folder of a server or program called `name`, in memory if the system has a file system there."""
    parent = _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    return parent / f"routed-experts-{os.geteuid()}-{name}"


def remove_unused(folder: Path, ends: bool = False) -> None:
    """Removes a store's folder unless a process uses it: containers may share `/dev/shm`, ports and process ids.

    Args:
        ends: whether this process ends, so that its own stores do not count.
    """
    for store in [store for store in _open_stores if ends and store.folder == folder]:
        store.end()
    with suppress(OSError):
        descriptor = os.open(folder, _FOLDER)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        finally:
            os.close(descriptor)


def store_with(settings: Mapping[str, Any], default: Path) -> "ArrayStore":
    """A store as flags, or the keys of `additional_config`, say; in the folder `default` if they name none."""
    folder, max_bytes, lifetime_s = (settings.get(f"routed_experts_store{of}") for of in ("", "_bytes", "_seconds"))
    return ArrayStore(default if folder is None else Path(folder), max_bytes, float(lifetime_s or DEFAULT_LIFETIME_S))


def remove_at_exit(folder: Path) -> None:
    """Removes a store's folder that a killed process left, and that of this process when it ends."""
    remove_unused(folder)
    Finalize(None, remove_unused, (folder, True), exitpriority=0)  # `atexit` does nothing in a process of another


T = TypeVar("T")

_open_stores: "set[ArrayStore]" = set()
"""Those of this process, kept until they are closed: a lock outlives a store that nobody refers to. vLLM's server has
no hook for its end in which a plugin could close its own."""


class StoreError(Exception):
    """The folder cannot be used."""


class StoreFullError(StoreError):
    """The array does not fit into the store."""


class UnknownArrayError(LookupError):
    """The store never had an array with this id."""


class ArrayGoneError(LookupError):
    """The array has expired or was deleted."""


@dataclass(frozen=True)
class StoredArray:
    """A stored array.

    Attributes:
        expires: Unix time in seconds.
    """

    id: str
    path: Path
    expires: int


class ArrayStore:
    """A folder of arrays with a limit of bytes and a lifetime.

    An id has 128 random bits and a proof that this store made it, so that an array that is gone is told from one that
    never was, without a list of them. A file's modification time is when it expires. Files are written under another
    name and then renamed. The sum of their sizes is in a file that every process locks while it changes the sum.

    The folder is created, with mode 0700, when the store is first used, and again if somebody removes it. A store that
    was used keeps a shared lock on it. Every method but `__init__` and `close` raises `StoreError` if the folder cannot
    be used, or other users may write to it.

    Args:
        max_bytes: limit of all files together; by default half of the space that is free at first.
        lifetime_s: seconds until an array expires.
    """

    def __init__(self, folder: Path, max_bytes: int | None = None, lifetime_s: float = DEFAULT_LIFETIME_S) -> None:
        self.folder = folder
        self.lifetime_s = lifetime_s
        self._given_max_bytes = max_bytes
        self._next_search = 0.0
        self._key = secrets.token_bytes(_ID_BYTES)  # that of the folder, once it is open
        self._folder_file = self._lock_file = _CLOSED
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="routed-experts-store")
        self._thread_lock = threading.RLock()  # the lock of the file is the process's
        self._is_locked = False

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Runs what stores arrays in the store's own thread: several would take twice the CPU time, and would keep the
        event loop waiting for Python's lock."""
        return await asyncio.wrap_future(self.submit(function, *args))

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """As `run`, for those who do not wait."""
        return self._writer.submit(function, *args)

    @property
    def is_open(self) -> bool:
        """Whether the store was used."""
        return self._lock_file != _CLOSED

    def _open(self) -> None:
        """Opens the folder unless it is open and still there."""
        if self._is_locked or self._is_there():
            return
        with self._thread_lock:
            for attempt in range(_TRIES):
                if self._is_there():
                    return
                try:
                    self._open_folder()
                except OSError as error:
                    if not isinstance(error, FileNotFoundError) or attempt == _TRIES - 1:
                        raise StoreError(f"{self.folder} cannot be used: {error.strerror}") from error

    def _is_there(self) -> bool:
        return self.is_open and os.fstat(self._lock_file).st_nlink > 0

    def _open_folder(self) -> None:
        folder = self.folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise StoreError(f"{folder} must be a folder of this user that nobody else may write to")
        with ExitStack() as opened:
            opened.callback(os.close, folder_file := os.open(folder, _FOLDER))
            with suppress(OSError):  # some file systems have no locks of folders
                fcntl.flock(folder_file, fcntl.LOCK_SH)
            if not os.path.samestat(os.fstat(folder_file), folder.stat()):  # it was removed
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            opened.callback(os.close, lock_file := self._private_file(".lock"))
            fcntl.flock(lock_file, fcntl.LOCK_EX)
            with open(self._private_file(".key"), "r+b") as file:
                if key := file.read():
                    self._key = key
                else:
                    file.write(self._key)
            fcntl.flock(lock_file, fcntl.LOCK_UN)
            if self.is_open:  # other threads use these numbers
                os.dup2(folder_file, self._folder_file, inheritable=False)
                os.dup2(lock_file, self._lock_file, inheritable=False)
            else:
                self._folder_file, self._lock_file = folder_file, lock_file
                _open_stores.add(self)
                opened.pop_all()

    def _private_file(self, name: str) -> int:
        return os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def end(self) -> None:
        """Closes the store when its thread has done what it is at."""
        self._writer.shutdown(cancel_futures=True)
        self.close()

    def close(self) -> None:
        """Gives up the lock of the folder. No other method may run."""
        for file in {self._folder_file, self._lock_file} - {_CLOSED}:
            os.close(file)
        self._folder_file = self._lock_file = _CLOSED
        _open_stores.discard(self)

    @cached_property
    def max_bytes(self) -> int:
        """Limit of all files together."""
        if self._given_max_bytes is not None:
            return self._given_max_bytes
        used, disk = self.sweep(), os.fstatvfs(self._folder_file)
        return (disk.f_bavail * disk.f_frsize + used) // 2

    @contextmanager
    def _locked(self, waits: bool = True) -> Iterator[bool]:
        """Locks the store for other threads and processes. Says whether it did, if it does not wait for them."""
        if not self._thread_lock.acquire(blocking=waits):
            yield False
            return
        try:
            was_locked, self._is_locked = self._is_locked, self._is_locked or self._lock(waits)
            try:
                yield self._is_locked
            finally:
                if self._is_locked and not was_locked:
                    self._is_locked = False
                    fcntl.flock(self._lock_file, fcntl.LOCK_UN)
        finally:
            self._thread_lock.release()

    def _lock(self, waits: bool) -> bool:
        """Locks the store for other processes. False if one of them has it, and this one does not wait."""
        self._open()
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        except OSError as error:
            raise StoreError(f"{self.folder} cannot be locked: {error.strerror}") from error
        return True

    @property
    def used_bytes(self) -> int:
        """Bytes that all files take, including those that are being written."""
        self._open()
        return int.from_bytes(os.pread(self._lock_file, _COUNTER_BYTES, 0), "little")

    def _set_used(self, count: int) -> None:
        os.pwrite(self._lock_file, count.to_bytes(_COUNTER_BYTES, "little"), 0)

    @cached_property
    def is_in_memory(self) -> bool:
        """Whether nobody who reads a file waits for a disk."""
        return _MEMORY in self.folder.resolve().parents

    def has_room(self, num_bytes: int) -> bool:
        """Whether `num_bytes` more surely fit, so that nobody needs to search the folder."""
        return self.is_open and "max_bytes" in vars(self) and not self._lacking(num_bytes)

    @contextmanager
    def at_once(self, num_arrays: int, num_bytes: int) -> Iterator[bool]:
        """Whether arrays of `num_bytes` can be stored meanwhile without waiting for a disk, others, or a search."""
        if not (self.is_in_memory and self._is_there()):
            yield False
            return
        room = num_bytes + 2 * _BLOCK_BYTES * num_arrays  # with headers, in whole blocks
        with self._locked(waits=False) as is_locked:
            yield is_locked and self.has_room(room)

    def _lacking(self, num_bytes: int) -> str | None:
        used = self.used_bytes
        return f"{used} of {self.max_bytes} bytes are used" if used + num_bytes > self.max_bytes else None

    def make_room(self, num_bytes: int) -> str | None:
        """Why `num_bytes` more do not fit, after a search for expired arrays (once a second); None if they do."""
        with self._locked():  # so that others do not ask before the search has ended
            lacking = self._lacking(num_bytes)
            if lacking and time.monotonic() >= self._next_search:
                self.sweep()
                self._next_search = time.monotonic() + _RETRY_S
                lacking = self._lacking(num_bytes)
        return lacking

    def put(self, array: NDArray[Any]) -> StoredArray:
        """Stores `array`, which must be C-contiguous.

        Raises:
            StoreFullError: it does not fit, or the disk is full.
            StoreError: it cannot be written.
        """
        header = _header(array.dtype.str, array.shape)
        size = len(header) + array.nbytes
        key = self._new_id()
        path = f"{self.folder}/{key}{_SUFFIX}"
        unfinished = f"{self.folder}/{key}{_UNFINISHED}"
        expires = ceil(time.time() + self.lifetime_s)
        try:
            descriptor = self._create(unfinished, size)
            try:
                _write(descriptor, [header, array.reshape(-1).view(np.uint8).data])
                os.utime(descriptor, (expires, expires))
            finally:
                os.close(descriptor)
            with self._locked():
                os.rename(unfinished, path)
        except OSError as error:
            with suppress(OSError):
                self._remove(Path(unfinished))
            if error.errno in _FULL:
                raise StoreFullError(str(error)) from error
            raise StoreError(f"{self.folder} cannot be written to: {error.strerror}") from error
        return StoredArray(key, Path(path), expires)

    def _create(self, path: str, size: int) -> int:
        """A new file of `size` bytes, which count from now on."""
        with self._locked():
            if lacking := self.make_room(_room(size)):
                raise StoreFullError(lacking)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(descriptor, size)
            except OSError:
                os.close(descriptor)
                raise
            self._set_used(self.used_bytes + _room(size))
        return descriptor

    def find(self, key: str) -> Path:
        """The file of an array.

        Raises:
            UnknownArrayError: this store did not make the id.
            ArrayGoneError: the array has expired or was deleted.
            StoreError: the folder cannot be read.
        """
        number, proof = key[: 2 * _ID_BYTES], key[2 * _ID_BYTES :]
        if not hmac.compare_digest(self._proof(number).encode(), proof.encode()):
            raise UnknownArrayError(key)
        path = self.folder / f"{key}{_SUFFIX}"
        try:
            expires = path.stat().st_mtime
        except FileNotFoundError:
            raise ArrayGoneError(key) from None
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}") from error
        if expires < time.time():
            raise ArrayGoneError(key)
        return path

    def delete(self, key: str) -> None:
        """Deletes an array.

        Raises:
            UnknownArrayError: this store did not make the id.
            ArrayGoneError: the array has expired or was deleted.
        """
        path = self.find(key)
        try:
            if not self._remove(path):
                raise ArrayGoneError(key)
        except OSError as error:
            raise StoreError(f"{path} cannot be deleted: {error.strerror}") from error

    def _remove(self, path: Path) -> bool:
        """Deletes a file if it is there."""
        with self._locked():
            try:
                size = path.stat().st_size
                path.unlink()
            except FileNotFoundError:
                return False
            self._set_used(max(self.used_bytes - _room(size), 0))
        return True

    def sweep(self) -> int:
        """Deletes expired arrays and what ended processes left behind; returns the bytes that are used then."""
        try:
            with self._locked():
                return self._sweep()
        except OSError as error:
            raise StoreError(f"{self.folder} cannot be searched: {error.strerror}") from error

    def _sweep(self) -> int:
        now, used = time.time(), 0
        with os.scandir(self.folder) as files:
            for file in files:
                if not _OWN_NAME.fullmatch(file.name):  # of the user's, if this is the name of another folder
                    continue
                try:
                    found = file.stat(follow_symlinks=False)
                    if found.st_mtime + _WRITE_S * file.name.endswith(_UNFINISHED) < now:
                        os.unlink(file)
                    else:
                        used += _room(found.st_size)
                except FileNotFoundError:  # deleted by hand
                    continue
        self._set_used(used)
        return used

    def _new_id(self) -> str:
        number = secrets.token_hex(_ID_BYTES)
        return number + self._proof(number)

    def _proof(self, number: str) -> str:
        self._open()
        return hashlib.blake2b(number.encode(), key=self._key, digest_size=_PROOF_BYTES).hexdigest()


def _room(size: int) -> int:
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES


@lru_cache
def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    buffer = BytesIO()
    described = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, described)  # type: ignore[no-untyped-call]
    return buffer.getvalue()


def _write(descriptor: int, parts: list[bytes | memoryview]) -> None:
    """Writes all of `parts`; one call writes 2 GiB at most."""
    while parts:
        written = os.writev(descriptor, parts)
        while parts and written >= len(parts[0]):
            written -= len(parts.pop(0))
        if parts:
            parts[0] = memoryview(parts[0])[written:]
