"""Folders that processes of a host share without waiting for each other: each writes into a subfolder of its own.

A process has a file in its subfolder locked (`flock`) while it lives. Others try that lock, and never wait for it.
"""

import errno
import fcntl
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path

NAME_LENGTH = 16
"""Of a subfolder's name, in hexadecimal; its first two digits are the rank of its process."""
MEMORY = Path("/dev/shm")
_NAME = re.compile(rf"[0-9a-f]{{{NAME_LENGTH}}}")
_OWNER, _OWNER_BYTES = ".owner", 1 << 20


def private_folder(folder: Path) -> None:
    """Makes a folder unless it is there.

    Raises:
        OSError: it cannot be made, or is a link, or of another user, or others may write to it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "it must be a folder of this user that nobody else may write to")


def default_folder(name: str) -> Path:
    """The folder of servers or programs called `name`, in memory if the system has a file system there."""
    parent = MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    return parent / f"routed-experts-{os.geteuid()}-{name}"


def open_private(path: str, flags: int) -> int:
    """For `open`: follows no link, and makes files that only this user reads."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def new_subfolder(folder: Path, rank: int) -> tuple[str, FileIO]:
    """The name of a subfolder for the process of this rank, and the file that it keeps open while it lives.

    Raises:
        OSError: it cannot be made; `FileNotFoundError` if somebody just removed it, or `folder`.
    """
    name = f"{rank % 256:02x}{secrets.token_hex(NAME_LENGTH // 2 - 1)}"
    (folder / name).mkdir(mode=0o700)
    if (owner := _own(folder / name)) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return name, owner


def without_process(folder: Path) -> Iterator[tuple[str, FileIO]]:
    """The subfolders whose processes have ended. They belong to this one until it closes the file."""
    for name in filter(_NAME.fullmatch, os.listdir(folder)):
        with suppress(OSError):
            if (owner := _own(folder / name)) is not None:
                yield name, owner


def _own(subfolder: Path) -> FileIO | None:
    """The locked file; None if another process has locked it, or removed it."""
    path = subfolder / _OWNER
    owner = FileIO(path, "a+", opener=open_private)
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(owner.fileno()), path.lstat()):
            owner.seek(0)
            return owner
    owner.close()
    return None


def tell(subfolder: Path, word: str) -> None:
    """Tells the process that owns `subfolder` a word, in its file."""
    with open(subfolder / _OWNER, "ab", opener=open_private) as owner:
        owner.write(f"{word}\n".encode())


def told(owner: FileIO) -> list[str]:
    """The words that others told the owner since it last asked. When the file is long it is cut: what others tell just
    then is lost."""
    words = owner.readall().decode("ascii", "replace").split()
    if owner.tell() > _OWNER_BYTES:
        owner.truncate(0)
        owner.seek(0)
    return words


def remove_empty(subfolder: Path) -> None:
    """Removes a subfolder without files of others; this process must own it."""
    with suppress(OSError):
        (subfolder / _OWNER).unlink()
        subfolder.rmdir()
