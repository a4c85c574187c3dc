"""Folders that processes of a host share without waiting for each other: each writes into a
subfolder of its own.

A process has a file in its subfolder locked (`flock`) while it lives. Others try that lock, and
never wait for it.
"""

import errno
import fcntl
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path

from routed_experts.protocol.files import open_file

NAME_LENGTH = 16
"""Of a subfolder's name, in hexadecimal; its first two digits are the rank of its process."""
MEMORY = Path("/dev/shm")
_NAME = re.compile(rf"[0-9a-f]{{{NAME_LENGTH}}}")
_FILE = re.compile(r"[0-9a-f]{32}\.npy")
_OWNER, _OWNER_BYTES = ".owner", 1 << 20


def private_folder(folder: Path) -> None:
    """Makes a folder unless it is there. A link, or a folder that others own or may write to, is an
    OSError."""
    with suppress(FileExistsError):  # unlike `exist_ok`, if another process removes it just then
        folder.mkdir(mode=0o700, parents=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
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


def new_subfolder(folder: Path, rank: int) -> tuple[str, FileIO]:
    """The name of a new subfolder, and the file that this process keeps open while it lives. Raises
    `FileNotFoundError` if somebody just removed it, or `folder`."""
    name = f"{rank % 256:02x}{secrets.token_hex(NAME_LENGTH // 2 - 1)}"
    (folder / name).mkdir(mode=0o700)
    if (owner := _own(folder / name)) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return name, owner


def without_process(folder: Path) -> Iterator[tuple[str, FileIO]]:
    """The subfolders whose processes have ended. They belong to this one until it closes the
    file."""
    for name in filter(_NAME.fullmatch, os.listdir(folder)):
        with suppress(OSError):
            if (owner := _own(folder / name)) is not None:
                yield name, owner


def _own(subfolder: Path) -> FileIO | None:
    """The locked file; None if another process has locked it, or removed it."""
    path = subfolder / _OWNER
    owner = FileIO(path, "a+", opener=open_private)
    if try_lock(owner, path):
        owner.seek(0)
        return owner
    owner.close()
    return None


def try_lock(file: FileIO, path: Path) -> bool:
    """Locks a file unless another process has locked or removed it. Raises OSError if files cannot
    be locked."""
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    return False


def tell(subfolder: Path, word: str) -> None:
    """Leaves a word for the process that owns `subfolder`, in its file."""
    with open(subfolder / _OWNER, "ab", opener=open_private) as owner:
        owner.write(f"{word}\n".encode())


def told(owner: FileIO) -> list[str]:
    """The words left for the owner since the last call. A long file is cut; words behind its limit,
    and those left at that moment, are lost."""
    words = owner.read(_OWNER_BYTES).decode("ascii", "replace").split()
    if os.fstat(owner.fileno()).st_size > _OWNER_BYTES:
        owner.truncate(0)
        owner.seek(0)
    return words


def remove_unused(folder: Path) -> None:
    """Removes what ended processes left in a folder, and the folder if that was all."""
    with suppress(OSError):
        if folder.is_dir():
            private_folder(folder)
            for name, owner in without_process(folder):
                tidy(folder / name, keeps=False)
                owner.close()
            folder.rmdir()


def tidy(subfolder: Path, keeps: bool) -> list[tuple[str, os.stat_result]]:
    """Removes the arrays that expired, or all if they are not kept, unless somebody reads them, and
    the subfolder if that was all that it had. This process must own it. Returns the others."""
    left = []
    for file in os.scandir(subfolder):
        if _FILE.fullmatch(file.name):
            about = file.stat(follow_symlinks=False)
            if not stat.S_ISREG(about.st_mode):
                continue  # no process of ours made it
            if (keeps and about.st_mtime >= time.time()) or not remove_unread(Path(file.path)):
                left.append((file.name.removesuffix(".npy"), about))
    if not left:
        with suppress(OSError):  # the user may have files there
            (subfolder / _OWNER).unlink()
            subfolder.rmdir()
    return left


def remove_unread(path: Path) -> bool:
    """Removes a file unless somebody reads it; False then."""
    with suppress(FileNotFoundError), FileIO(path, "r+", opener=open_private) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        path.unlink()
    return True
