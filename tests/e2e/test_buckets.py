"""Arrays by reference in a bucket of a real S3 server, which may be slow, full, gone or closed."""

import re
import time
import tracemalloc
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import httpx
import numpy as np
import pytest
from obstore.store import from_url

from routed_experts.protocol import buckets
from routed_experts.protocol.batch import join_turns
from routed_experts.protocol.fetch import FetchError, fetch, fetch_all, fetch_spans
from routed_experts.server.http.arrays import stored_arrays
from routed_experts.server.http.arrays.references import ReferenceMaker
from routed_experts.server.outputs import array_store
from routed_experts.server.outputs import buckets as stored_objects
from routed_experts.server.outputs.array_store import ArrayGoneError, ArrayStore, StoreError
from tests.contract.engine import K, L
from tests.contract.served import rows_of, serving
from tests.contract.test_references import ENCODER
from tests.e2e.harness import ASK, COMPLETIONS, Server, prompt_of, wait_until
from tests.weed import KEY, SECRET, Proxy, Weed, environment, weed

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("weed")]

REFERENCE = {"routed_experts_delivery": "reference"}
URL = "s3://bucket/some/prefix"
ARRAY = np.arange(4 * 10 * 2, dtype=np.int16).reshape(4, 10, 2)


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weed]:
    with weed(tmp_path_factory.mktemp("weed")) as server:
        yield server


@pytest.fixture(scope="module")
def proxy(s3: Weed) -> Iterator[Proxy]:
    proxy = Proxy(s3.port)
    yield proxy
    proxy.close()


@pytest.fixture(autouse=True)
def _environment(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy.fault = ""
    for name, value in environment(proxy.port).items():
        monkeypatch.setenv(name, value)


def names_in(url: str) -> list[str]:
    bucket = from_url(url, client_options={"allow_http": True})
    return [entry["path"] for part in bucket.list() for entry in part]


def test_an_object_is_a_npy_file_that_says_what_it_is() -> None:
    store = ArrayStore(URL, lifetime_s=3600)
    metadata = {"request": " ä\n%41" + "x" * 10_000, "model": "org/模型"}
    stored = store.put(ARRAY, part="generated", choice="0", start="7", missing="0", **metadata)
    with urllib.request.urlopen(str(stored.url)) as response:
        content = response.read()
        headers = {name.lower(): value for name, value in response.headers.items()}
    assert content[128:] == ARRAY.tobytes()
    assert headers["x-amz-meta-part"] == "generated"
    assert headers["x-amz-meta-start"] == "7"
    assert unquote(headers["x-amz-meta-request"]) == metadata["request"][:256]
    assert unquote(headers["x-amz-meta-model"]) == metadata["model"]
    assert re.fullmatch(rf"{URL}/\d{{4}}-\d\d-\d\dT\d\d/{stored.id}.npy", str(stored.place))
    assert store.read(stored.id, [(128, 136), (140, 144)]) == content[128:136] + content[140:144]


@pytest.mark.parametrize("is_unsigned", [False, True])
def test_an_operator_decides_whether_arrays_are_signed(
    is_unsigned: bool, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the variable that obstore reads; to sign an array takes a checksum of all its bytes."""
    monkeypatch.setenv("AWS_UNSIGNED_PAYLOAD", str(is_unsigned).lower())
    store = ArrayStore(URL)
    store.open()
    proxy.requests.clear()
    stored = store.put(ARRAY)
    (head,) = [part for part in proxy.requests if part.startswith(b"PUT")]
    assert (b"x-amz-content-sha256: UNSIGNED-PAYLOAD" in head) is is_unsigned
    assert store.read(stored.id, [(128, 128 + ARRAY.nbytes)]) == ARRAY.tobytes()


def test_another_server_finds_deletes_and_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is handed over: an id says where its array is. Objects of others stay."""
    url, stored_at = f"{URL}-swept", time.time()
    one, other = ArrayStore(url, lifetime_s=100), ArrayStore(url, lifetime_s=100)
    first, second = one.put(ARRAY), one.put(ARRAY)
    bucket = from_url(url, client_options={"allow_http": True})
    theirs = ["1data/x.npy", f"{str(second.place).split('/')[-2]}/labels.npy"]
    for name in theirs:
        bucket.put(name, b"1")
    assert other.size(first.id) == 128 + ARRAY.nbytes
    other.delete(first.id)
    for store in (one, other):
        with pytest.raises(ArrayGoneError):
            store.size(first.id)
    assert other.sweep() == 0
    assert len(names_in(url)) == 3
    later = SimpleNamespace(time=lambda: stored_at + 7300, monotonic=time.monotonic)
    monkeypatch.setattr(stored_objects, "time", later)
    other.sweep()
    assert sorted(names_in(url)) == sorted(theirs)


FAULTS = {
    "full": "QuotaExceeded: The bucket is full.",
    "403": "AccessDenied: Access Denied.",
    "gone": "HTTP error",
    "truncated": "",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bucket_that_cannot_be_written_to_says_why_without_secrets(
    proxy: Proxy, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "RETRY_S", 1.0)
    store = ArrayStore(URL)
    store.open()
    proxy.fault = fault
    with pytest.raises(StoreError) as error:
        store.put(ARRAY)
    assert FAULTS[fault] in str(error.value)
    for secret in (KEY, SECRET, str(proxy.port), "http://"):
        assert secret not in f"{error.value!r} {error.value.__cause__!r}"
    proxy.fault = ""
    assert store.size(store.put(ARRAY).id)


def test_a_bucket_that_is_slow_is_waited_for(proxy: Proxy) -> None:
    store = ArrayStore(URL)
    store.open()
    proxy.fault = "held"
    num_before = len(proxy.requests)
    storing = store.writer.submit(store.put, ARRAY)
    wait_until(lambda: len(proxy.requests) > num_before, "nothing is sent")
    assert not storing.done()
    proxy.fault = ""
    proxy.goes_on.set()
    assert store.size(storing.result(60).id)


def test_an_array_in_several_parts_is_stored_whole_though_its_first_request_breaks(
    proxy: Proxy,
) -> None:
    store = ArrayStore(f"{URL}-parts")
    store.open()
    array = np.random.default_rng(0).integers(0, 128, (4, 200_000, 8), np.int16)  # 12.8 MB
    proxy.fault = "truncated"
    num_before = len(proxy.requests)
    storing = store.writer.submit(store.put, array)
    while len(proxy.requests) == num_before:
        time.sleep(0.01)
    proxy.fault = ""
    stored = storing.result(60)
    reference = stored.reference(array, 0, 0, url=stored.url)
    assert np.array_equal(fetch(reference), array)


@pytest.fixture(scope="module")
def api(tiny_model: Path, proxy: Proxy) -> Iterator[Server]:
    patch = pytest.MonkeyPatch()
    patch.setattr(buckets, "RETRY_S", 1.0)
    for name, value in environment(proxy.port).items():
        patch.setenv(name, value)
    small = ("--routed-experts-max-response-bytes", str(60 * L * K * 2))
    with serving(tiny_model, "--routed-experts-store", f"{URL}-api", *small) as server:
        yield server
    patch.undo()


def expected_of(answer: dict[str, Any], prompt: list[int]) -> np.ndarray:
    tokens = answer["choices"][0]["token_ids"]
    return rows_of([*prompt, *tokens[:-1]]).swapaxes(0, 1)


def test_references_into_a_bucket(api: Server) -> None:
    prompt = prompt_of(20, 17)
    answer = api.complete(prompt=prompt, max_tokens=5, **ASK, **REFERENCE)
    of_prompt, own = answer["prompt_routed_experts"], answer["choices"][0]["routed_experts"]
    headers = httpx.get(own["url"], timeout=None).headers
    assert headers["x-amz-meta-request"] in answer["id"]
    assert headers["x-amz-meta-model"] == "tiny"
    expected = expected_of(answer, prompt)
    assert own["uri"].startswith(f"{URL}-api/")
    assert (of_prompt["part"], own["part"], own["choice"]) == ("prompt", "generated", 0)
    for by_uri in (False, True):
        whole = fetch_all([of_prompt, own], by_uri=by_uri)
        assert np.array_equal(np.concatenate(whole, axis=1), expected)
        part = fetch(of_prompt, layers=(2, 5), tokens=(3, 11), by_uri=by_uri, api_key="key")
        assert np.array_equal(part, expected[2:5, 3:11])
    spans = join_turns([of_prompt, own])
    assert np.array_equal(fetch_spans(spans), expected)
    assert np.array_equal(fetch_spans(spans, layers=(3, L), tokens=(15, 22)), expected[3:, 15:22])


def test_the_servers_route_leads_to_the_bucket(api: Server) -> None:
    answer = api.complete(prompt=[1, 2, 3], max_tokens=2, **ASK, **REFERENCE)
    reference = answer["prompt_routed_experts"]
    with api.client() as client:
        path = f"/v1/routed_experts/rows/{reference['id']}"
        led = client.get(path)
        assert led.status_code == 307
        assert (
            len(httpx.get(led.headers["location"], timeout=None).content)
            == 128 + reference["bytes"]
        )
        assert client.get(f"{path}?layers=0:1").json()["error"]["param"] == "layers"
        assert client.delete(path).status_code == 204
        assert [client.request(method, path).status_code for method in ("GET", "DELETE")] == [
            410
        ] * 2
        assert client.get("/v1/routed_experts/rows/no-id").status_code == 404
    with pytest.raises(FetchError, match=re.escape(reference["uri"])) as error:
        fetch(reference)
    assert error.value.status == 404
    assert "Signature" not in str(error.value)


def test_clients_of_a_bucket_that_is_gone_hold_nobody_else(
    api: Server, s3: Weed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the threads that the server has for all requests."""
    monkeypatch.setattr(stored_arrays, "PATIENCE_S", 600.0)
    came: list[object] = []
    run = stored_arrays.run_in_thread

    async def run_and_note(*args: Any) -> Any:
        came.append(args)
        return await run(*args)

    monkeypatch.setattr(stored_arrays, "run_in_thread", run_and_note)
    answer = api.complete(prompt=[1, 2, 3], max_tokens=2, **ASK, **REFERENCE)
    path = f"/v1/routed_experts/rows/{answer['prompt_routed_experts']['id']}"
    unlimited = httpx.Limits(max_connections=None)
    with (
        httpx.Client(base_url=api.url, limits=unlimited, timeout=120) as client,
        ThreadPoolExecutor(60) as threads,
    ):
        with s3.stopped():
            methods = ["GET", "DELETE"] * 30
            waiting = [threads.submit(client.request, method, path) for method in methods]
            while len(came) < 60 and not any(response.done() for response in waiting):
                time.sleep(0.05)
            assert client.get("/").status_code == 307
            assert not any(response.done() for response in waiting)
        statuses = [response.result().status_code for response in waiting]
    assert 204 in statuses
    assert set(statuses) <= {307, 204, 410}


def test_a_client_gives_up_on_a_bucket_that_is_gone(
    api: Server, s3: Weed, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = api.complete(prompt=[1, 2, 3], max_tokens=2, **ASK, **REFERENCE)
    path = f"{api.url}/v1/routed_experts/rows/{answer['prompt_routed_experts']['id']}"
    with monkeypatch.context() as patch, s3.stopped():
        patch.setattr(stored_arrays, "PATIENCE_S", 1.0)
        for method in ("GET", "DELETE"):
            response = httpx.request(method, path, timeout=120)
            assert response.status_code == 503
            assert "has not answered for 1 s" in response.text
    # what was not waited for goes on where the bucket comes back
    assert httpx.get(path, timeout=120).status_code in (307, 410)


@pytest.mark.parametrize("fault", ["full", "403", "gone", "truncated"])
@pytest.mark.parametrize("stream", [False, True])
def test_no_reference_leads_to_nothing_whatever_happens_to_the_bucket(
    api: Server, proxy: Proxy, fault: str, stream: bool
) -> None:
    """Rows that fit come inline, others are an error of the store: none is lost in silence."""
    proxy.fault = fault
    body = {"model": "tiny", "prompt": [1, 2], "max_tokens": 3, "stream": stream, **ASK}
    with api.client() as client:
        short = client.post(COMPLETIONS, json=body | REFERENCE)
        long = client.post(
            COMPLETIONS, json=body | REFERENCE | {"max_tokens": 90, "ignore_eos": True}
        )
    proxy.fault = ""
    assert short.status_code == 200
    assert '"data":"' in short.text
    assert '"url"' not in short.text + long.text
    assert (long.status_code, '"error"' in long.text) == (200 if stream else 507, True)
    for secret in (KEY, SECRET, str(proxy.port)):
        assert secret not in long.text


def references_of(store: ArrayStore, num_choices: int) -> "Future[Any]":
    """An answer that stores an array for each choice."""
    maker = ReferenceMaker(store)
    arrays = [("routed_experts", choice, 0, []) for choice in range(num_choices)]
    return store.writer.submit(maker.references, ENCODER, arrays)


def test_an_array_is_copied_once_on_its_way_to_a_bucket() -> None:
    """To join what is sent takes memory under Python's lock, while the event loop waits."""
    store = ArrayStore(f"{URL}-copied")
    store.open()
    rows = np.zeros((20_000, L, K), np.int16)
    maker = ReferenceMaker(store)
    tracemalloc.start()
    (made,), _ = maker.references(ENCODER, [("routed_experts", 0, 0, [rows])])
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert made["routed_experts"]["bytes"] == rows.nbytes
    assert rows.nbytes < most_bytes < 1.5 * rows.nbytes


@pytest.mark.long
def test_answers_do_not_take_turns_to_wait_for_a_bucket_that_is_gone(
    s3: Weed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers nothing: the first requests end after half a minute, and the others with them."""
    monkeypatch.setattr(buckets, "REQUEST_S", 2.0)
    monkeypatch.setattr(buckets, "RETRY_S", 0.1)
    monkeypatch.setattr(array_store, "_SILENT_S", 1.0)
    monkeypatch.setattr(array_store, "_GONE_S", 5.0)
    store = ArrayStore(f"{URL}-many")
    store.open()
    with s3.stopped():
        began = time.monotonic()
        answers = [references_of(store, num_choices=4) for _ in range(256)]
        outcomes = [answer.result(60) for answer in answers]
        assert time.monotonic() - began < 10
    assert all(failure is not None and not any(made) for made, failure in outcomes)
    time.sleep(5)
    made, failure = references_of(store, num_choices=4).result(60)
    assert (failure, all(made)) == (None, True)


def test_arrays_of_a_client_that_left_are_deleted_behind_their_put(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though several threads write at once."""
    store = ArrayStore(f"{URL}-left")
    store.open()
    put = store._objects.put

    def put_slowly(*args: Any) -> None:
        time.sleep(0.3)  # clock: a delete that does not wait comes first
        put(*args)

    monkeypatch.setattr(store._objects, "put", put_slowly)
    maker = ReferenceMaker(store)
    arrays = [("routed_experts", 0, 0, [])]
    maker._prepared.append(store.writer.submit(maker.references, ENCODER, arrays))
    maker.end()
    store.writer.shutdown()
    assert names_in(f"{URL}-left") == []


def test_a_store_that_cannot_be_is_refused_at_start() -> None:
    from routed_experts.server.cli.console import CommandError
    from routed_experts.server.cli.serve import prepared_folders
    from routed_experts.server.settings import Settings

    patch = pytest.MonkeyPatch()
    patch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with (
        pytest.raises(CommandError, match="SignatureDoesNotMatch"),
        prepared_folders(Settings(routed_experts_store=URL), "test"),
    ):
        pass
    patch.undo()
