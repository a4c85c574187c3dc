"""Azurite, Azure's own emulator of its store: `npm install azurite`, with its folder of commands in PATH."""

import base64
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from pathlib import Path

from tests.weed import free_ports

COMMAND = shutil.which("azurite-blob")
ACCOUNT = "devstoreaccount1"
KEY = base64.b64encode(b"a key of this test alone").decode()
CONTAINER = "container"


def environment(port: int) -> dict[str, str]:
    """The variables by which obstore finds the emulator."""
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        "AZURE_STORAGE_USE_EMULATOR": "true",
        "AZURITE_BLOB_STORAGE_URL": f"http://127.0.0.1:{port}",
    }


@contextmanager
def azurite(folder: Path) -> Iterator[int]:
    """The port of an emulator with an empty container. Its files are in `folder`."""
    assert COMMAND is not None
    (port,) = free_ports(1)
    flags = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder)]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            [COMMAND, *flags, "--skipApiVersionCheck"],
            env={**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        make_container(port, server, folder / "log")
        yield port
    finally:
        server.kill()
        server.wait()


def make_container(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    """As soon as the emulator answers. obstore makes none."""
    while server.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            break
        time.sleep(0.1)
    else:
        raise AssertionError(log.read_text()[-3000:])
    urllib.request.urlopen(request_for_container(port), timeout=60).close()


def request_for_container(port: int) -> urllib.request.Request:
    """With the signature that Azure calls Shared Key."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
    signed_headers = [f"{name}:{value}" for name, value in sorted(headers.items())]
    resource = [f"/{ACCOUNT}/{ACCOUNT}/{CONTAINER}", "restype:container"]
    text = "\n".join(["PUT", *[""] * 11, *signed_headers, *resource])
    digest = hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    url = f"http://127.0.0.1:{port}/{ACCOUNT}/{CONTAINER}?restype=container"
    return urllib.request.Request(url, None, headers, method="PUT")
