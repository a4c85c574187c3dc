"""Every form of rows and weights, at every endpoint, whole and streamed, against the codec's plain
statement of it."""

import base64
import itertools
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from routed_experts.protocol import codec
from routed_experts.protocol.fetch import fetch
from tests.contract.engine import NUM_EXPERTS, K, L, weights_for
from tests.contract.served import DECODER_LAYERS, LAYER_IDS, rows_of, serving
from tests.e2e.harness import CHAT, COMPLETIONS, Server, prompt_of, read_events
from tests.protocol.forms import encode
from tests.server.known import as_json

GENERATE = "/inference/v1/generate"
FLAG = "--enable-return-routed-expert-weights"
FLAGS = ("--max-num-batched-tokens", "64", "--enable-scale-out")
IDS = {"return_routed_experts": True, "return_token_ids": True}
WEIGHTS = {**IDS, "return_routed_expert_weights": True}
MSGPACK = "application/msgpack"


@pytest.fixture(scope="module")
def api(tiny_model: Path) -> Iterator[Server]:
    with serving(tiny_model, *FLAGS, FLAG) as server:
        yield server


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Iterator[Server]:
    with serving(tiny_model, *FLAGS) as server:
        yield server


def post(
    server: Server, path: str, accept: str = "application/json", **body: Any
) -> httpx.Response:
    with server.client() as client:
        return client.post(path, json={"model": "tiny", **body}, headers={"Accept": accept})


# ---- the reference ----


class Form:
    """What the arrays of a request are to be; a field that is left out has its default, at generate
    vLLM's own form."""

    def __init__(self, server: Server, path: str, fields: dict[str, Any]) -> None:
        self._server, self.is_referred = (
            server,
            fields.get("routed_experts_delivery") == "reference",
        )
        own = (
            path == GENERATE
            and not {"routed_experts_format", "routed_experts_layout"} & fields.keys()
        )
        self.fmt = fields.get("routed_experts_format", "npy" if own else "object")
        self.dtype = fields.get("routed_experts_dtype", "uint16" if own else "int16").replace(
            "auto", "int16"
        )
        self.is_joined = (
            fields.get("routed_experts_layout", "joined" if own else "split") == "joined"
        )
        self.has_dense = fields.get("routed_experts_layers", "all" if own else "moe") == "all"
        self.has_weights = fields.get("return_routed_expert_weights", False)
        self.has_steps = fields.get("routed_experts_steps", False)
        self.start = fields.get("routed_experts_prompt_start", 0)

    def arrays(self, prefix: str, tokens: list[int], first: int) -> dict[str, np.ndarray]:
        """The rows of `tokens` from position `first` on, and their weights, by their names."""
        rows = rows_of(tokens, first)
        arrays = {f"{prefix}routed_experts": self._spread(rows)}
        if self.has_weights:
            arrays[f"{prefix}routed_expert_weights"] = self._spread(weights_for(rows))
        return arrays

    def _spread(self, array: np.ndarray) -> np.ndarray:
        if not self.has_dense:
            return array
        every = np.zeros((len(array), DECODER_LAYERS, K), dtype=array.dtype)
        if array.dtype == np.float32:
            # beside a weight that is no number, dense layers are none
            every[np.isnan(array).any(axis=(1, 2))] = np.nan
        every[:, LAYER_IDS] = array
        return every

    def encoded(self, array: np.ndarray, first: int) -> Any:
        """`array` as it stands in an answer."""
        return encode(array, fmt=self.fmt, dtype=self.dtype, start=first)

    def decoded(self, name: str, pieces: Iterable[Any]) -> np.ndarray:
        shape: dict[str, Any] = {"num_layers": DECODER_LAYERS if self.has_dense else L, "top_k": K}
        if name.endswith("weights"):
            return np.concatenate([codec.decode_weights(piece, **shape) for piece in pieces])
        return np.concatenate([codec.decode(piece, dtype=self.dtype, **shape) for piece in pieces])

    def routing_in(self, holder: dict[str, Any]) -> dict[str, Any]:
        """The routing fields of an answer or a part of it, with arrays in place of references, but
        for steps, which are looked at here."""
        routing = {name: value for name, value in holder.items() if "routed_expert" in name}
        for name in [*routing]:
            if name.endswith("routed_experts") and self.has_steps:
                self._check_steps(name, routing[name], routing.pop(f"{name}_steps"))
        return {name: self._resolved(value) for name, value in routing.items()}

    def _check_steps(self, name: str, rows: Any, steps: dict[str, Any]) -> None:
        """One for each row, of the same start. Prompts have no more than 64 tokens a step, and
        what is generated begins with another step each."""
        count = len(self.decoded(name, [rows]))
        numbers = codec.decode_steps(steps)
        assert (steps["shape"], steps["dtype"], steps["missing"]) == ([count], "uint32", 0)
        assert list(steps) == ["data", "shape", "dtype", "start", "missing"]
        if self.fmt == "object":
            assert steps["start"] == rows["start"]
        assert np.all(np.diff(numbers.astype(np.int64)) >= 0)
        if not name.startswith("prompt_") and not self.is_joined:
            assert len(set(numbers.tolist())) == count

    def _resolved(self, value: Any) -> Any:
        if isinstance(value, list) and self.is_referred:
            return [*map(self._resolved, value)]
        if not self.is_referred:
            return value
        fields = {name: value[name] for name in ("shape", "dtype", "start", "missing")}
        of = {"part"} if value["part"] == "prompt" else {"part", "choice"}
        assert value.keys() == {"id", "url", "bytes", "expires"} | of | fields.keys()
        layout = "joined" if self.is_joined else "generated"
        assert value["part"] in ("prompt", layout)
        rows = np.ascontiguousarray(fetch(value, base_url=f"{self._server.url}/v1").swapaxes(0, 1))
        assert ([*rows.shape], rows.dtype.name, rows.nbytes) == (
            value["shape"],
            value["dtype"],
            value["bytes"],
        )
        return {"data": base64.b64encode(rows.tobytes()).decode(), **fields}


def check_whole(form: Form, answer: dict[str, Any], prompt: list[int]) -> None:
    """The fields are those of the codec, to the byte, and there are no others."""
    of_prompt = {} if form.is_joined else form.arrays("prompt_", prompt, form.start)
    assert form.routing_in(answer) == {
        name: form.encoded(array, form.start) for name, array in of_prompt.items()
    }
    for choice in answer["choices"]:
        first = form.start if form.is_joined else len(prompt)
        arrays = form.arrays("", [*prompt, *choice["token_ids"]][:-1], first)
        assert form.routing_in(choice) == {
            name: form.encoded(array, first) for name, array in arrays.items()
        }


def check_stream(form: Form, lines: list[str], prompt: list[int], n: int, at_end: bool) -> None:
    """The pieces are together what the codec says, in lines of up to 64 KiB of routing."""
    chunks = [chunk for chunk in read_events(iter(lines)) if chunk["choices"]]
    assert max(map(len, lines)) <= (64 << 10) + 1500
    choices = [chunk["choices"][0] for chunk in chunks]
    for index in range(n):
        parts = [choice for choice in choices if choice["index"] == index]
        check_choice(form, parts, prompt)
        if at_end:
            check_only_the_last_has_rows(form, parts)
    of_prompt = {} if form.is_joined else form.arrays("prompt_", prompt, form.start)
    check_pieces(form, chunks, of_prompt, form.start)


def check_choice(form: Form, parts: list[dict[str, Any]], prompt: list[int]) -> None:
    """The arrays in the parts of a choice have the rows of its tokens, but for the last."""
    tokens = [token for part in parts for token in part.get("token_ids") or ()]
    first = form.start if form.is_joined else len(prompt)
    check_pieces(form, parts, form.arrays("", [*prompt, *tokens][:-1], first), first)


def check_only_the_last_has_rows(form: Form, parts: list[dict[str, Any]]) -> None:
    """Of a choice's chunks. Chunks with rows alone may stand before the last."""
    *early, last = [part for part in parts if part.get("token_ids") or part.get("finish_reason")]
    assert last["finish_reason"]
    assert not any(map(form.routing_in, early))


def check_pieces(
    form: Form, holders: list[dict[str, Any]], expected: dict[str, np.ndarray], first: int
) -> None:
    pieces: dict[str, list[Any]] = {}
    for holder in holders:
        for name, value in form.routing_in(holder).items():
            pieces.setdefault(name, []).append(value)
    has_rows = any(map(len, expected.values()))
    if has_rows:
        assert pieces.keys() == expected.keys()
    for name, values in pieces.items():
        check_array(form, form.decoded(name, values), expected[name])
        if form.fmt == "object":
            check_positions(values, first)


def check_array(form: Form, decoded: np.ndarray, expected: np.ndarray) -> None:
    """Bit for bit, but in lists, where null stands for every NaN."""
    assert decoded.shape == expected.shape
    if decoded.dtype != np.float32:
        assert np.array_equal(decoded, expected)
    elif form.fmt == "list":
        assert np.array_equal(decoded, expected, equal_nan=True)
    else:
        assert np.array_equal(decoded.view(np.int32), expected.view(np.int32))


def check_positions(values: list[dict[str, Any]], first: int) -> None:
    """Each piece begins where the one before ends, and lacks nothing."""
    position = first
    for value in values:
        assert value["start"] == position
        assert value["missing"] == 0
        position += value["shape"][0]


# ---- the table ----

AXES: dict[str, list[Any]] = {
    "path": [COMPLETIONS, CHAT, GENERATE],
    "routed_experts_format": ["object", "npy", "raw", "list", "reference"],
    "routed_experts_dtype": ["int16", "int32", "auto"],
    "routed_experts_layout": ["split", "joined"],
    "routed_experts_layers": ["moe", "all"],
    "return_routed_expert_weights": [False, True],
    "routed_experts_steps": [False, True],
    "routed_experts_prompt_start": [0, 7, 9],
    "routed_experts_stream": ["with_tokens", "at_end"],
    "length": [9, 150],  # of the prompt; the rows of the longer need more than a line
    "n": [1, 2],
    "max_tokens": [1, 6],
    "stop": [None, "zzzz"],  # with which the engine does not know where an answer ends
}


def pairwise(axes: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Cases in which every two values of two axes meet."""
    rng, cases = random.Random(0), []
    missing = {
        ((one, a), (other, b))
        for one, other in itertools.combinations(axes, 2)
        for a, b in itertools.product(axes[one], axes[other])
    }
    while missing:
        drawn = [{name: rng.choice(values) for name, values in axes.items()} for _ in range(300)]
        best = max(
            drawn,
            key=lambda case: len(missing.intersection(itertools.combinations(case.items(), 2))),
        )
        missing -= set(itertools.combinations(best.items(), 2))
        cases.append(best)
    return cases


OWN = {"path": GENERATE, "n": 1, "max_tokens": 5, "length": 20}
VLLMS_OWN: list[dict[str, Any]] = [
    *(
        OWN | more
        for more in ({}, {"routed_experts_dtype": "int32"}, {"routed_experts_layers": "moe"})
    ),
    *(OWN | {"return_routed_expert_weights": has_weights} for has_weights in (False, True)),
    OWN | {"routed_experts_steps": True},
    OWN | {"routed_experts_format": "object", "routed_experts_layout": "joined"},
]
"""Where no form is asked for at generate, vLLM's own: a second .npy stands beside it only if
weights are asked for."""


def request_of(case: dict[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any], int]:
    """Path, body and routing fields of a case, and how many choices its answer has."""
    fields = {name: value for name, value in case.items() if "routed" in name}
    if fields.get("routed_experts_format") == "reference":
        del fields["routed_experts_format"]
        fields |= {"routed_experts_delivery": "reference", "routed_experts_stream": "at_end"}
        fields["routed_experts_steps"] = False  # which cannot be delivered so
    path, n, length = case["path"], case["n"], case["length"]
    sampling = {
        "max_tokens": case["max_tokens"],
        "temperature": 1.0,
        "seed": 3,
        "ignore_eos": True,
        "n": n,
    }
    if path == GENERATE:  # older versions of vLLM cannot stream several choices there
        n = sampling["n"] = 1
        return (
            path,
            {"token_ids": prompt_of(length, 1), "sampling_params": sampling, **IDS, **fields},
            fields,
            n,
        )
    content = {"prompt": prompt_of(length, 1)}
    if path == CHAT:
        content = {"messages": [{"role": "user", "content": "x" * length}]}
    return path, {**content, **sampling, "stop": case["stop"], **IDS, **fields}, fields, n


@pytest.mark.parametrize(
    "case", [*pairwise(AXES), *VLLMS_OWN], ids=lambda case: "-".join(map(str, case.values()))
)
def test_every_form(api: Server, case: dict[str, Any]) -> None:
    path, body, fields, n = request_of(case)
    form = Form(api, path, fields)
    json, packed = post(api, path, **body), post(api, path, MSGPACK, **body)
    assert (json.status_code, packed.headers["content-type"]) == (200, MSGPACK), json.text
    whole = json.json()
    prompt = body.get("prompt") or body.get("token_ids") or whole["prompt_token_ids"]
    for answer in (whole, as_json(msgspec.msgpack.decode(packed.content))):
        assert len(answer["choices"]) == n
        check_whole(form, answer, prompt)
    streamed = post(api, path, MSGPACK, **body, stream=True)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    check_stream(
        form, streamed.text.splitlines(), prompt, n, fields.get("routed_experts_stream") == "at_end"
    )


@pytest.mark.parametrize("delivery", ["inline", "reference"])
def test_lists_of_prompts(api: Server, delivery: str) -> None:
    fields = {**WEIGHTS, "routed_experts_delivery": delivery}
    prompts = [prompt_of(length, length) for length in (3, 40, 17)]
    whole = api.complete(prompt=prompts, n=2, max_tokens=4, temperature=1.0, **fields)
    form = Form(api, COMPLETIONS, fields)
    for at, prompt in enumerate(prompts):
        of_prompt = {
            name: value[at] for name, value in whole.items() if name.startswith("prompt_routed")
        }
        check_whole(form, {**of_prompt, "choices": whole["choices"][2 * at : 2 * at + 2]}, prompt)


# ---- weights, where they are and where not ----


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("has_rows", "has_weights", "layers", "start"),
    [
        (False, False, "moe", 0),
        (True, False, "moe", 7),
        (True, True, "moe", 0),
        (False, False, "all", 7),
    ],
)
def test_histograms_count_the_rows_that_would_have_come(
    api: Server, path: str, has_rows: bool, has_weights: bool, layers: str, start: int
) -> None:
    """Dense layers have no counts: the zeros that stand for them in rows are no expert."""
    fields = {
        "return_routed_experts": has_rows,
        "routed_experts_histogram": True,
        "routed_experts_layers": layers,
    }
    fields["routed_experts_prompt_start"] = start
    if has_weights:
        fields["return_routed_expert_weights"] = True
    case = {"path": path, "n": 1, "max_tokens": 9, "length": 50, "stop": None} | fields
    _, body, _, _ = request_of(case)
    whole = api._post(path, body)
    (last,) = [
        chunk for chunk in api.stream(path, **body) if "prompt_routed_experts_histogram" in chunk
    ]
    assert last["choices"][0]["finish_reason"] == "length"
    assert (
        has_rows == ("prompt_routed_experts" in whole) == ("routed_experts" in whole["choices"][0])
    )
    prompt = whole.get("prompt_token_ids") or whole["choices"][0]["prompt_token_ids"]
    tokens = [*prompt, *whole["choices"][0]["token_ids"]][:-1]
    for answer in (whole, last):
        check_histogram(answer["prompt_routed_experts_histogram"], rows_of(prompt, start), layers)
        own = answer["choices"][0]["routed_experts_histogram"]
        check_histogram(own, rows_of(tokens, len(prompt)), layers)


def check_histogram(counted: dict[str, Any], rows: np.ndarray, layers: str) -> None:
    expected = np.zeros((DECODER_LAYERS, NUM_EXPERTS), int)
    for at, layer in enumerate(LAYER_IDS):
        expected[layer] = np.bincount(rows[:, at].ravel(), minlength=NUM_EXPERTS)
    counts = expected if layers == "all" else expected[LAYER_IDS]
    assert counted == {"counts": counts.tolist(), "rows": len(rows), "missing": 0}


def test_which_weights_are_refused(api: Server, plain: Server) -> None:
    body = {"prompt": prompt_of(5, 1), "max_tokens": 2}
    chat = {"messages": [{"role": "user", "content": "Which?"}], "max_tokens": 2}
    name = "return_routed_expert_weights"
    for server, path, fields, reason in (
        (plain, COMPLETIONS, {**body, **WEIGHTS}, FLAG),
        (plain, CHAT, {**chat, **WEIGHTS}, FLAG),
        *((api, COMPLETIONS, {**body, **WEIGHTS, name: value}, "") for value in (1, "true", None)),
        (api, COMPLETIONS, {**body, name: True}, "needs return_routed_experts"),
    ):
        response = post(server, path, **fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)
        assert reason in response.json()["error"]["message"]
    assert (
        post(api, COMPLETIONS, **body, **IDS, return_routed_expert_weights=False).status_code == 200
    )


def test_what_the_server_says(api: Server, plain: Server) -> None:
    info = api.info()
    assert (info["weights"], info["weights_scale"], info["weights_on_input"]) == (
        True,
        [1.0] * L,
        False,
    )
    assert plain.info()["weights"] is False
    assert info["capture"]["host_cache_bytes"] == 3 * plain.info()["capture"]["host_cache_bytes"]


def test_limits_and_defaults(tiny_model: Path) -> None:
    default = {
        "return_routed_experts": True,
        "return_routed_expert_weights": True,
        "routed_experts_format": "npy",
    }
    limit = str(4 * 50 * L * K * 4)  # of base64: 150 rows of ids, 50 with weights
    flags = ("--routed-experts-default", msgspec.json.encode(default).decode())
    with serving(tiny_model, *flags, "--routed-experts-max-response-bytes", limit, FLAG) as server:
        whole = server.complete(prompt=prompt_of(20, 1), max_tokens=3, return_token_ids=True)
        check_whole(Form(server, COMPLETIONS, default), whole, prompt_of(20, 1))
        body = {"prompt": prompt_of(100, 1), "max_tokens": 2}
        ids = server.complete(**body, return_routed_expert_weights=False)
        assert "prompt_routed_experts" in ids
        assert "prompt_routed_expert_weights" not in ids
        response = post(server, COMPLETIONS, **body, return_routed_expert_weights=True)
        assert response.status_code == 400
        assert "leave out return_routed_expert_weights" in response.json()["error"]["message"]
