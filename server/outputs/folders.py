"""Arrays as files of a folder, which servers of one host may share: `FOLDER/HOUR/ID.npy`.

Files are written as they are: nobody knows an id before its file is whole, and what a killed
process left has its time to go in its name. So nothing is locked but the folder that nobody named,
by those who use it, so that the last one of them, or the next server, removes it.
"""

import errno
import fcntl
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path

from routed_experts.protocol.files import open_file
from routed_experts.server.outputs.folder_bytes import FolderBytes

MEMORY = Path("/dev/shm")
HOUR = re.compile(r"\d{4}-\d\d-\d\dT\d\d")
ARRAY = re.compile(r"[0-9a-f]{40}\.npy")
"""Parts of the names of our objects. Others in the same place are their users' own."""
_IN_USE = ".in-use"
_BLOCK_BYTES = 4096  # files take whole blocks
_TRIES = 300  # to use a folder that others may be removing
_PAUSE_S = 0.01  # between two of them
_END_OF_TIME = float(1 << 32)  # behind all that an id can say


def hour_of(expires: float) -> str:
    """The part of an object's name that says when it expires."""
    return time.strftime("%Y-%m-%dT%H", time.gmtime(expires))


def private_folder(folder: Path) -> None:
    """Makes a folder unless it is there. A link, or a folder that others own or may write to, is an
    OSError."""
    with suppress(FileExistsError):  # unlike `exist_ok`, if another process removes it just then
        folder.mkdir(mode=0o700, parents=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(
            errno.EPERM, "it must be a folder of this user that nobody else may write to"
        )


def default_folder(name: str) -> Path:
    """The folder of servers or programs called `name`, in memory if the system has a file system
    there."""
    parent = MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    return parent / f"routed-experts-{os.geteuid()}-{name}"


def open_private(path: str, flags: int) -> int:
    """For `open`: follows no link, opens only files, and makes files that only this user reads."""
    return open_file(path, flags | os.O_NOFOLLOW)


def write_all(file: FileIO, part: bytes | memoryview) -> None:
    """Writes to the end of `part`: a system call may write less."""
    left = memoryview(part)
    while left:
        left = left[os.write(file.fileno(), left) :]


def try_lock(file: FileIO, path: Path, kind: int = fcntl.LOCK_EX) -> bool:
    """Locks a file unless another process has locked or removed it. Raises OSError if files cannot
    be locked."""
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(file, kind | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    return False


def _blocks(size: int) -> int:
    """What a file of so many bytes takes."""
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES


class Folder:
    """The objects of a folder, with a limit of bytes. All methods raise OSError.

    Not obstore's `LocalStore`: it would replace `put`, `size`, `read` and `delete`, and none of the
    others. It hangs in a process that was forked after it was used, follows links, makes files that
    others may read, and takes up to four times the CPU for a call (obstore 0.12).
    """

    def __init__(self, path: Path, keeps: bool, max_bytes: int | None = None) -> None:
        self.path = path
        self.max_bytes = max_bytes  # by default half of the space that is free at first
        self._keeps = keeps  # whether it stays when nobody uses it
        self._in_use: FileIO | None = None  # a locked file that says so
        self._bytes = FolderBytes(self._remove_expired)

    @property
    def used_bytes(self) -> int:
        """Of all servers."""
        return self._bytes.used

    def open(self) -> None:
        """Makes the folder and counts what it has."""
        if not self._keeps:
            self.remove()  # what a process that was killed has left
        self._make()
        self._bytes.count()
        if self.max_bytes is None:
            disk = os.statvfs(self.path)
            self.max_bytes = (disk.f_bavail * disk.f_frsize + self.used_bytes) // 2

    def _make(self) -> None:
        for _ in range(_TRIES):
            with suppress(FileNotFoundError):
                private_folder(self.path)
                if self._keeps or self._is_locked():
                    return
            time.sleep(_PAUSE_S)  # another process is removing it
        raise BlockingIOError(errno.EAGAIN, "another process removes it again and again")

    def _is_locked(self) -> bool:
        """Locks the file, if this process has not: a lock that is given up for a moment is a
        moment in which another server may remove the folder."""
        path = self.path / _IN_USE
        if self._in_use is not None and os.path.samestat(
            os.fstat(self._in_use.fileno()), path.lstat()
        ):
            return True
        self._unlock()
        file = FileIO(path, "a+", opener=open_private)
        if try_lock(file, path, fcntl.LOCK_SH):
            self._in_use = file
            return True
        file.close()
        return False

    def close(self) -> None:
        """Ends this process's use of the folder, which goes if it is not kept and nobody else uses
        it."""
        if self._keeps:
            self._unlock()
        else:
            self.remove()

    def _unlock(self) -> None:
        if self._in_use is not None:
            fcntl.flock(self._in_use, fcntl.LOCK_UN)  # forked processes may have the file open
            self._in_use.close()
            self._in_use = None

    def has_room(self, num_bytes: int) -> bool:
        return self.max_bytes is not None and self.used_bytes + num_bytes <= self.max_bytes

    def make_room(self, num_bytes: int) -> None:
        """Counts again, without what has expired, if `num_bytes` more do not fit."""
        if self.has_room(num_bytes):
            return
        if self.path.is_dir():
            self._bytes.count_if_old()  # somebody may have deleted arrays
        else:
            self._bytes.count()  # somebody has removed the folder
        if not self.has_room(num_bytes):
            used = f"{self.used_bytes} of {self.max_bytes} bytes are used"
            raise OSError(errno.ENOSPC, f"{used}, {num_bytes} more do not fit")

    def put(self, name: str, content: bytes | memoryview, metadata: dict[str, str]) -> None:
        """Writes a file, which has no `metadata`."""
        size = _blocks(len(content))
        self._bytes.count_if_old()  # others may have written
        while not self._bytes.reserve(size, self.max_bytes or 0):
            self.make_room(size)
        try:
            self._write(name, content)
        except OSError:
            self._bytes.take_off(size)
            raise
        finally:
            self._bytes.has_written(size)

    def _write(self, name: str, content: bytes | memoryview) -> None:
        path = self.path / name
        for left in reversed(range(_TRIES)):
            try:
                file = FileIO(path, "x", opener=open_private)
                break
            except FileNotFoundError:  # the hour has begun, or somebody removed the folder
                if not left:
                    raise
                self._make()
                with suppress(FileNotFoundError):
                    private_folder(path.parent)
        try:
            with file:
                write_all(file, content)
        except OSError:
            with suppress(OSError):
                path.unlink()
            raise

    def size(self, name: str) -> int:
        status = (self.path / name).lstat()
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no file")
        return status.st_size

    def read(self, name: str, spans: Iterable[tuple[int, int]]) -> bytes:
        """The bytes of `spans`, each of which is the first byte and the one after the last."""
        # each time, so that a deleted array takes no memory: half the CPU of a FileIO
        descriptor = open_private(f"{self.path}/{name}", os.O_RDONLY)
        try:
            return b"".join(part for first, end in spans for part in _parts(descriptor, first, end))
        finally:
            os.close(descriptor)

    def delete(self, name: str) -> None:
        size = self.size(name)
        (self.path / name).unlink()
        self._bytes.take_off(_blocks(size))

    def sweep(self) -> None:
        """Removes what has expired, and counts the rest."""
        self._bytes.count()

    def _remove_expired(self, now: float) -> int:
        """Returns the bytes of the arrays that have not."""
        used = 0
        this_hour = hour_of(now)
        for hour in _entries(self.path, HOUR):
            for file in _entries(hour.path, ARRAY):
                with suppress(OSError):  # somebody else removed it
                    if int(file.name[:8], 16) < now:
                        os.unlink(file.path)
                    else:
                        used += _blocks(file.stat(follow_symlinks=False).st_size)
            if hour.name < this_hour:
                with suppress(OSError):  # the user may have files there
                    os.rmdir(hour.path)
        return used

    def remove(self) -> None:
        """Removes the folder with its arrays, unless a process uses it or it has other files."""
        self._unlock()
        with suppress(OSError):
            if not self.path.is_dir():
                return
            private_folder(self.path)
            path = self.path / _IN_USE
            with FileIO(path, "a+", opener=open_private) as file:
                if not try_lock(file, path):
                    return
                self._remove_expired(_END_OF_TIME)
                path.unlink()
            self.path.rmdir()


def remove_unused(folder: Path) -> None:
    """Removes a folder that nobody named, with its arrays, unless a process uses it."""
    Folder(folder, keeps=False).remove()


def _parts(descriptor: int, first: int, end: int) -> Iterator[bytes]:
    """The bytes of a file from `first` to `end`, or to its end: Linux reads 2 GiB at once at most."""
    while first < end:
        part = os.pread(descriptor, end - first, first)
        if not part:
            return
        yield part
        first += len(part)


def _entries(folder: str | Path, names: re.Pattern[str]) -> Iterator["os.DirEntry[str]"]:
    """What a folder has of ours, if it can be read: folders of hours, or files of arrays. No
    links, pipes or other things of these names: no process of ours made them."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            is_ours = entry.is_dir if names is HOUR else entry.is_file
            if names.fullmatch(entry.name) and is_ours(follow_symlinks=False):
                yield entry
