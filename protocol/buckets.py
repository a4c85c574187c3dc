"""Buckets of object stores: S3 and what speaks like it, Google Cloud Storage, Azure. Needs obstore.

Keys and endpoints come from the environment variables that every tool reads (`AWS_…`, `GOOGLE_…`,
`AZURE_…`), and stand in no message.
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

SCHEMES = ("s3", "gs", "az")
NO_OBSTORE = (
    "Buckets need obstore: pip install 'routed-experts-server[store]', or [server] for a server."
)
_AFTER_FORK = (
    "buckets were used before this process was forked, and would wait forever: "
    "start it with spawn, or use them in one of the two only"
)

_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""The variables with an endpoint, of which obstore panics if it has no scheme."""
_S3_KEYS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_SKIP_SIGNATURE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
)
"""The variables that say with which keys, or that there are none."""
_NO_KEYS = (
    "no keys were found: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not set, and profiles and "
    "~/.aws are not read"
)
_PANICKED = "obstore panicked: see the lines above, on stderr"

CONNECT_S = 5.0
REQUEST_S = 30.0
RETRY_S = 20.0
"""How long a request to a bucket is tried again. Others wait as long if the bucket is gone."""

_MESSAGE = re.compile(r"<Message>(.*?)</Message>", re.DOTALL)
_BROKEN = re.compile(rf"({'|'.join(SCHEMES)}|file|https?):/(?!/)")
_URL = re.compile(r"\S+://\S+")

_user: int | None = None  # the process that has used obstore, whose threads a fork does not have


def is_bucket(place: object) -> bool:
    """Whether a store or file is named by the address of a bucket."""
    return str(place).partition("://")[0] in SCHEMES and "://" in str(place)


def is_broken_url(place: object) -> bool:
    """Whether a URL has lost a slash, as `pathlib.Path("s3://bucket")` takes one away: it would
    name a folder."""
    return _BROKEN.match(str(place)) is not None


def bucket_at(url: str) -> Any:
    """obstore's object for `url`, such as `s3://bucket/prefix`. Raises OSError."""
    global _user
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise OSError(NO_OBSTORE) from error
    if _user not in (None, os.getpid()):
        raise OSError(_AFTER_FORK)
    _user = os.getpid()
    _check_endpoint(url)
    client: Any = {
        # as the endpoint of the environment says
        "allow_http": True,
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "timeout": timedelta(seconds=REQUEST_S),
    }
    retries: Any = {"max_retries": 10, "retry_timeout": timedelta(seconds=RETRY_S)}
    with bucket_errors(url):
        return from_url(url, client_options=client, retry_config=retries)


def _check_endpoint(url: str) -> None:
    for name in _ENDPOINTS.get(url.partition("://")[0], ()):
        endpoint = os.environ.get(name)
        if endpoint and not endpoint.lower().startswith(("http://", "https://")):
            raise OSError(f"{name} must begin with http:// or https://")


@contextmanager
def bucket_errors(url: str) -> Iterator[None]:
    """Raises errors of obstore as OSError that names the bucket and says why, without the endpoint,
    keys and signed URLs, and its panics, which are no `Exception`. What is not there stays a
    FileNotFoundError."""
    from obstore.exceptions import BaseError

    if _user != os.getpid():
        raise OSError(_AFTER_FORK)
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, "it is not there", url) from None
    except (BaseError, OSError, ValueError) as error:
        words = words_of(error)
        if url.startswith("s3:") and not any(os.environ.get(name) for name in _S3_KEYS):
            words = f"{words} ({_NO_KEYS})"
        raise OSError(errno.EIO, words, url) from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # which nobody can import
            raise
        raise OSError(errno.EIO, _PANICKED, url) from None


def words_of(error: Exception) -> str:
    """What an error of obstore says to an operator."""
    text, _, _ = str(error).partition("\n\nDebug source")
    if code := re.search(r"<Code>(.*?)</Code>", text):
        message = _MESSAGE.search(text)
        return f"{code[1]}: {message[1]}" if message else code[1]
    _, _, reason = text.partition(" - ")
    words = _URL.sub("the store", reason or text).partition("\n")[0].strip()
    return words or type(error).__name__
