"""The files of recorded routing in a folder: each line is a response.

A file has the suffix `.part` until it is complete. A server that is killed leaves its open one so.
"""

import errno
import os
import secrets
import tempfile
import time
from collections.abc import Iterable
from io import FileIO
from itertools import count
from pathlib import Path

from routed_experts.server.outputs.folders import open_private, private_folder, write_all

FILE_BYTES = 64 << 20
FILE_S = 300.0
"""A file that has this size or age is complete."""
PART = ".part"
"""Suffix of a file's name until the file is complete."""


class FullError(Exception):
    """The files of this process have their maximum size."""


def prepare(place: str | Path) -> Path:
    """Makes the folder, and tries whether a file can be made there. Raises OSError."""
    folder = Path(str(place).removeprefix("file://"))
    private_folder(folder)
    with tempfile.TemporaryFile(dir=folder):
        pass
    return folder


class RecordFiles:
    """The files that one process writes in a folder, one after the other."""

    def __init__(self, folder: Path, room: int) -> None:
        self._folder = folder
        self.room = room  # maximum bytes of all files; those that were moved away do not count
        # of all machines that write to the folder
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
        began = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        name = f"{began}-{self._process}-{next(self._numbers)}.jsonl{PART}"
        self._path = self._folder / name
        self._begun = time.monotonic()
        # they tell texts, whatever the folder allows
        self._file = FileIO(self._path, "x", opener=open_private)
        return self._file

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
        if size:
            complete = self._path.with_suffix("")
            self._path.rename(complete)
            self._sizes[complete] = size
        else:
            self._path.unlink()
        del self._sizes[self._path]
