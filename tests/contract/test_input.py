"""Routing as an input over HTTP: what reaches the engine, and what is refused.

Around the engine that does arithmetic, which knows nothing of it: a request's `SamplingParams` are
looked at as they arrive there.
"""

import base64
import io
import json
import logging
import socket
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from starlette.types import Message, Receive, Scope, Send
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackEncoder

from routed_experts.capture.wire.transport import Told, attach, detach
from routed_experts.protocol.codec import decode
from routed_experts.protocol.models import INPUT_FIELDS
from routed_experts.protocol.routing_input import EncodedInput, RoutingInput
from routed_experts.server.http.drain import DrainMiddleware
from routed_experts.server.http.input_memory import InputMemory
from routed_experts.server.http.requests import routing_input
from routed_experts.server.http.requests.request import MSGPACK
from routed_experts.server.http.routes.unsupported_routes import INVOCATIONS
from routed_experts.server.outputs.array_store import ArrayStore
from routed_experts.server.outputs.folders import default_folder
from routed_experts.server.settings import SettingsError
from tests.contract import served as around
from tests.contract.engine import NUM_EXPERTS, K, L
from tests.contract.served import DECODER_LAYERS, LAYER_IDS, SIZES, ServedExecutor, served
from tests.contract.test_api import CHAT, CLOSED, COMPLETIONS, GENERATE, post, refused
from tests.e2e.harness import Server, prompt_of, wait_until

REPLAY, ACTIVATE, DEACTIVATE, BIAS = INPUT_FIELDS
GROUPS = (8, 2, 1)
"""Of the experts; two of them have just as many as a token takes."""
GROUP_SIZE = NUM_EXPERTS // GROUPS[0]
PROMPT = prompt_of(20, 1)
JSON = {"Content-Type": "application/json"}
FLAGS = (
    *SIZES,
    *("--hf-overrides", json.dumps({"num_hidden_layers": DECODER_LAYERS})),
    *("--enable-scale-out", "--enable-routed-experts-input"),
)


class TakesInput(ServedExecutor):
    """Gives the tokens the experts that their requests say."""

    groups = GROUPS

    def _init_executor(self) -> None:
        super()._init_executor()
        self._inputs: dict[str, RoutingInput] = {}
        self._num_told = 0

    def _update(self, step: Any) -> None:
        for new in step.scheduled_new_reqs:
            encoded = EncodedInput.of(new.sampling_params)
            if encoded is not None:
                self._inputs[new.req_id] = RoutingInput.decode(encoded)
        super()._update(step)

    def compute(self, request_id: str, sequence: Any, tokens: Any, start: int, end: int) -> Any:
        rows = super().compute(request_id, sequence, tokens, start, end)
        said = self._inputs.get(request_id)
        if said is None:
            return rows
        rows = rows.copy() if said.bias is None else steered(rows, said.bias)
        if said.rows is None:
            return rows
        for position in range(max(start, said.start), min(end, said.end)):
            rows_given = said.rows[position - said.start]
            is_given = (rows_given >= 0).all(axis=1)
            rows[position - start][is_given] = rows_given[is_given]
            self._num_told += 1
        return rows

    def _run(self, step: Any) -> Any:
        self._num_told = 0
        output = super()._run(step)
        running = [self._inputs.get(request_id) for request_id in step.num_scheduled_tokens]
        num_steered = sum(said is not None and said.bias is not None for said in running)
        rows = detach(output)
        if rows is not None:
            rows.told = Told(self._num_told, num_steered)
            attach(output, rows)
        return output


def steered(rows: NDArray[Any], bias: NDArray[np.float32]) -> NDArray[Any]:
    """The rows [n, L, K] with the experts that a bias activates, and without those that it bans."""
    scores = np.full((*rows.shape[:2], NUM_EXPERTS), -K)
    np.put_along_axis(scores, rows.astype(np.int64), -np.arange(K), axis=2)
    scores = scores + np.where(np.isinf(bias), bias, 0)
    order = np.argsort(-scores, axis=2, kind="stable")
    return order[..., :K].astype(rows.dtype)


@dataclass
class Arrived:
    """What reached the engine."""

    requests: list[Any] = field(default_factory=list)
    # of the message of each request: its own length, and those of the arrays beside it
    lengths: list[list[int]] = field(default_factory=list)

    def inputs(self) -> list[EncodedInput | None]:
        """What each request says of its routing."""
        return [EncodedInput.of(request.sampling_params) for request in self.requests]

    def input(self) -> RoutingInput:
        """That of the only request."""
        (encoded,) = self.inputs()
        assert encoded is not None
        return RoutingInput.decode(encoded)


@pytest.fixture(scope="module")
def api(tiny_model: Path) -> Iterator[Server]:
    with served(tiny_model, TakesInput, *FLAGS) as server:
        yield server


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> Arrived:
    arrived = Arrived()
    send = around.around.sent

    def sent(message: Any) -> Any:
        received = send(message)
        if isinstance(message, EngineCoreRequest):
            arrived.requests.append(received)
            frames = MsgpackEncoder().encode(message)
            arrived.lengths.append([memoryview(frame).nbytes for frame in frames])
        return received

    monkeypatch.setattr(around.around, "sent", sent)
    return arrived


def id_of_nothing(expiry: str) -> str:
    """An id as servers make them: when its array expires (in hexadecimal), digits at random, and
    the checksum of both."""
    begin = expiry + "0123456789ab" * 2
    return f"{begin}{zlib.crc32(begin.encode()):08x}"


def rows_for(num_rows: int, seed: int = 0) -> NDArray[np.int16]:
    """[n, L, K] of distinct experts."""
    random = np.random.default_rng(seed).random((num_rows, L, 2 * K))
    return np.argsort(random)[..., :K].astype(np.int16)


def array_of(rows: NDArray[Any], start: int = 0, **changes: Any) -> dict[str, Any]:
    """The `object` form."""
    data = base64.b64encode(np.ascontiguousarray(rows).tobytes()).decode()
    return {
        "data": data,
        "shape": [*rows.shape],
        "dtype": rows.dtype.name,
        "start": start,
        "missing": 0,
        **changes,
    }


def body_for(path: str, prompt: list[int] = PROMPT) -> dict[str, Any]:
    if path == GENERATE:
        return {"token_ids": prompt, "sampling_params": {"max_tokens": 2}}
    if path == CHAT:
        return {"messages": [{"role": "user", "content": "a b c"}], "max_tokens": 2}
    return {"prompt": prompt, "max_tokens": 2}


def answered(server: Server, path: str, **body: Any) -> Any:
    response = post(server, path, **body)
    assert response.status_code == 200, response.text
    return response.json()


def same(said: RoutingInput, expected: RoutingInput) -> None:
    """As the bytes for the engine are the same, everything is."""
    assert said.encode() == expected.encode()


# ---- what reaches the engine ----


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE, "/invocations"])
def test_rows_reach_the_engine(api: Server, arrived: Arrived, path: str) -> None:
    """Beside the message and not in it, independent of what is returned, and without a change of the
    answer's form."""
    rows = rows_for(5)
    answer = answered(api, path, **body_for(path), **{REPLAY: array_of(rows)})
    same(arrived.input(), RoutingInput(rows=rows))
    (message, *arrays) = arrived.lengths[0]
    assert message < 1000
    assert arrays == [rows.nbytes]
    assert "prompt_routed_experts" not in answer
    assert answer["choices"][0].get("routed_experts") is None


def test_rows_in_and_rows_out(api: Server, arrived: Arrived) -> None:
    rows = rows_for(len(PROMPT))
    body = {**body_for(COMPLETIONS), REPLAY: array_of(rows), "return_routed_experts": True}
    answer = answered(api, COMPLETIONS, **body)
    same(arrived.input(), RoutingInput(rows=rows))
    assert np.array_equal(decode(answer["prompt_routed_experts"]), rows)


@pytest.mark.parametrize("dtype", ["int16", "uint8", "int32", "uint16"])
def test_each_dtype_of_responses(api: Server, arrived: Arrived, dtype: str) -> None:
    """In the request, and in the store."""
    rows = rows_for(6)
    body = body_for(COMPLETIONS)
    reference = {"id": stored(api, rows.astype(dtype)), "start": 7, "url": "routed_experts/rows/x"}
    for said in (array_of(rows.astype(dtype), start=7), [reference]):
        arrived.requests.clear()
        answered(api, COMPLETIONS, **body, **{REPLAY: said})
        same(arrived.input(), RoutingInput(rows=rows, start=7))


def test_both_arrays_of_an_answer(api: Server, arrived: Arrived) -> None:
    """The router chooses for positions between them, and where a layer has a -1."""
    first, second = rows_for(5, 1), rows_for(4, 2)
    second[1, 2] = -1
    arrays = [array_of(second.astype(np.int32), start=8), array_of(first, start=2)]
    arrays.append(array_of(rows_for(0), start=12))  # an answer of one token
    answered(api, COMPLETIONS, **body_for(COMPLETIONS), **{REPLAY: arrays})
    between = np.full((1, L, K), -1, np.int16)
    same(arrived.input(), RoutingInput(rows=np.concatenate([first, between, second]), start=2))


def stored(server: Server, rows: NDArray[Any], lifetime_s: float = 60.0) -> str:
    """The id of an array in the server's store, which another process may have written."""
    port = server.url.rpartition(":")[2]
    store = ArrayStore(default_folder(port), 1 << 30, lifetime_s)
    return store.put(np.ascontiguousarray(rows.transpose(1, 0, 2))).id


def test_a_bias_for_every_token(api: Server, arrived: Arrived) -> None:
    expected = np.zeros((L, NUM_EXPERTS), np.float32)
    expected[0, 5] = 0.5  # decoder layer 1
    expected[3, 6] = np.inf  # decoder layer 5
    expected[7, 7] = -np.inf  # decoder layer 9
    said = {BIAS: [[1, 5, 0.5]], ACTIVATE: [[5, 6], [5, 6]], DEACTIVATE: [[9, 7]]}
    answered(api, CHAT, **body_for(CHAT), **said)
    same(arrived.input(), RoutingInput(bias=expected))


def test_an_array_of_biases(api: Server, arrived: Arrived) -> None:
    bias = np.random.default_rng(0).normal(size=(L, NUM_EXPERTS)).astype(np.float32)
    bias[2, 3] = -np.inf
    body = {**body_for(GENERATE), BIAS: array_of(bias), ACTIVATE: [[LAYER_IDS[0], 1]]}
    answered(api, GENERATE, **body)
    bias[0, 1] = np.inf
    same(arrived.input(), RoutingInput(bias=bias))


def test_several_choices_and_prompts(api: Server, arrived: Arrived) -> None:
    """Each is told the same."""
    body = {**body_for(COMPLETIONS), "n": 3, "temperature": 1.0, REPLAY: array_of(rows_for(5))}
    answered(api, COMPLETIONS, **body)
    assert len(arrived.requests) == 3
    assert len({said.digest for said in arrived.inputs() if said}) == 1
    arrived.requests.clear()
    answered(api, COMPLETIONS, prompt=[PROMPT, [1, 2]], max_tokens=2, **{DEACTIVATE: [[1, 2]]})
    assert [said is not None for said in arrived.inputs()] == [True, True]


def test_neighbours_are_told_nothing(api: Server, arrived: Arrived) -> None:
    answered(api, COMPLETIONS, **body_for(COMPLETIONS))
    answered(api, COMPLETIONS, **body_for(COMPLETIONS), **{REPLAY: [], ACTIVATE: []})
    assert arrived.inputs() == [None, None]


def post_packed(server: Server, **body: Any) -> httpx.Response:
    with server.client() as client:
        return client.post(
            COMPLETIONS,
            content=msgspec.msgpack.encode({"model": "tiny", **body_for(COMPLETIONS), **body}),
            headers={"Content-Type": MSGPACK},
        )


@pytest.mark.parametrize("is_list", [False, True])
def test_messagepack_needs_no_base64(api: Server, arrived: Arrived, is_list: bool) -> None:
    rows = rows_for(5)
    bias = np.full((L, NUM_EXPERTS), 0.25, np.float32)
    array = array_of(rows, data=rows.tobytes())
    biases = array_of(bias, data=bias.tobytes())
    response = post_packed(api, **{REPLAY: [array] if is_list else array, BIAS: biases})
    assert response.status_code == 200, response.text
    same(arrived.input(), RoutingInput(rows=rows, bias=bias))


def test_arrays_in_a_json_body_that_are_too_long(
    api: Server, arrived: Arrived, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same in MessagePack, or by reference, is taken."""
    rows = rows_for(5)
    body = body_for(COMPLETIONS)
    monkeypatch.setattr(routing_input, "JSON_BYTES", 300)
    response = post(api, COMPLETIONS, **body, **{REPLAY: array_of(rows)})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (413, 413)
    assert f"{REPLAY}: the arrays of a JSON body have at most 300 bytes" in error["message"]
    assert MSGPACK in error["message"]
    assert arrived.requests == []
    answered(api, COMPLETIONS, **body, **{REPLAY: {"id": stored(api, rows), "start": 0}})
    assert post_packed(api, **{REPLAY: array_of(rows, data=rows.tobytes())}).status_code == 200
    for reached in arrived.inputs():
        assert reached is not None
        same(RoutingInput.decode(reached), RoutingInput(rows=rows))


def test_the_length_of_anything_else_is_vllms_matter(api: Server) -> None:
    """A chat with images may have many megabytes."""
    long = "u" * (routing_input.JSON_BYTES + 1)
    answered(api, COMPLETIONS, **body_for(COMPLETIONS), **{DEACTIVATE: [[1, 2]]}, user=long)


# ---- what is refused ----


def replay(rows: NDArray[Any] | None = None, start: int = 0, **changes: Any) -> dict[str, Any]:
    return {REPLAY: array_of(rows_for(3) if rows is None else rows, start, **changes)}


def changed(index: tuple[int, ...], value: int) -> NDArray[np.int16]:
    rows = rows_for(3)
    rows[index] = value
    return rows


def whole_layer(expert: int) -> list[list[int]]:
    return [[LAYER_IDS[0], expert + index] for index in range(K + 1)]


def all_but(experts: range) -> list[list[int]]:
    return [[1, expert] for expert in range(NUM_EXPERTS) if expert not in experts]


REFUSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "another number of layers": (REPLAY, "must have 8 layers", replay(rows_for(3)[:, :4])),
    "every decoder layer": (
        REPLAY,
        "routed_experts_layers: moe",
        replay(np.zeros((3, DECODER_LAYERS, K), np.int16)),
    ),
    "another top-k": (REPLAY, "64 experts per token", replay(rows_for(3)[..., :5])),
    "a huge number of rows": (REPLAY, "of the prompt's", replay(shape=[1 << 30, L, K])),
    "fewer bytes than the shape has": (REPLAY, "bytes of an array", replay(shape=[4, L, K])),
    "another dtype than the bytes have": (REPLAY, "bytes of an array", replay(dtype="int32")),
    "no base64": (REPLAY, "in JSON as base64", replay(data="!" * 4096)),
    "padding within base64": (REPLAY, "in JSON as base64", replay(data="A===" * 1024)),
    "letters beyond ASCII": (REPLAY, "in JSON as base64", replay(data="é" * 4096)),
    "an expert that the model has not": (
        REPLAY,
        "must be ids of experts",
        replay(changed((1, 2, 3), 0).astype(np.int32) + NUM_EXPERTS),
    ),
    "an id that int16 has not": (
        REPLAY,
        "not 65535",
        replay(changed((1, 2, 3), -1).astype(np.uint16), dtype="uint16"),
    ),
    "an expert twice in a row": (
        REPLAY,
        f"twice in decoder layer {LAYER_IDS[2]} of row 1",
        replay(changed((1, 2, 3), int(rows_for(3)[1, 2, 4]))),
    ),
    "rows behind the prompt": (REPLAY, "end at position 21", replay(start=18)),
    "a start far behind the prompt": (REPLAY, "end at position", replay(start=(1 << 31) - 1)),
    "overlapping arrays": (
        REPLAY,
        "two arrays with a row of position 2",
        {REPLAY: [array_of(rows_for(3)), array_of(rows_for(3), start=2)]},
    ),
    "an id that no server made": (
        REPLAY,
        "no stored array",
        {REPLAY: {"id": "f" * 40, "start": 0}},
    ),
    "an array that is gone": (
        REPLAY,
        "expired or was deleted",
        {REPLAY: {"id": id_of_nothing("f" * 8), "start": 0}},
    ),
    "several prompts": (REPLAY, "for one prompt", {**replay(), "prompt": [PROMPT, PROMPT]}),
    "a layer without experts to activate": (
        ACTIVATE,
        "has decoder layer 4, which has no experts",
        {ACTIVATE: [[4, 0]]},
    ),
    "a layer without experts to bias": (BIAS, "decoder layer 0", {BIAS: [[0, 0, 1.0]]}),
    "a layer that is not there": (DEACTIVATE, "decoder layer", {DEACTIVATE: [[1 << 70, 0]]}),
    "an expert to deactivate that is not there": (
        DEACTIVATE,
        f"has expert {NUM_EXPERTS}",
        {DEACTIVATE: [[1, NUM_EXPERTS]]},
    ),
    "a negative expert": (BIAS, "has expert -1", {BIAS: [[1, -1, 0.5]]}),
    "an expert biased twice": (BIAS, "twice", {BIAS: [[1, 0, 0.5], [1, 0, 0.25]]}),
    "a bias of NaN": (BIAS, "must be numbers", {BIAS: [[1, 0, float("nan")]]}),
    "a bias beyond float32": (BIAS, "must be numbers", {BIAS: [[1, 0, 1e300]]}),
    "an integer beyond all floats": (BIAS, BIAS, {BIAS: [[1, 0, 10**400]]}),
    "an array of NaN": (
        BIAS,
        "NaN",
        {BIAS: array_of(np.full((L, NUM_EXPERTS), np.nan, np.float32))},
    ),
    "an array of biases of another model": (
        BIAS,
        "must have the shape",
        {BIAS: array_of(np.zeros((L, 64), np.float32))},
    ),
    "an array of biases that was cut": (
        BIAS,
        "bytes of an array",
        {BIAS: array_of(np.zeros((1, 1), np.float32), shape=[L, NUM_EXPERTS])},
    ),
    "more activated than are chosen": (
        ACTIVATE,
        f"has {K + 1} experts of decoder layer {LAYER_IDS[0]}",
        {ACTIVATE: whole_layer(0)},
    ),
    "activated in more groups than are chosen": (
        ACTIVATE,
        f"3 groups of decoder layer {LAYER_IDS[0]}",
        {ACTIVATE: [[1, group * GROUP_SIZE] for group in range(3)]},
    ),
    "fewer left than are chosen": (
        DEACTIVATE,
        f"leaves {K - 1} experts in decoder layer {LAYER_IDS[0]}",
        {DEACTIVATE: all_but(range(K - 1))},
    ),
    "a row with an expert that is deactivated": (
        REPLAY,
        f"in decoder layer {LAYER_IDS[0]} of row 0, which is never to be chosen",
        {**replay(), DEACTIVATE: [[1, int(rows_for(3)[0, 0, 0])]]},
    ),
    "beam search": (REPLAY, "beam search", {**replay(), "use_beam_search": True, "n": 2}),
    "beam search without the default": (
        "use_beam_search",
        "no empty field lifts it",
        {DEACTIVATE: [], "use_beam_search": True, "n": 2},
    ),
    "a transfer of KV": (
        REPLAY,
        "kv_transfer_params",
        {**replay(), "kv_transfer_params": {"do_remote_decode": True}},
    ),
    "null": (ACTIVATE, "must not be null", {ACTIVATE: None}),
}
"""By what is wrong: the field, a part of the message, and the fields of the request."""


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_names_the_field(api: Server, arrived: Arrived, case: str) -> None:
    param, message, fields = REFUSED[case]
    body = {"model": "tiny", **body_for(COMPLETIONS), **fields}
    with api.client() as client:
        response = client.post(
            COMPLETIONS,
            content=json.dumps(body),  # with NaN
            headers={"Content-Type": "application/json"},
        )
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert message in error["message"]
    assert arrived.requests == []


@pytest.mark.parametrize(
    ("starts", "message", "reads"),
    [
        ([0] * 1024, "two arrays with a row of position 0", 1),
        ([*range(0, 1024)], "end at position 1023", 0),
        ([0, 3, 6, 9, 11], "two arrays with a row of position 11", 1),
    ],
    ids=["at one position", "behind the prompt", "at many positions"],
)
def test_an_array_that_is_named_often_is_looked_up_once(
    api: Server, monkeypatch: pytest.MonkeyPatch, starts: list[int], message: str, reads: int
) -> None:
    """Positions are looked at first, so that a small body has little read."""
    key = stored(api, rows_for(3))
    header = ArrayStore.header
    read: list[str] = []

    def reading(store: ArrayStore, key: str) -> Any:
        read.append(key)
        return header(store, key)

    monkeypatch.setattr(ArrayStore, "header", reading)
    arrays = [{"id": key, "start": start} for start in starts]
    body = {**body_for(COMPLETIONS), REPLAY: arrays}
    assert message in refused(api, COMPLETIONS, REPLAY, **body)
    assert len(read) == reads


def test_weights_are_no_rows(api: Server) -> None:
    key = stored(api, rows_for(3).astype(np.float32))
    fields = {REPLAY: {"id": key, "start": 0}}
    assert "has weights" in refused(api, COMPLETIONS, REPLAY, **body_for(COMPLETIONS), **fields)


def test_other_endpoints(api: Server) -> None:
    body = {"input": "a", ACTIVATE: [[1, 2]]}
    assert "takes no routing" in refused(api, "/v1/responses", ACTIVATE, **body)


# ---- the server's default ----

MASK = {
    DEACTIVATE: [[1, 0], [5, 2]],
    BIAS: array_of(np.full((L, NUM_EXPERTS), 0.25, np.float32)),
}


@pytest.fixture(scope="module")
def masked(tiny_model: Path) -> Iterator[Server]:
    default = f"--routed-experts-default={json.dumps(MASK)}"
    with served(tiny_model, TakesInput, *FLAGS, default) as server:
        yield server


def biases(deactivate: list[list[int]], bias: float = 0.25) -> RoutingInput:
    of_all = np.full((L, NUM_EXPERTS), bias, np.float32)
    for layer, expert in deactivate:
        of_all[LAYER_IDS.index(layer), expert] = -np.inf
    return RoutingInput(bias=of_all)


BANNED = biases(MASK[DEACTIVATE])
EVERY_ROUTE: list[tuple[str, dict[str, Any]]] = [
    *((path, body_for(path)) for path in (COMPLETIONS, CHAT, GENERATE, INVOCATIONS)),
    *CLOSED,
    (COMPLETIONS, {**body_for(COMPLETIONS), "n": 3, "temperature": 1.0}),
    (COMPLETIONS, {**body_for(COMPLETIONS), "return_routed_experts": True}),
    (CHAT, {**body_for(CHAT), "stream": True}),
]


@pytest.mark.parametrize(("path", "body"), EVERY_ROUTE)
def test_a_default_holds_on_every_route(
    masked: Server,
    arrived: Arrived,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
) -> None:
    """It is decoded once, and takes no request's memory."""
    for name in ("_encode", "_take_memory"):
        monkeypatch.delattr(routing_input.InputReader, name)
    response = post(masked, path, **body)
    assert response.status_code == 200, response.text
    assert arrived.requests
    for said in arrived.inputs():
        assert said is not None
        same(RoutingInput.decode(said), BANNED)


def test_fields_of_a_request_win_one_by_one(masked: Server, arrived: Arrived) -> None:
    own = [[9, 1]]
    cases: list[tuple[dict[str, Any], RoutingInput | None]] = [
        ({DEACTIVATE: own}, biases(own)),
        ({BIAS: []}, biases(MASK[DEACTIVATE], 0)),
        ({REPLAY: []}, BANNED),
        ({DEACTIVATE: [], BIAS: []}, None),
    ]
    for fields, expected in cases:
        arrived.requests.clear()
        answered(masked, COMPLETIONS, **body_for(COMPLETIONS), **fields)
        if expected is None:
            assert arrived.inputs() == [None]
        else:
            same(arrived.input(), expected)


def test_rows_beside_a_default(masked: Server, arrived: Arrived) -> None:
    rows = np.broadcast_to(np.arange(3, 3 + K, dtype=np.int16), (5, L, K)).copy()
    answered(masked, COMPLETIONS, **body_for(COMPLETIONS), **{REPLAY: array_of(rows)})
    same(arrived.input(), RoutingInput(rows=rows, bias=BANNED.bias))
    rows[2, 0, 0] = 0
    body = {**body_for(COMPLETIONS), REPLAY: array_of(rows)}
    assert "which is never to be chosen" in refused(masked, COMPLETIONS, REPLAY, **body)


def test_the_server_says_what_it_takes_and_its_defaults(masked: Server, api: Server) -> None:
    info = api.info()
    assert (info["input"], info["groups"], info["defaults"]) == (True, list(GROUPS), {})
    assert masked.info()["defaults"] == MASK


@pytest.mark.parametrize(
    ("default", "message"),
    [
        ({DEACTIVATE: [[0, 1]]}, f"{DEACTIVATE} has decoder layer 0, which has no experts"),
        ({BIAS: array_of(np.zeros((L, 64), np.float32))}, f"{BIAS} must have the shape"),
    ],
    ids=["a dense layer", "another model's"],
)
def test_a_default_that_the_model_cannot_have(
    tiny_model: Path, default: dict[str, Any], message: str
) -> None:
    flag = f"--routed-experts-default={json.dumps(default)}"
    with (
        pytest.raises(SettingsError, match=f"^routed_experts_default: {message}"),
        served(tiny_model, TakesInput, *FLAGS, flag),
    ):
        pass


# ---- memory, logs and records ----

ROW_BYTES = 2 * L * K


@pytest.fixture(scope="module")
def small(tiny_model: Path) -> Iterator[Server]:
    """With memory for 60 rows, or for 25 and a body that has them in base64."""
    with served(
        tiny_model, TakesInput, *FLAGS, f"--routed-experts-input-bytes={60 * ROW_BYTES}"
    ) as server:
        yield server


def test_a_request_that_never_fits(small: Server) -> None:
    body = {**body_for(COMPLETIONS, prompt_of(61, 1)), REPLAY: array_of(rows_for(61))}
    message = refused(small, COMPLETIONS, REPLAY, **body)
    assert "--routed-experts-input-bytes" in message
    for_three = {**body_for(COMPLETIONS), REPLAY: array_of(rows_for(16)), "n": 3}
    assert "choices" in refused(small, COMPLETIONS, REPLAY, **for_three)


def test_the_body_takes_memory_too(small: Server) -> None:
    body = {**body_for(COMPLETIONS, prompt_of(30, 1)), REPLAY: array_of(rows_for(30))}
    assert "with its body" in refused(small, COMPLETIONS, REPLAY, **body)
    body = {**body_for(COMPLETIONS, prompt_of(30, 1)), REPLAY: array_of(rows_for(24))}
    assert post(small, COMPLETIONS, **body).status_code == 200
    assert post(small, COMPLETIONS, **body, user="u" * 10 * ROW_BYTES).status_code == 400


def test_a_negative_number_of_choices_makes_no_room(
    small: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    take = InputMemory.take

    def taking(memory: InputMemory, num_bytes: int, request_end: Any) -> None:
        taken.append(num_bytes)
        take(memory, num_bytes, request_end)

    monkeypatch.setattr(InputMemory, "take", taking)
    body = {**body_for(COMPLETIONS), REPLAY: array_of(rows_for(10)), "n": -100}
    response = post(small, COMPLETIONS, **body)
    assert response.status_code == 400
    assert taken == [10 * ROW_BYTES + len(response.request.content)]


def test_memory_is_for_running_requests(small: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes back when a request has ended, also one whose client has left."""
    monkeypatch.setattr(around.InProcessClient, "_wait_for_turn", around.stay_while_alone)
    body = {"model": "tiny", **body_for(COMPLETIONS), REPLAY: array_of(rows_for(20))}
    long = {**body, "max_tokens": 800, "ignore_eos": True, "stream": True}
    with small.client() as client, small.client() as other:
        with client.stream("POST", COMPLETIONS, json=long) as running:
            lines = running.iter_lines()  # whose end would close the connection
            next(lines)
            response = other.post(COMPLETIONS, json=body)
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            assert response.json()["error"]["code"] == 503
            few = {**body, REPLAY: array_of(rows_for(4))}
            assert other.post(COMPLETIONS, json=few).status_code == 200

        def fits() -> bool:
            return other.post(COMPLETIONS, json=body).status_code == 200

        wait_until(fits, "the memory of a request that has ended is not free")
        assert fits()


@contextmanager
def all_that_is_logged(written: io.StringIO) -> Iterator[None]:
    """At the debug level, at which vLLM logs bodies, too."""
    handler = logging.StreamHandler(written)
    loggers = [logging.getLogger(), logging.getLogger("vllm")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)


def test_no_log_repeats_an_array(tiny_model: Path) -> None:
    """Of a request that is answered, and of those that are refused, on a server that logs all."""
    written = io.StringIO()
    rows = rows_for(3)
    text = array_of(rows)["data"]
    with (
        served(tiny_model, TakesInput, *FLAGS, "--enable-log-requests") as server,
        all_that_is_logged(written),  # now, as its start may configure the loggers
    ):
        answered(server, COMPLETIONS, **body_for(COMPLETIONS), **{REPLAY: array_of(rows)})
        for changes in ({"data": text + "!"}, {"shape": text}, {"dtype": text}):
            body = {**body_for(COMPLETIONS), REPLAY: array_of(rows, **changes)}
            assert text[:40] not in refused(server, COMPLETIONS, REPLAY, **body)
        odd = {**body_for(COMPLETIONS), "temperature": "x", REPLAY: array_of(rows)}
        response = post(server, COMPLETIONS, **odd)
        assert response.status_code == 400
        assert text[:40] not in response.text
    log = written.getvalue()
    assert "routing input of" in log  # requests are logged
    assert "JSON body" in log
    assert text[:40] not in log
    assert repr(rows.tobytes())[2:40] not in log


def test_requests_that_say_their_experts_are_not_recorded(tiny_model: Path, tmp_path: Path) -> None:
    """A record is of what routers choose."""
    record = f"--routed-experts-record={tmp_path}"
    with served(tiny_model, TakesInput, *FLAGS, record) as server:
        dropped = partial(server.metric, "routed_experts_record_dropped_total", reason="input")
        before = dropped()
        answered(server, COMPLETIONS, **body_for(COMPLETIONS), **{ACTIVATE: [[1, 2]]})
        answered(server, COMPLETIONS, **body_for(COMPLETIONS))
        assert dropped() == before + 1
    lines = [line for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    assert sum('"choices"' in line for line in lines) == 1


@pytest.mark.parametrize("path", [COMPLETIONS, INVOCATIONS])
def test_a_client_that_leaves_while_its_body_is_read(
    api: Server, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no fault of the server: alerts count status 5xx."""
    sent: list[Message] = []
    handle = DrainMiddleware.__call__

    async def watched(own: DrainMiddleware, scope: Scope, receive: Receive, send: Send) -> None:
        async def note_and_send(message: Message) -> None:
            sent.append(message)
            await send(message)

        await handle(own, scope, receive, note_and_send)

    monkeypatch.setattr(DrainMiddleware, "__call__", watched)
    url = httpx.URL(api.url)
    with socket.create_connection((url.host, url.port)) as sock:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        sock.sendall(f'{head}Content-Length: 1000\r\n\r\n{{"model": "tiny"'.encode())
    wait_until(lambda: sent, "the request has no answer")
    assert sent[0]["status"] == 400


def test_a_body_that_is_no_object(api: Server) -> None:
    with api.client() as client:
        headers = {"Content-Type": "application/json"}
        response: httpx.Response = client.post(COMPLETIONS, content=b"[]", headers=headers)
    assert response.status_code == 400
