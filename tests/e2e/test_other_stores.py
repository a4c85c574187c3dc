"""Arrays by reference in stores other than S3, by obstore's clients for them: Azure's, with its own
emulator; Google's, with SeaweedFS, which speaks what that client speaks, but checks no signature of
Google's and keeps no metadata of that name. No emulator of Google's store has a `PUT` of its XML
interface."""

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from obstore.store import from_url

from routed_experts.protocol.fetch import FetchError, fetch
from routed_experts.server.outputs import buckets as stored_objects
from routed_experts.server.outputs.array_store import ArrayGoneError, ArrayStore
from tests.azurite import COMMAND, CONTAINER, azurite
from tests.azurite import environment as environment_of_azurite
from tests.weed import weed

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("weed")]

ARRAY = np.arange(4 * 10 * 2, dtype=np.int16).reshape(4, 10, 2)
LARGE = np.arange(6 * 4000 * 200, dtype=np.int16).reshape(6, 4000, 200)  # 9.6 MB
NO_AZURITE = pytest.mark.skipif(
    COMMAND is None, reason="npm's azurite is not a requirement of the tests"
)


def google_environment(folder: Path, port: int) -> dict[str, str]:
    """The variable by which obstore finds the keys of an account, here a new one's."""
    key = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    account = {
        "type": "service_account",
        "client_email": "test@example.iam.gserviceaccount.com",
        "private_key_id": "1",
        "private_key": key.decode(),
        "gcs_base_url": f"http://127.0.0.1:{port}",
    }
    file = folder / "account.json"
    file.write_text(json.dumps(account))
    return {"GOOGLE_SERVICE_ACCOUNT": str(file)}


@pytest.fixture(scope="module")
def google(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("google")
    with weed(folder / "weed", is_open=True) as server:
        yield google_environment(folder, server.port)


@pytest.fixture(scope="module")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with azurite(tmp_path_factory.mktemp("azurite")) as port:
        yield environment_of_azurite(port)


@pytest.fixture(
    params=[
        ("google", "gs://bucket/some/prefix"),
        pytest.param(("azure", f"az://{CONTAINER}/some/prefix"), marks=NO_AZURITE),
    ],
    ids=["google", "azure"],
)
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a store that the environment leads to."""
    fixture, url = request.param
    for name, value in request.getfixturevalue(fixture).items():
        monkeypatch.setenv(name, value)
    return str(url)


def names_in(url: str) -> list[str]:
    bucket = from_url(url, client_options={"allow_http": True})
    return [entry["path"] for part in bucket.list() for entry in part]


@pytest.mark.parametrize("array", [ARRAY, LARGE], ids=["small", "large"])
def test_an_array_is_stored_read_in_parts_and_deleted(url: str, array: np.ndarray) -> None:
    store = ArrayStore(url, lifetime_s=3600)
    stored = store.put(array, part="generated", choice="0", model="org/模型")
    assert store.size(stored.id) == 128 + array.nbytes
    assert store.header(stored.id) == (array.shape, array.dtype)
    reference = stored.reference(array, 0, 0, url=stored.url, uri=stored.place)
    for by_uri in (False, True):
        assert np.array_equal(fetch(reference, by_uri=by_uri), array)
        part = fetch(reference, layers=(1, 3), tokens=(2, 7), by_uri=by_uri)
        assert np.array_equal(part, array[1:3, 2:7])
    with urllib.request.urlopen(store.signed_url(stored.id, "GET")) as response:
        assert response.read()[128:] == array.tobytes()
        headers = {name.lower(): value for name, value in response.headers.items()}
    if url.startswith("az:"):
        assert headers["x-ms-meta-part"] == "generated"
    store.delete(stored.id)
    with pytest.raises(ArrayGoneError):
        store.size(stored.id)
    with pytest.raises(FetchError, match=stored.id) as error:
        fetch(reference)
    assert error.value.status == 404


def test_hours_that_have_passed_are_swept(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of others stay."""
    url = f"{url}-swept"
    stored_at = time.time()
    store = ArrayStore(url, lifetime_s=100)
    stored = store.put(ARRAY)
    theirs = ["1data/x.npy", f"{stored.place.split('/')[-2]}/labels.npy"]
    bucket = from_url(url, client_options={"allow_http": True})
    for name in theirs:
        bucket.put(name, b"1")
    store.sweep()
    assert len(names_in(url)) == 3
    later = SimpleNamespace(time=lambda: stored_at + 7300, monotonic=time.monotonic)
    monkeypatch.setattr(stored_objects, "time", later)
    store.sweep()
    assert sorted(names_in(url)) == sorted(theirs)
