"""Folders and files that no other user can change."""

import errno
import os
import stat
from pathlib import Path


def private_folder(folder: Path) -> None:
    """Makes a folder unless it is there.

    Raises:
        OSError: it cannot be made, or is a link, or of another user, or others may write to it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "it must be a folder of this user that nobody else may write to")


def open_private(path: str, flags: int) -> int:
    """For `open`: follows no link, and makes files that only this user reads."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
