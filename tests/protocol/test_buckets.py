"""What is said of buckets; `tests/e2e/test_buckets.py` has a real one."""

import multiprocessing
import subprocess
import sys
from multiprocessing.connection import Connection

import pytest

from routed_experts.protocol.buckets import bucket_at, is_bucket, words_of

TOO_MANY = (
    "Generic S3 error: Error performing PUT http://10.0.0.1:9000/bucket/a.npy in 2.3ms, after 3 retries - "
    "HTTP error: error sending request\n\nDebug source:\nGeneric {\n uri: http://10.0.0.1:9000"
)
CLOSED = (
    "The operation lacked the necessary privileges to complete for path a: Error performing PUT "
    "http://10.0.0.1:9000/a in 2ms - Server returned non-2xx status code: 403 Forbidden: "
    '<?xml version="1.0"?>\n<Error><Code>InvalidAccessKeyId</Code><Message>No such key.</Message>'
    "<AWSAccessKeyId>AKIAEXAMPLE</AWSAccessKeyId></Error>"
)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (TOO_MANY, "HTTP error: error sending request"),
        (CLOSED, "InvalidAccessKeyId: No such key."),
        ("cannot reach http://10.0.0.1:9000/x?X-Amz-Signature=1", "cannot reach the store"),
        ("", "ValueError"),
    ],
)
def test_an_error_says_why_and_neither_endpoint_nor_keys(said: str, words: str) -> None:
    assert words_of(ValueError(said)) == words


def test_what_names_a_bucket() -> None:
    assert all(is_bucket(f"{scheme}://bucket/prefix") for scheme in ("s3", "gs", "az"))
    assert not any(map(is_bucket, ("s3", "/s3/x", "file:///x", "http://x/y", None, "")))


def _use(connection: Connection) -> None:
    try:
        bucket_at("s3://bucket/prefix").put("a", b"1")
    except OSError as error:
        connection.send(str(error))


def test_a_forked_process_is_told_why_it_cannot_use_buckets() -> None:
    """It would wait for threads that it does not have."""
    pytest.importorskip("obstore", reason="an extra")
    bucket_at("s3://bucket/prefix")
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_use, args=(theirs,))
    child.start()
    try:
        assert ours.poll(60), "it waits"
        assert "start it with spawn" in ours.recv()
    finally:
        child.kill()
        child.join()


def test_a_client_without_obstore_is_told_what_to_install() -> None:
    program = (
        "import sys; sys.modules['obstore'] = sys.modules['obstore.store'] = None\n"
        "from routed_experts.protocol.fetch import fetch, FetchError\n"
        "reference = {'uri': 's3://b/a.npy', 'shape': [1, 1, 1], 'dtype': 'int16'}\n"
        "try: fetch(reference, by_uri=True)\n"
        "except FetchError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "pip install 'routed-experts-server[store]'" in done.stdout, done.stderr
