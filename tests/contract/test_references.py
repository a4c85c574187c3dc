"""Rows by reference, and rows at the end of a stream, through vLLM's real API process and
scheduler."""

import asyncio
import base64
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import numpy as np
import pytest
from fastapi import FastAPI, Request
from starlette.types import Message

from examples import dataset
from routed_experts.protocol.fetch import FetchError, Range, fetch
from routed_experts.protocol.models import RoutingOptions
from routed_experts.server.cli.serve import prepared_folders
from routed_experts.server.http.answers.response import CollectedRows, RoutedResponse, respond
from routed_experts.server.http.arrays import references
from routed_experts.server.http.arrays.references import ReferenceMaker
from routed_experts.server.http.encoding.encoding import Encoder
from routed_experts.server.http.encoding.wire_form import WireForm
from routed_experts.server.http.engine import ServerState
from routed_experts.server.http.routes.routes import router
from routed_experts.server.outputs import array_store
from routed_experts.server.outputs.array_store import ArrayStore
from routed_experts.server.outputs.folders import default_folder, remove_arrays
from routed_experts.server.settings import Settings
from tests.contract.engine import K, L
from tests.contract.served import rows_of, serving
from tests.e2e.harness import ASK, COMPLETIONS, Server, prompt_of, wait_until

GENERATE = "/inference/v1/generate"
AT_END, REFERENCE = {"routed_experts_stream": "at_end"}, {"routed_experts_delivery": "reference"}
SAMPLED = {"temperature": 1.0}
FILE_BYTES = 4096  # of a completion with four tokens, and of an empty array


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "arrays"


@pytest.fixture(scope="module")
def api(tiny_model: Path, folder: Path) -> Iterator[Server]:
    flags = ("--routed-experts-store", str(folder), "--routed-experts-store-paths")
    with serving(
        tiny_model, "--enable-scale-out", "--enable-return-routed-expert-weights", *flags
    ) as server:
        yield server


def get(server: Server, reference: dict[str, Any], **options: Any) -> np.ndarray:
    """What comes over HTTP."""
    return fetch({**reference, "path": None}, base_url=f"{server.url}/v1", **options)


def bare(array: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(array["data"]), array["dtype"]).reshape(array["shape"])


@pytest.fixture(scope="module")
def reference(api: Server) -> dict[str, Any]:
    answer: dict[str, Any] = api.complete(
        prompt=prompt_of(50, 11), max_tokens=1, **ASK, **REFERENCE
    )
    return answer["prompt_routed_experts"]


def request(
    server: Server,
    reference: dict[str, Any],
    method: str = "GET",
    query: str = "",
    *headers: tuple[str, str],
) -> httpx.Response:
    with server.client() as client:
        return client.request(method, f"/v1/{reference['url']}{query}", headers=[*headers])


@pytest.mark.parametrize(
    ("layers", "tokens"),
    [((0, L), (0, 50)), ((2, 5), (0, 50)), ((0, L), (7, 31)), ((4, 4), (50, 50)), ((3, L), (0, 9))],
)
def test_parts_of_an_array(
    api: Server, reference: dict[str, Any], layers: Range, tokens: Range
) -> None:
    part = np.load(reference["path"])[slice(*layers), slice(*tokens)]
    query = f"?layers={layers[0]}:{layers[1]}&tokens={tokens[0]}:{tokens[1]}"
    for text in (query, query.replace(f":{L}", ":").replace("=0:", "=:")):
        whole, head = request(api, reference, "GET", text), request(api, reference, "HEAD", text)
        assert (whole.content, head.content) == (part.tobytes(), b"")
        for response in (whole, head):
            assert response.headers["x-routed-experts-shape"] == ",".join(map(str, part.shape))
            assert response.headers["x-routed-experts-dtype"] == "int16"
            assert response.headers["content-length"] == str(part.nbytes)
    for partial_array in (
        fetch(reference, layers=layers, tokens=tokens),
        get(api, reference, layers=layers, tokens=tokens),
    ):
        assert np.array_equal(partial_array, part)


def test_parts_that_there_are_not(api: Server, reference: dict[str, Any]) -> None:
    ranges = [
        "layers=0:99",
        "layers=3:2",
        "tokens=1",
        "tokens=-1:2",
        "tokens=a:b",
        "layers=",
        "layers=٣:4",
    ]
    for query in (*ranges, f"tokens=:{'9' * 5000}"):
        response = request(api, reference, "GET", f"?{query}")
        assert (response.status_code, response.json()["error"]["param"]) == (
            400,
            query.partition("=")[0],
        )
    for name in ("layers", "tokens"):
        with pytest.raises(ValueError, match=name):
            fetch(reference, **{name: (0, 1000)})


PART = "?layers=2:7&tokens=5:45"
PART_BYTES = 5 * 40 * K * 2


RANGES: dict[str, tuple[int, int] | None] = {
    "bytes=0-0": (0, 1),
    "bytes=10-1999": (10, 2000),
    "bytes=-7": (PART_BYTES - 7, PART_BYTES),
    f"bytes=9-{PART_BYTES * 2}": (9, PART_BYTES),
    # that make no sense
    **dict.fromkeys(("bytes=1-2,4-5", "bytes=x-y", "lines=1-2", "bytes=5-1", "bytes=-")),
    f"bytes={'9' * 5000}-": None,
}


def test_byte_ranges(api: Server, reference: dict[str, Any]) -> None:
    part = np.load(reference["path"])[2:7, 5:45].tobytes()
    for text, span in RANGES.items():
        response = request(api, reference, "GET", PART, ("Range", text))
        first, end = span or (0, PART_BYTES)
        status = 200 if span is None else 206
        assert (response.status_code, response.content) == (status, part[first:end]), text
        said = None if span is None else f"bytes {first}-{end - 1}/{PART_BYTES}"
        assert response.headers.get("content-range") == said
        head = request(api, reference, "HEAD", PART, ("Range", text))  # ranges are for GET alone
        assert (head.status_code, head.headers["content-length"]) == (200, str(PART_BYTES))


def test_a_range_that_is_conditional_or_behind_the_end(
    api: Server, reference: dict[str, Any]
) -> None:
    """No array has a tag, so that whoever names one gets the whole."""
    range_header = ("Range", "bytes=0-1")
    whole = request(api, reference, "GET", PART, range_header, ("If-Range", '"tag"'))
    assert (whole.status_code, len(whole.content)) == (200, PART_BYTES)
    behind = request(api, reference, "GET", PART, ("Range", "bytes=99999-"))
    assert (behind.status_code, behind.json()["error"]["param"]) == (416, "Range")
    assert behind.headers["content-range"] == f"bytes */{PART_BYTES}"


@pytest.mark.parametrize("is_in_memory", [True, False])
def test_long_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in_memory: bool) -> None:
    """Which are sent in many chunks; files on a disk are not read in the event loop."""
    threads = []

    def in_which_thread(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: threads.append(get_ident()) or function(*args)

    reads_header = in_which_thread(array_store.read_npy_header)
    monkeypatch.setattr(array_store, "read_npy_header", reads_header)
    monkeypatch.setattr(os, "pread", in_which_thread(os.pread))
    in_memory = default_folder(f"test-{os.getpid()}")
    store = ArrayStore(in_memory if is_in_memory else tmp_path / "store")
    array = np.random.default_rng(15).integers(0, 1 << 14, (6, 120_001, 7), dtype=np.int16)
    app = FastAPI()
    app.include_router(router)
    app.state.routed_experts = ServerState(store=store)

    async def fetch_all() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url=f"http://server{references.ROWS_PATH}/"
        ) as client:
            for layers, tokens in ((0, 6), (0, 120_001)), ((1, 6), (7, 100_008)), ((0, 6), (9, 12)):
                query = f"layers={layers[0]}:{layers[1]}&tokens={tokens[0]}:{tokens[1]}"
                part = array[slice(*layers), slice(*tokens)].tobytes()
                for first, end in (0, len(part)), (1, 77), (len(part) // 3, len(part) - 1):
                    headers = {"Range": f"bytes={first}-{end - 1}"} if first else {}
                    response = await client.get(f"{stored.id}?{query}", headers=headers)
                    assert response.content == part[first:end]

    try:
        stored = store.put(array)
        asyncio.run(fetch_all())
    finally:
        remove_arrays(in_memory)
    assert (get_ident() in threads) == is_in_memory


def test_arrays_that_there_are_not_and_a_folder_that_cannot_be_used(
    api: Server, folder: Path
) -> None:
    answer = api.complete(prompt="abc", max_tokens=2, **ASK, **REFERENCE)
    stays, reference = answer["prompt_routed_experts"], answer["choices"][0]["routed_experts"]
    assert request(api, reference, "DELETE").status_code == 204
    assert not Path(reference["path"]).exists()
    elsewhere = folder.with_name("elsewhere")
    ill_formed = {**stays, "url": stays["url"].replace("rows/", "rows/0000")}
    never_was = {**stays, "url": f"routed_experts/rows/{stays['id'][:8]}{'5' * 32}"}
    for wanted, status in ((reference, 410), (ill_formed, 404), (never_was, 404), (stays, 500)):
        if status == 500:
            folder.rename(elsewhere)
            folder.touch()
        for method in ("HEAD", "DELETE", "GET"):
            response = request(api, wanted, method)
            assert response.status_code == status
        assert response.json()["error"]["code"] == status
        with pytest.raises(FetchError) as error:
            get(api, wanted)
        assert error.value.status == status
    folder.unlink()
    elsewhere.rename(folder)
    assert request(api, stays).status_code == 200


def test_urls_say_nothing_that_a_request_says(api: Server) -> None:
    """So that they lead to the server through any proxy, and a key nowhere else."""
    with api.client() as client:
        said = {"Host": "evil:1", "X-Forwarded-Proto": "https", "X-Forwarded-Prefix": "/evil"}
        body = {"model": "tiny", "prompt": "a", "max_tokens": 2, **ASK, **REFERENCE}
        answer = client.post(COMPLETIONS, json=body, headers=said).json()
    for referred in (answer["prompt_routed_experts"], answer["choices"][0]["routed_experts"]):
        assert referred["url"] == f"routed_experts/rows/{referred['id']}"
        assert get(api, referred).shape[0] == L


def test_two_ranks_fetch_their_own_layers_of_several_turns(api: Server) -> None:
    references, tokens = dataset.converse(api.url, "tiny")
    for layers in ((0, 3), (3, L)):
        base_url = f"{api.url}/v1"
        (ids,) = dataset.RoutingDataset(
            [references], layers, num_tokens := len(tokens) + 3, base_url
        )
        expected = rows_of(tokens[:-1])[:, slice(*layers)].swapaxes(0, 1)
        assert ids.shape == (layers[1] - layers[0], num_tokens, K)
        assert np.array_equal(ids[:, : len(tokens) - 1], expected)
        assert (ids[:, len(tokens) - 1 :] == -1).all()
        (cut,) = dataset.RoutingDataset([references], layers, 20, base_url)
        assert np.array_equal(cut, expected[:, :20])


LOGGED = "VLLM_DEBUG_LOG_API_SERVER_RESPONSE"
OF_OPERATORS = ("Passes", "holds_back", LOGGED)


@pytest.mark.release
@pytest.mark.parametrize("name", OF_OPERATORS)
def test_references_behind_the_middleware_of_operators(
    tiny_model: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = () if name == LOGGED else ("--middleware", f"tests.contract.middleware.{name}")
    if name == LOGGED:
        monkeypatch.setenv(LOGGED, "true")
    body = {"prompt": prompt_of(20, 17), "max_tokens": 3, **ASK, **REFERENCE}
    with serving(tiny_model, *flags) as server:
        answer = server.complete(**body)
        chunks = list(server.stream(COMPLETIONS, **body))
        tokens = answer["choices"][0]["token_ids"]
        expected = rows_of([*body["prompt"], *tokens[:-1]]).swapaxes(0, 1)
        for prompt, own in (
            (answer["prompt_routed_experts"], answer["choices"][0]["routed_experts"]),
            references_in(chunks),
        ):
            assert np.array_equal(get(server, prompt), expected[:, :20])
            assert np.array_equal(get(server, own), expected[:, 20:])


def references_in(chunks: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The reference to the rows of a stream's prompt, and that to those of its choice."""
    (prompt,) = (
        chunk["prompt_routed_experts"] for chunk in chunks if "prompt_routed_experts" in chunk
    )
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    (own,) = (choice["routed_experts"] for choice in choices if "routed_experts" in choice)
    return prompt, own


def limited(
    model: Path, folder: Path, num_bytes: int, *more: str
) -> AbstractContextManager[Server]:
    """A server with a store of so many bytes."""
    return serving(
        model,
        "--routed-experts-store",
        str(folder),
        "--routed-experts-store-bytes",
        str(num_bytes),
        *more,
    )


def test_a_prompt_that_does_not_fit_after_its_answer_comes_inline(
    tiny_model: Path, tmp_path: Path
) -> None:
    room = -(-(128 + 100 * L * K * 2) // FILE_BYTES) * FILE_BYTES
    body = {"prompt": prompt_of(100, 12), "max_tokens": 4, **ASK, **REFERENCE}
    with limited(tiny_model, tmp_path / "store", room) as server:
        chunks = [
            chunk for chunk in server.stream(COMPLETIONS, **body) if "routed_exp" in str(chunk)
        ]
        (folder,) = tmp_path.iterdir()
        folder.rename(tmp_path / "elsewhere")  # the store makes it again
        assert "url" in server.complete(**body)["choices"][0]["routed_experts"]
    assert len(chunks) > 1
    assert all("data" in chunk["prompt_routed_experts"] for chunk in chunks)
    assert ["routed_experts" in chunk["choices"][0] for chunk in chunks] == [False] * (
        len(chunks) - 1
    ) + [True]


def test_a_prompt_that_fits_where_its_answer_does_not(tiny_model: Path, tmp_path: Path) -> None:
    """It is told of once, with the last of several lines, and stays."""
    body = {"prompt": prompt_of(1, 12), "max_tokens": 300, "ignore_eos": True, **ASK, **REFERENCE}
    with limited(tiny_model, tmp_path / "store", FILE_BYTES) as server:
        chunks = [
            chunk for chunk in server.stream(COMPLETIONS, **body) if "routed_exp" in str(chunk)
        ]
        (reference,) = [
            chunk["prompt_routed_experts"] for chunk in chunks if "prompt_routed_experts" in chunk
        ]
        time.sleep(0.2)  # clock: what deletes it too early, does so now
        assert get(server, reference).shape == (L, 1, K)
    assert len(chunks) > 1
    assert sum(chunk["choices"][0]["routed_experts"]["shape"][0] for chunk in chunks) == 299


def test_arrays_without_rows_come_inline_whatever_the_limits(
    tiny_model: Path, tmp_path: Path
) -> None:
    with limited(
        tiny_model, tmp_path / "store", 200, "--routed-experts-max-response-bytes", "100"
    ) as server:
        said = server.complete(
            prompt=[7], max_tokens=1, routed_experts_prompt_start=1, **ASK, **REFERENCE
        )
    assert (
        said["prompt_routed_experts"]["data"] == said["choices"][0]["routed_experts"]["data"] == ""
    )


def test_arrays_that_no_client_was_told_of_are_deleted(tiny_model: Path, tmp_path: Path) -> None:
    """The rows of the choice fit the store; then those of the prompt fit neither it nor a
    response."""
    most = "--routed-experts-max-response-bytes", str(12 * L * K * 2)
    with limited(tiny_model, tmp_path / "store", 5 * FILE_BYTES, *most) as server:
        ask = {
            "model": "tiny",
            "prompt": prompt_of(18, 13),
            "max_tokens": 4,
            "stream": True,
            **ASK,
            **REFERENCE,
        }
        with server.client() as client:
            assert '"error"' in client.post(COMPLETIONS, json=ask).text
            wait_until_empty(tmp_path / "store")
            assert (
                '"url"'
                in client.post(COMPLETIONS, json=ask | {"routed_experts_prompt_start": 18}).text
            )
        assert len(stored_in(tmp_path / "store")) == 2


ENCODER = Encoder(WireForm(ids_shape=(L, K), num_experts=1 << 15))


def test_a_client_that_leaves_before_the_response_begins(tmp_path: Path) -> None:
    """Behind a middleware in which sending takes turns, the body is then never asked for."""
    maker = ReferenceMaker(ArrayStore(tmp_path / "store", 1 << 20))
    stored = []

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    class Answer(RoutedResponse):
        def encode(self, packed: bool) -> bytes:
            stored.append(self.delivery.references(self.encoder, [("routed_experts", 0, 0, [])]))
            return b"{}"

    async def leave() -> None:
        app = SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace()))
        request = Request(
            {"type": "http", "asgi": {"spec_version": "2.3"}, "headers": [], "app": app}
        )
        rows = CollectedRows(RoutingOptions(), (L, K))
        answer = Answer(SimpleNamespace(kv_transfer_params=None), rows, ENCODER, False, maker)  # type: ignore[arg-type]
        response = await respond(answer, request)
        await response(request.scope, receive, lambda message: asyncio.sleep(0))

    asyncio.run(leave())
    assert len(stored) == 1
    wait_until_empty(tmp_path / "store")


def stored_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.suffix in (".npy", ".tmp")]


def wait_until_empty(folder: Path) -> None:
    wait_until(lambda: not stored_in(folder), "arrays are left", 60)


class OneToken:
    """Asks a server for answers to a prompt of one token, whose own row is left out."""

    BODY: ClassVar = {
        "model": "tiny",
        "prompt": [5],
        "max_tokens": 4,
        "routed_experts_prompt_start": 1,
        **ASK,
    }

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def post(self, **more: Any) -> httpx.Response:
        return self._client.post(COMPLETIONS, json={**self.BODY, **more})

    def rows(self, **more: Any) -> Any:
        """The array of the answer, or its reference."""
        return self.post(**more).json()["choices"][0]["routed_experts"]

    def lines(self, **more: Any) -> list[str]:
        text = self.post(stream=True, **more).text
        return [line for line in text.splitlines() if line]


@pytest.fixture
def small_store(tiny_model: Path, tmp_path: Path) -> Iterator[tuple[Server, httpx.Client]]:
    """With a key; it has room for the array of one answer, and responses for that of another."""
    flags = ("--api-key", "k", "--root-path", "/llm")
    flags += ("--routed-experts-default", '{"routed_experts_delivery": "reference"}')
    flags += ("--routed-experts-max-response-bytes", str(6 * L * K * 2))
    flags += ("--routed-experts-store-seconds", "1000")
    num_bytes = 2 * FILE_BYTES + 700
    with (
        limited(tiny_model, tmp_path / "store", num_bytes, *flags) as server,
        server.client() as client,
    ):
        client.headers.update({"Authorization": "Bearer k"})
        yield server, client


def check_key(server: Server, reference: dict[str, Any]) -> None:
    """It is needed, whether a proxy strips the root path or not."""
    for base in (f"{server.url}/v1", f"{server.url}/llm/v1"):
        assert httpx.get(f"{base}/{reference['url']}", timeout=None).status_code == 401
        assert fetch(reference, base_url=base, api_key="k").shape == (L, 3, K)
        with pytest.raises(FetchError, match="401"):
            fetch(reference, base_url=base)


def test_a_store_with_keys_defaults_and_limits(
    small_store: tuple[Server, httpx.Client], tmp_path: Path
) -> None:
    server, client = small_store
    request = OneToken(client)
    first = request.rows()
    assert "path" not in first
    check_key(server, first)
    assert "data" in request.rows(routed_experts_delivery="inline")
    assert isinstance(request.rows(routed_experts_format="npy"), str)

    # Now the next rows do not fit: they come inline, if the limit of a response allows it.
    assert "data" in request.rows(max_tokens=3)
    assert any('"routed_experts":{"data"' in line for line in request.lines(max_tokens=3))
    failed = request.post(max_tokens=8)
    assert (failed.status_code, failed.json()["error"]["code"]) == (507, 507)
    *_, error, done = request.lines(max_tokens=8)
    assert (done, "max-response-bytes" in error) == ("data: [DONE]", True)

    for path in stored_in(tmp_path / "store"):
        path.unlink()
    assert client.get(f"/v1/{first['url']}").status_code == 410
    assert client.delete(f"/v1/{first['url']}").status_code == 410
    shutil.rmtree(tmp_path / "store")
    assert "url" in request.rows()


def test_a_full_store_where_only_the_server_asks_for_references(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Arrays come inline then, and answers without routing where nobody asked for it and it is too
    large."""
    defaults = json.dumps({"return_routed_experts": True, **REFERENCE})
    flags = (
        "--routed-experts-max-response-bytes",
        str(60 * L * K * 2),
        "--routed-experts-default",
        defaults,
    )
    with (
        limited(tiny_model, tmp_path / "store", 5 * FILE_BYTES, *flags) as server,
        server.client() as client,
    ):

        def post(num_tokens: int, max_tokens: int = 4, **more: Any) -> httpx.Response:
            body = {"model": "tiny", "prompt": prompt_of(num_tokens, 14), "max_tokens": max_tokens}
            return client.post(COMPLETIONS, json={**body, "ignore_eos": True, **more})

        assert "url" in post(3).json()["choices"][0]["routed_experts"]
        for more in ({}, ASK):
            assert len(bare(post(30, **more).json()["prompt_routed_experts"])) == 30
            assert '"prompt_routed_experts":{"data"' in post(30, stream=True, **more).text
        answer = post(100)
        assert (answer.status_code, "routed_exp" in answer.text) == (200, False)
        assert post(100, **ASK).status_code == 507
        long = post(3, max_tokens=90)
        assert (long.status_code, "routed_exp" in long.text) == (200, False)
        assert post(3, max_tokens=90, **ASK).status_code == 507


def test_the_folder_of_a_server_goes_when_it_begins_and_ends() -> None:
    port = f"test-{os.getpid()}"
    store = ArrayStore(default_folder(port), 1 << 20)
    left = store.put(np.zeros((2, 2, 2)))
    with prepared_folders(Settings(), port):
        assert not left.path.exists()
        assert store.put(np.zeros((2, 2, 2))).path.exists()
    assert not default_folder(port).exists()
