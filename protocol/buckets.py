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
    client: Any = {
        # as the endpoint of the environment says
        "allow_http": True,
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "timeout": timedelta(seconds=REQUEST_S),
    }
    retries: Any = {"max_retries": 10, "retry_timeout": timedelta(seconds=RETRY_S)}
    with bucket_errors(url):
        return from_url(url, client_options=client, retry_config=retries)


@contextmanager
def bucket_errors(url: str) -> Iterator[None]:
    """Raises errors of obstore as OSError that names the bucket and says why, without the endpoint,
    keys and signed URLs. What is not there stays a FileNotFoundError."""
    from obstore.exceptions import BaseError

    if _user != os.getpid():
        raise OSError(_AFTER_FORK)
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, "it is not there", url) from None
    except (BaseError, OSError, ValueError) as error:
        raise OSError(errno.EIO, words_of(error), url) from None


def words_of(error: Exception) -> str:
    """What an error of obstore says to an operator."""
    text, _, _ = str(error).partition("\n\nDebug source")
    if code := re.search(r"<Code>(.*?)</Code>", text):
        message = _MESSAGE.search(text)
        return f"{code[1]}: {message[1]}" if message else code[1]
    _, _, reason = text.partition(" - ")
    words = _URL.sub("the store", reason or text).partition("\n")[0].strip()
    return words or type(error).__name__
