"""F1: files from anywhere. Whatever is in one, each command ends with a status and at most one sentence.

Each has 1 GiB of memory and ten seconds.
"""

import base64
import copy
import json
import os
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.protocol.answers import EXPERTS, JSON, LAYERS, TOP_K, Told, answer, histogram, rows_of, stream
from tests.server import hostile_files

SECONDS = 10
Run = Callable[[str | bytes], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs all commands on a file with some text; what they say and return."""
    folder = tmp_path_factory.mktemp("hostile")
    file = folder / "answers.jsonl"
    with pytest.MonkeyPatch.context() as environment:
        for library in ("OPENBLAS", "OMP", "ARROW"):
            environment.setenv(f"{library}_NUM_THREADS", "1")
        with get_context("spawn").Pool(1, hostile_files.begin) as process:
            process.apply(len, ([],))  # the start imports libraries

            def run(text: str | bytes) -> list[dict[str, Any]]:
                file.write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
                commands = hostile_files.commands(str(file), str(folder))
                return [process.apply_async(hostile_files.run, (each,)).get(SECONDS) for each in commands]

            yield run


def check(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["status"] in (0, 1, 2), f"{result['command']}: {result['status']}"
        lines = result["err"].splitlines()
        assert len(lines) <= 1, result
        assert result["status"] == 2 or not lines, result
        assert all(each.startswith("routed-experts: ") and each.endswith(".") for each in lines), result


ONE = Told(rows_of(6, 1), [rows_of(3, 2), rows_of(2, 3)])
INFO = {"num_layers": LAYERS, "top_k": TOP_K, "num_experts": EXPERTS, "layer_ids": [1, 2, 4]}
INFO |= {"weights_scale": [1.0, 2.0, 3.0]}


def with_everything() -> dict[str, Any]:
    """A body with each field that is read."""
    told = Told(ONE.prompt, ONE.choices, fmt="list", weights=True)
    body: dict[str, Any] = {"id": "cmpl-1", "model": "m", "error": None, **answer(told)}
    body["routed_experts_info"] = INFO
    body["prompt_routed_experts_histogram"] = histogram(ONE.prompt, EXPERTS)
    for choice, rows in zip(body["choices"], ONE.choices, strict=True):
        choice["routed_experts_histogram"] = {**histogram(rows, EXPERTS), "weights": [[0.5] * EXPERTS] * LAYERS}
        tokens = [*"abcd"][: len(rows) + 1]
        choice["logprobs"] = {"tokens": tokens, "token_logprobs": [-1.0] * len(tokens)}
    return body


def of_histograms() -> dict[str, Any]:
    body = with_everything()
    for holder in (body, *body["choices"]):
        for name in [name for name in holder if name.endswith(("routed_experts", "expert_weights"))]:
            del holder[name]
    return body


def of_the_page() -> dict[str, Any]:
    body = answer(Told(ONE.prompt, ONE.choices[:1]))
    body["choices"][0]["logprobs"] = {"tokens": [*"abcdefghij"]}
    return body


def of_a_batch() -> dict[str, Any]:
    return {"custom_id": "1", "response": {"status_code": 200, "body": answer(ONE)}, "error": None}


WHOLE: list[Callable[[], Any]] = [with_everything, of_histograms, of_the_page, of_a_batch, lambda: answer(ONE)]
WHOLE += [lambda: INFO | {"model": "m"}, lambda: answer(Told(ONE.prompt, ONE.choices, fmt="npy", layout="joined"))]


def npy(header: str, data: bytes = b"\0" * 144, version: int = 1) -> str:
    size = len(header).to_bytes(2 if version == 1 else 4, "little")
    return base64.b64encode(b"\x93NUMPY" + bytes([version, 0]) + size + header.encode("latin1") + data).decode()


def header(shape: str, descr: str = "<i2") -> str:
    return f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n"


HEADERS = [
    *(
        npy(header(shape))
        for shape in ("(6, 3, 4)", "(1073741824, 1048576, 8)", "(1073741824, 0, 0)", "(-1, 3, 4)", "()")
    ),
    *(npy(header(f"({'-' * count}1, 3, 4)")) for count in (1, 9_000)),
    npy("(" * 9_000),
    npy(header("(6, 3, 4)", "|O")),
    npy(header("(6, 3, 4)", "<U1000000")),
    npy(header("(1, 3, 4)", ">i8"), version=2),
    npy("", b"", version=3)[:9],
]
ARRAYS = [
    {"data": "", "shape": [2**30, 0, 0], "dtype": "int16", "start": 0, "missing": 0},
    {"data": "", "shape": [0, 2**30, 2**30], "dtype": "int16", "start": 0, "missing": 0},
    {"data": "AAAA", "shape": [1, 1, 1], "dtype": "uint8", "start": 2**62, "missing": 0},
    {"data": "AAA=", "shape": [1, 2, 1], "dtype": "uint8", "start": 0, "missing": 0},
    [[["a" * 300_000, *"bcd" * 300]]],
    [[[0] * 70_000]],
    [[[0]] * 70_000],
]
VALUES = JSON | st.sampled_from(HEADERS) | st.sampled_from(ARRAYS)


def changed(draw: Any, value: Any) -> Any:
    """`value` with something else in a place."""
    if not isinstance(value, dict | list) or not value or draw(st.integers(0, 5)) == 0:
        return draw(VALUES)
    copied = copy.copy(value)
    place = draw(st.sampled_from([*copied] if isinstance(copied, dict) else [*range(len(copied))]))
    if draw(st.integers(0, 7)) == 0:
        del copied[place]
    else:
        copied[place] = changed(draw, copied[place])
    return copied


@st.composite
def files(draw: Any) -> str | bytes:
    bodies = [make() for make in draw(st.lists(st.sampled_from(WHOLE), min_size=1, max_size=3))]
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(bodies) - 1))
        bodies[at] = changed(draw, bodies[at])
    if draw(st.booleans()):
        text = "\n".join(json.dumps(body, indent=draw(st.sampled_from([None, 1]))) for body in bodies)
    else:
        chunks = [changed(draw, chunk) if draw(st.integers(0, 5)) == 0 else chunk for chunk in stream(ONE)]
        text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n"
    kind = draw(st.sampled_from(["whole", "cut", "inserted", "bytes"]))
    at = draw(st.integers(0, len(text)))
    if kind == "cut":
        return text[:at]
    if kind == "inserted":
        return (
            text[:at]
            + draw(st.sampled_from(["\n", "[" * 5_000, '"', "{", "data: ", "9" * 5_000, "\0", "1e400"]))
            + text[at:]
        )
    return text.encode()[:at] + draw(st.binary(max_size=4)) + text.encode()[at:] if kind == "bytes" else text


@settings(
    max_examples=int(os.environ.get("HOSTILE_FILES", "120")),
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
@given(text=files())
def test_f1_any_file(run: Run, text: str | bytes) -> None:
    check(run(text))
