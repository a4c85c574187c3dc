"""Routing as an input with any values: never the server's fault, and what is said is done.

The same in every run; the long run sends others, and more.
"""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routed_experts.protocol.codec import decode
from routed_experts.protocol.models import INPUT_FIELDS
from tests.conftest import Cases
from tests.contract.engine import NUM_EXPERTS, K, L
from tests.contract.hostile import JUNK, VALID, check_response
from tests.contract.served import LAYER_IDS, served
from tests.contract.test_bad_input import LIMIT_S, MANY, SETTINGS, check_alive
from tests.contract.test_input import FLAGS, TakesInput, array_of, rows_for

REPLAY, ACTIVATE, DEACTIVATE, BIAS = INPUT_FIELDS
FEW = settings(SETTINGS, max_examples=60)
ROWS = {count: rows_for(count, seed=count) for count in (1, 2, 5, 29, 30, 31)}
MOST_BYTES = 3 * 31 * 2 * L * K
"""Of running requests, so that some do not fit."""


@pytest.fixture(scope="module")
def client(tiny_model: Path) -> Iterator[httpx.Client]:
    limit = f"--routed-experts-input-bytes={MOST_BYTES}"
    with served(tiny_model, TakesInput, *FLAGS, limit) as server, server.client() as opened:
        yield opened


def odd_ids() -> st.SearchStrategy[int]:
    limits = [-2, -1, 0, NUM_EXPERTS - 1, -(1 << 15), (1 << 15) - 1]
    return st.sampled_from(limits) | st.integers(0, 2 * K)


@st.composite
def arrays(draw: Any) -> Any:
    """Rows, at times with odd ids, of another dtype, or with one key changed."""
    rows = ROWS[draw(st.sampled_from(sorted(ROWS)))].copy()
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 3]))):
        index = tuple(draw(st.integers(0, size - 1)) for size in rows.shape)
        rows[index] = draw(odd_ids())
    if draw(st.booleans()):
        rows[draw(st.integers(0, len(rows) - 1)), draw(st.integers(0, L - 1))] = -1
    dtype = draw(st.sampled_from(["int16", "int16", "int32", "uint8", "float32", "int64"]))
    array = array_of(rows.astype(dtype), draw(st.sampled_from([0, 0, 1, 20, 1 << 30])))
    if draw(st.integers(0, 3)) == 3:
        key = draw(st.sampled_from(["data", "shape", "dtype", "start", "id", "x"]))
        array[key] = draw(odd_values(key))
    return array


def odd_values(key: str) -> st.SearchStrategy[Any]:
    if key == "shape":
        size = st.sampled_from([0, 1, 30, L, K, -1, 1 << 31, 1 << 70]) | JUNK
        return st.lists(size, max_size=4) | JUNK
    if key == "data":
        text = st.text("AB=+/ \n-_é", max_size=8).map(lambda text: text * 100)
        return text | st.binary(max_size=99).map(lambda data: base64.b64encode(data).decode())
    if key == "dtype":
        return st.sampled_from(["int16", "int32", "uint8", "<i2", "object", "O"]) | JUNK
    return JUNK


def references() -> st.SearchStrategy[Any]:
    keys = st.sampled_from(["", "f" * 40, "0" * 40, "../" * 13 + "x", "F" * 40, "\0"]) | JUNK
    start = st.sampled_from([0, 1, -1, None]) | JUNK
    return st.fixed_dictionaries({"id": keys}, optional={"start": start, "data": JUNK})


def experts() -> st.SearchStrategy[Any]:
    layer = st.sampled_from([*LAYER_IDS, *LAYER_IDS, 0, 4, 10, -1, 1 << 70])
    expert = st.sampled_from([0, 1, 2, NUM_EXPERTS - 1, NUM_EXPERTS, -1, 1 << 70])
    return st.tuples(layer, expert).map(list) | JUNK


def biases() -> st.SearchStrategy[Any]:
    value = st.floats() | st.sampled_from([0, 1, -1, 10_000, 10_001, 1 << 70, 10**400, None, "1"])
    return st.tuples(experts(), value).map(
        lambda pair: [*pair[0], pair[1]] if isinstance(pair[0], list) else pair[0]
    )


@st.composite
def bias_arrays(draw: Any) -> Any:
    value = draw(st.sampled_from([0.0, 1.5, -np.inf, np.inf, np.nan, 1e30]))
    bias = np.zeros((L, NUM_EXPERTS), np.float32)
    bias[draw(st.integers(0, L - 1)), : draw(st.sampled_from([1, K, K + 1, NUM_EXPERTS]))] = value
    array = array_of(bias)
    if draw(st.integers(0, 3)) == 3:
        key = draw(st.sampled_from(["data", "shape", "dtype"]))
        array[key] = draw(odd_values(key))
    return array


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    REPLAY: arrays() | references() | st.lists(arrays() | references(), max_size=3) | JUNK,
    ACTIVATE: st.lists(experts(), max_size=4) | JUNK,
    DEACTIVATE: st.lists(experts(), max_size=4) | JUNK,
    BIAS: st.lists(biases(), max_size=4) | bias_arrays() | JUNK,
}


@st.composite
def requests(draw: Any) -> tuple[str, dict[str, Any]]:
    path = draw(st.sampled_from(sorted(VALID)))
    body: dict[str, Any] = {"model": "tiny", **VALID[path]}
    names = draw(st.lists(st.sampled_from(INPUT_FIELDS), min_size=1, max_size=3, unique=True))
    for name in names:
        body[name] = draw(FIELDS[name])
    if draw(st.booleans()):
        body["return_routed_experts"] = True
        body["routed_experts_format"] = "object"
        body["routed_experts_layout"] = "split"
        body["routed_experts_layers"] = "moe"
    if path == "/v1/completions" and draw(st.booleans()):
        body |= {"n": draw(st.sampled_from([1, 2, 5])), "temperature": 1.0}
    return path, body


def check(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    """No 5xx but for memory, and the rows of an answer are those that were said."""
    response = client.post(
        path,
        content=json.dumps(body),
        headers={"Content-Type": "application/json"},
        timeout=LIMIT_S,
    )
    if response.status_code == 503:
        assert "routed-experts-input-bytes" in response.text
        return
    check_response(response)
    if response.status_code == 200 and "return_routed_experts" in body:
        check_said(body.get(REPLAY), decode(response.json()["prompt_routed_experts"]))
    check_alive(client)


def check_said(said: Any, prompt_rows: np.ndarray) -> None:
    for array in said if isinstance(said, list) else [said] if said else []:
        rows = decode(array)
        start = array["start"]
        captured = prompt_rows[start : start + len(rows)]
        is_given = (rows >= 0).all(axis=2)
        assert np.array_equal(captured[is_given], rows[is_given])


@FEW
@given(requests())
def test_no_input_is_the_servers_fault(
    client: httpx.Client, path_and_body: tuple[str, dict[str, Any]]
) -> None:
    check(client, *path_and_body)


@pytest.mark.long
@MANY
@given(requests())
def test_many_hostile_inputs(
    client: httpx.Client, cases: Cases, path_and_body: tuple[str, dict[str, Any]]
) -> None:
    cases.add()
    check(client, *path_and_body)
