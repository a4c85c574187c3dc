"""What is said of buckets; `tests/e2e/test_buckets.py` has a real one."""

import multiprocessing
import subprocess
import sys
from multiprocessing.connection import Connection

import pytest

from routed_experts.protocol import buckets
from routed_experts.protocol.buckets import bucket_at, bucket_errors, is_bucket, words_of

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


@pytest.mark.parametrize(
    ("url", "variable"),
    [
        ("s3://bucket/prefix", "AWS_ENDPOINT_URL"),
        ("s3://bucket/prefix", "AWS_ENDPOINT_URL_S3"),
        ("gs://bucket/prefix", "GOOGLE_BASE_URL"),
        ("az://container/prefix", "AZURE_STORAGE_ENDPOINT"),
    ],
)
def test_an_endpoint_without_a_scheme_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, url: str, variable: str
) -> None:
    """Which obstore takes, and panics at the first request."""
    pytest.importorskip("obstore", reason="an extra")
    monkeypatch.setenv(variable, "minio:9000")
    with pytest.raises(OSError, match=f"{variable} must begin with http:// or https://"):
        bucket_at(url)


def test_a_panic_of_obstore_is_an_error_of_the_bucket() -> None:
    """As it is of anything that no check foresees."""
    store = pytest.importorskip("obstore.store", reason="an extra")
    bucket_at("s3://bucket/prefix")
    panics = store.S3Store(
        "bucket", endpoint="minio:9000", access_key_id="a", secret_access_key="b", region="x"
    )
    with pytest.raises(BaseException, match="InvalidUri") as raised:
        panics.head("a")
    assert not isinstance(raised.value, Exception)
    with pytest.raises(OSError, match="obstore panicked") as error, bucket_errors("s3://bucket"):
        panics.head("a")
    assert error.value.filename == "s3://bucket"


@pytest.mark.parametrize("has_keys", [False, True])
def test_who_has_no_keys_is_told_where_they_are_not_looked_for(
    monkeypatch: pytest.MonkeyPatch, has_keys: bool
) -> None:
    pytest.importorskip("obstore", reason="an extra")
    nobody = "http://127.0.0.1:1"
    for name in ("AWS_ENDPOINT_URL", "AWS_METADATA_ENDPOINT"):
        monkeypatch.setenv(name, nobody)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
        if has_keys:
            monkeypatch.setenv(name, "key")
    monkeypatch.setattr(buckets, "RETRY_S", 0)
    objects = bucket_at("s3://bucket/prefix")
    with pytest.raises(OSError, match="error sending request") as error:  # noqa: SIM117
        with bucket_errors("s3://bucket/prefix"):
            objects.head("a")
    assert ("profiles and ~/.aws are not read" in str(error.value)) is not has_keys


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
