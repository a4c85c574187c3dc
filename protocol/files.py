"""Opens files whose names come from elsewhere."""

import errno
import os
import stat

NOT_A_FILE = "it is no file, but a pipe, a device or a folder"


def open_file(path: str, flags: int) -> int:
    """For `open`: anything but a file is an `OSError`, and nothing waits for somebody at the other
    end of a pipe."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o600)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, NOT_A_FILE, path)
