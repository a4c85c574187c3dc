"""Arrays as files of a folder, which servers of one host may share: `FOLDER/HOUR/ID.npy`.

Files are written as they are, and nothing is locked between processes: nobody knows an id before its
file is whole, and what a killed process left has its time to go in its name.
"""

import errno
import os
import re
import stat
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path

from routed_experts.protocol.files import open_file

MEMORY = Path("/dev/shm")
HOUR = re.compile(r"\d{4}-\d\d-\d\dT\d\d")
ARRAY = re.compile(r"[0-9a-f]{40}\.npy")
"""Parts of the names of our objects. Others in the same place are their users' own."""
_BLOCK_BYTES = 4096  # files take whole blocks
_END_OF_TIME = float(1 << 32)  # behind all that an id can say
_COUNT_S = 1.0
"""How old a count of a folder's bytes may be."""
_COUNT_SHARE = 0.02
"""Of the time, what counting may take: a folder with very many arrays is counted less often."""


def hour_of(expires: float) -> str:
    """The part of an object's name that says when it expires."""
    return time.strftime("%Y-%m-%dT%H", time.gmtime(expires))


def private_folder(folder: Path) -> None:
    """Makes a folder unless it is there. A link, or a folder that others own or may write to, is an
    OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(
            errno.EPERM, "it must be a folder of this user that nobody else may write to"
        )


def default_folder(address: str | int) -> Path:
    """The folder of the server at a port or socket, in memory if the system has a file system
    there."""
    parent = MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    return parent / f"routed-experts-{os.geteuid()}-{str(address).replace('/', '_')}"


def open_private(path: str, flags: int) -> int:
    """For `open`: follows no link, opens only files, and makes files that only this user reads."""
    return open_file(path, flags | os.O_NOFOLLOW)


def write_all(file: FileIO, part: bytes | memoryview) -> None:
    """Writes to the end of `part`: a system call may write less."""
    left = memoryview(part)
    while left:
        left = left[os.write(file.fileno(), left) :]


def _blocks(size: int) -> int:
    """What a file of so many bytes takes."""
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES


class Folder:
    """The objects of a folder, with a limit of bytes. All methods raise OSError.

    Not obstore's `LocalStore`: it would replace `put`, `size`, `read` and `delete`, and none of the
    others. It hangs in a process that was forked after it was used, follows links, makes files that
    others may read, and takes up to four times the CPU for a call (obstore 0.12).
    """

    def __init__(self, path: Path, max_bytes: int | None = None) -> None:
        self.path = path
        self.max_bytes = max_bytes  # by default half of the space that is free at first
        self.used_bytes = 0  # of all servers when they were counted, and of this one since then
        self._count_again = 0.0  # on the monotonic clock
        self._writing = threading.Lock()  # while arrays are counted or written

    def open(self) -> None:
        """Makes the folder and counts what it has."""
        private_folder(self.path)
        self.sweep()
        if self.max_bytes is None:
            disk = os.statvfs(self.path)
            self.max_bytes = (disk.f_bavail * disk.f_frsize + self.used_bytes) // 2

    def _make_room(self, num_bytes: int) -> None:
        """Counts again, without what has expired, unless that was just done. Not enough room is an
        error."""
        is_old = time.monotonic() >= self._count_again  # others may have written or deleted
        if is_old or not self.path.is_dir():  # or somebody has removed the folder
            self._count()
        assert self.max_bytes is not None  # it is open
        if self.used_bytes + num_bytes > self.max_bytes:
            used = f"{self.used_bytes} of {self.max_bytes} bytes are used"
            raise OSError(errno.ENOSPC, f"{used}, {num_bytes} more do not fit")

    def _count(self) -> None:
        began = time.monotonic()
        self.used_bytes = _remove_expired(self.path, time.time())
        ended = time.monotonic()
        self._count_again = ended + max(_COUNT_S, (ended - began) / _COUNT_SHARE)

    def put(self, name: str, content: bytes | memoryview, metadata: dict[str, str]) -> None:
        """Writes a file, which has no `metadata`."""
        size = _blocks(len(content))
        with self._writing:
            self._make_room(size)
            self._write(name, content)
            self.used_bytes += size

    def _write(self, name: str, content: bytes | memoryview) -> None:
        path = self.path / name
        try:
            file = FileIO(path, "x", opener=open_private)
        except FileNotFoundError:  # the hour has begun, or somebody removed the folder
            private_folder(self.path)
            private_folder(path.parent)
            file = FileIO(path, "x", opener=open_private)
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
        # without waiting for what is written: the next count is right whatever happens meanwhile
        self.used_bytes -= _blocks(size)

    def sweep(self) -> None:
        """Removes what has expired, and counts the rest."""
        with self._writing:
            self._count()


def remove_arrays(folder: Path) -> None:
    """Removes a folder that nobody named, with its arrays, unless it has other files."""
    with suppress(OSError):
        if folder.is_dir():
            private_folder(folder)
            _remove_expired(folder, _END_OF_TIME)
            folder.rmdir()


def _remove_expired(folder: Path, now: float) -> int:
    """Removes arrays that have expired. Returns the bytes of those that have not."""
    used = 0
    this_hour = hour_of(now)
    for hour in _entries(folder, HOUR):
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
