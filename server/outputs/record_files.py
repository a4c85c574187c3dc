"""The files of recorded routing in a folder: each line is a response.

A file has the suffix `.part` and a lock until it is complete. So a process that starts finds what
killed ones have left.
"""

import errno
import mmap
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from io import FileIO
from itertools import count
from pathlib import Path

from routed_experts.protocol.buckets import is_bucket
from routed_experts.server.outputs.buckets import Bucket
from routed_experts.server.outputs.folders import open_private, private_folder, try_lock, write_all

FILE_BYTES = 64 << 20
FILE_S = 300.0
"""A file that has this size or age is complete."""
PART = ".part"
"""Suffix of a file's name until the file is complete."""


class FullError(Exception):
    """The files of this process have their maximum size."""


def folder_of(place: str | Path) -> Path:
    """Where this machine writes files; those for a bucket stay there until they are sent."""
    if not is_bucket(place):
        return Path(str(place).removeprefix("file://"))
    name = sha256(str(place).encode()).hexdigest()[:8]
    return Path(tempfile.gettempdir()) / f"routed-experts-{os.geteuid()}-record-{name}"


def prepare(place: str | Path) -> None:
    """Makes the folder, and completes the files of killed processes, without a truncated last line.
    Tries whether a bucket can be written to. Raises OSError."""
    folder = folder_of(place)
    if is_bucket(place):
        Bucket(str(place)).try_out(f"{secrets.token_hex(8)}.trial")
    private_folder(folder)
    with tempfile.TemporaryFile(dir=folder):
        pass
    for path in folder.glob(f"*{PART}"):
        try:
            file = FileIO(path, "r+", opener=open_private)
        except OSError:  # a link or a folder: no server made it
            continue
        with file:
            is_left = False
            with suppress(OSError):  # a file system without locks
                is_left = stat.S_ISREG(os.fstat(file.fileno()).st_mode) and try_lock(file, path)
            if not is_left:  # a pipe; or another server writes it, or has completed it
                continue
            if size := os.fstat(file.fileno()).st_size:
                with mmap.mmap(file.fileno(), 0) as content:
                    size = content.rfind(b"\n") + 1
                file.truncate(size)
            _complete(path, size)


def _complete(path: Path, size: int) -> None:
    """Takes the suffix off a file's name, or removes an empty file."""
    if size:
        path.rename(path.with_suffix(""))
    else:
        path.unlink()


class RecordFiles:
    """The files that one process writes in a folder, one after the other."""

    def __init__(self, folder: Path, room: int) -> None:
        self._folder = folder
        self.room = room  # maximum bytes of all files; those that were moved away do not count
        # of all machines that write to a bucket
        self._process = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._numbers = count()
        self._file: FileIO | None = None
        self._path = folder
        self._begun = 0.0
        self._sizes: dict[Path, int] = {}  # of complete files that were there when last looked at

    def write(self, parts: Iterable[bytes]) -> int:
        """Writes a line, which comes in parts; returns its bytes. Raises `FullError` if it fits
        once complete files are moved away, and OSError if it never does. If that fails, nothing of
        it stays in the file."""
        file = self._file or self._open()
        begin = end = file.tell()
        has_room = True
        try:
            for part in parts:
                end += len(part)
                if end - begin > self.room:  # whatever is moved away
                    raise OSError(errno.EFBIG, f"it takes more than the {self.room} bytes of room")
                has_room = has_room and self._has_room(end)
                if has_room:  # else the rest is only counted: it may be too large for ever
                    write_all(file, part)
            if not has_room:
                raise FullError
        except BaseException:
            self._undo(file, begin)
            raise
        return end - begin

    def _has_room(self, file_bytes: int) -> bool:
        """Whether the open file may have so many bytes."""
        if file_bytes <= self.room - sum(self._sizes.values()):
            return True
        self._sizes = {path: size for path, size in self._sizes.items() if path.exists()}
        return file_bytes <= self.room - sum(self._sizes.values())

    def _open(self) -> FileIO:
        is_mine = False
        while not is_mine:
            began = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
            name = f"{began}-{self._process}-{next(self._numbers)}.jsonl{PART}"
            self._path = self._folder / name
            self._begun = time.monotonic()
            # they tell texts, whatever the folder allows
            file = FileIO(self._path, "x", opener=open_private)
            is_mine = True
            with suppress(OSError):  # a file system without locks
                # else a server that begins has just removed it
                is_mine = try_lock(file, self._path)
            if not is_mine:
                file.close()
        self._file = file
        return file

    def _undo(self, file: FileIO, begin: int) -> None:
        try:
            file.truncate(begin)
            file.seek(begin)
        except OSError:  # the file keeps its suffix, and half a line
            self._sizes[self._path] = file.tell()
            self._file = None
            file.close()

    def rotate(self, at_once: bool = False) -> None:
        """Completes the open file, if it is large or old, or at once. Raises OSError."""
        file = self._file
        if file is None or not (
            at_once or file.tell() >= FILE_BYTES or time.monotonic() - self._begun >= FILE_S
        ):
            return
        self._file = None
        size = file.tell()
        file.close()
        self._sizes[self._path] = size  # also if it cannot be completed, for as long as it is there
        _complete(self._path, size)
        del self._sizes[self._path]
        if size:
            self._add_complete(self._path.with_suffix(""), size)

    def _add_complete(self, path: Path, size: int) -> None:
        self._sizes[path] = size

    def close(self, seconds: float) -> None:
        """Waits at most so long until complete files are where they are recorded: these are."""
