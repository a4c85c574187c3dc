"""Files from anywhere. Whatever is in one, each command ends with a status and at most one
sentence.

What a single value may take of memory is in `tests/protocol`.
"""

import copy
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from routed_experts.server.cli.main import main
from routed_experts.server.tools.view import ViewedFile, ViewServer
from tests.conftest import Cases
from tests.long_runs import times
from tests.protocol.answers import (
    EXPERTS,
    JSON,
    LAYERS,
    TOP_K,
    RoutedPrompt,
    answer,
    histogram,
    rows_of,
    stream,
)

ONE = RoutedPrompt(rows_of(6, 1), [rows_of(3, 2), rows_of(2, 3)])
INFO = {"num_layers": LAYERS, "top_k": TOP_K, "num_experts": EXPERTS, "layer_ids": [1, 2, 4]}
INFO |= {"weights_scale": [1.0, 2.0, 3.0]}


def with_everything(has_rows: bool) -> dict[str, Any]:
    """A body with each field that is read."""
    body: dict[str, Any] = {
        "id": "cmpl-1",
        "model": "m",
        "error": None,
        "routed_experts_info": INFO,
    }
    body |= answer(RoutedPrompt(ONE.prompt, ONE.choices, fmt="list", weights=True))
    for holder in (body, *body["choices"]) if not has_rows else ():
        for name in [
            name for name in holder if name.endswith(("routed_experts", "expert_weights"))
        ]:
            del holder[name]
    body["prompt_routed_experts_histogram"] = histogram(ONE.prompt, EXPERTS)
    for choice, rows in zip(body["choices"], ONE.choices, strict=True):
        choice["routed_experts_histogram"] = histogram(rows, EXPERTS)
        tokens = [*"abcd"][: len(rows) + 1]
        choice["logprobs"] = {"tokens": tokens, "token_logprobs": [-1.0] * len(tokens)}
    return body


OF_PAGE = answer(RoutedPrompt(ONE.prompt, ONE.choices[:1]))
OF_PAGE["choices"][0]["logprobs"] = {"tokens": [*"abcdefghij"]}
OF_BATCH = {"custom_id": "1", "response": {"status_code": 200, "body": answer(ONE)}, "error": None}
WHOLE = [
    with_everything(True),
    with_everything(False),
    OF_PAGE,
    OF_BATCH,
    answer(ONE),
    INFO | {"model": "m"},
]
WHOLE.append(answer(RoutedPrompt(ONE.prompt, ONE.choices, fmt="npy", layout="joined")))
ARRAYS = [
    {"data": "", "shape": [2**30, 0, 0], "dtype": "int16", "start": 0, "missing": 0},
    {"data": "AAAA", "shape": [1, 1, 1], "dtype": "uint8", "start": 2**62, "missing": 0},
    {"data": "AAA=", "shape": [1, 2, 1], "dtype": "uint8", "start": 0, "missing": 0},
    *([[["a" * 300_000, *"bcd" * 300]]], [[[0] * 70_000]], [[[0]] * 70_000]),
]
CUTS = ["\n", "[" * 5_000, '"', "{", "data: ", "9" * 5_000, "\0", "1e400"]


def changed(draw: Any, value: Any) -> Any:
    """`value` with something else in a place."""
    if not isinstance(value, dict | list) or not value or draw(st.integers(0, 5)) == 0:
        return draw(JSON | st.sampled_from(ARRAYS))
    copied = copy.copy(value)
    key = draw(st.sampled_from([*copied] if isinstance(copied, dict) else [*range(len(copied))]))
    if draw(st.integers(0, 7)) == 0:
        del copied[key]
    else:
        copied[key] = changed(draw, copied[key])
    return copied


@st.composite
def files(draw: Any) -> bytes:
    bodies = draw(st.lists(st.sampled_from(WHOLE), min_size=1, max_size=3))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(bodies) - 1))
        bodies[at] = changed(draw, bodies[at])
    if draw(st.booleans()):
        text = "\n".join(
            json.dumps(body, indent=draw(st.sampled_from([None, 1]))) for body in bodies
        ).encode()
    else:
        chunks = [
            changed(draw, chunk) if draw(st.integers(0, 5)) == 0 else chunk for chunk in stream(ONE)
        ]
        text = (
            b"".join(b"data: %s\n\n" % json.dumps(chunk).encode() for chunk in chunks)
            + b"data: [DONE]\n"
        )
    at = draw(st.integers(0, len(text)))
    inserted = draw(st.sampled_from(["", *CUTS]).map(str.encode) | st.binary(max_size=4))
    return text[:at] if draw(st.integers(0, 3)) == 0 else text[:at] + inserted + text[at:]


SETTINGS = settings(
    max_examples=30,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ],
)
MANY = settings(SETTINGS, max_examples=times(2000), derandomize=False)


@SETTINGS
@given(text=files())
def test_any_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: bytes) -> None:
    check_file(tmp_path, capsys, text)


@pytest.mark.long
@MANY
@given(text=files())
def test_many_hostile_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cases: Cases, text: bytes
) -> None:
    cases.add()
    check_file(tmp_path, capsys, text)


def check_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: bytes) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_bytes(text)
    exports = (
        ["export", str(file), "-o", str(tmp_path / f"out.{ending}")]
        for ending in ("parquet", "npz")
    )
    for command in (
        *exports,
        ["export", str(file), "--weights", "-o", str(tmp_path / "weights.npz")],
    ):
        status, lines = main(command), capsys.readouterr().err.splitlines()
        assert status in (0, 1, 2), command
        assert len(lines) <= (status == 2), (command, lines)
        assert all(
            ending.startswith("routed-experts: ") and ending.endswith(".") for ending in lines
        ), lines


# ---- what is no file of responses ----

COMMANDS = (
    "export FILE -o OUT",
    "export --url 127.0.0.1:9 --prompts FILE -o OUT",
    "view FILE --no-browser",
    "compare MODEL --answers FILE",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_waits_for_a_pipe_or_reads_a_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for file in (tmp_path / "pipe", Path("/dev/null")):
        places = {"FILE": str(file), "OUT": str(tmp_path / "out.npz")}
        assert main([places.get(word, word) for word in command.split()]) == 2
        why = "it is no file, but a pipe, a device or a folder"
        assert capsys.readouterr().err == f"routed-experts: {file} cannot be read: {why}.\n"


def test_what_a_shell_has_opened_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in `export <(zcat answers.jsonl.gz)`."""
    read, write = os.pipe()
    os.write(write, json.dumps(answer(ONE)).encode())
    os.close(write)
    try:
        assert main(["export", f"/dev/fd/{read}", "-o", str(tmp_path / "out.npz")]) == 0
    finally:
        os.close(read)
    assert "1 responses" in capsys.readouterr().out


# ---- requests to `view` ----


@pytest.fixture
def viewed(tmp_path: Path) -> Iterator[ViewServer]:
    file = tmp_path / "answers.jsonl"
    file.write_text(json.dumps(answer(ONE)))
    with ViewServer([ViewedFile("answers.jsonl", file)], 0) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def status_of(server: ViewServer, request: str, *headers: str) -> int:
    lines = [f"{request} HTTP/1.1", f"Host: localhost:{server.server_port}", *headers, "", ""]
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as sock:
        sock.sendall("\r\n".join(lines).encode())
        return int(sock.makefile("rb").readline().split()[1])


def test_view_takes_no_files_and_answers_its_own_page_only(
    viewed: ViewServer, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = "/routed_experts/saved/0"
    assert status_of(viewed, f"GET {saved}") == 200
    assert status_of(viewed, f"GET {saved}", "Origin: http://elsewhere.example") == 403
    assert status_of(viewed, "POST /v1/routed_experts/saved", "Content-Length: 2") == 501
    viewed.viewed[0].path.unlink()
    assert status_of(viewed, f"GET {saved}") == 404
    assert capsys.readouterr().err == ""


def test_view_says_nothing_of_clients_that_leave(
    viewed: ViewServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(("127.0.0.1", viewed.server_port), timeout=60) as sock:
        sock.sendall(b"GET /routed_exp")
    assert status_of(viewed, "GET /routed_experts") == 200
    assert capsys.readouterr().err == ""
