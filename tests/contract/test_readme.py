"""Runs the examples in README and `docs/train.md` as they are."""

import base64
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from openai import OpenAI

from tests.contract.served import serving_weights
from tests.e2e.harness import FLOAT32, ON_GPU, Server
from tests.protocol.forms import encode

pytestmark = pytest.mark.release

ADDRESS = "http://localhost:8000"

needs_cpu = pytest.mark.skipif(ON_GPU, reason="the page has the rows of a CPU, in its order")


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    """Serves like `make serve`, on another port."""
    with serving_weights(
        tiny_model,
        "--served-model-name",
        "tiny-moe",
        *FLOAT32,
        "--kv-cache-memory-bytes",
        str(64 << 20),
    ) as running:
        yield running


@needs_cpu
def test_openai_client(server: Server, documented: list[str]) -> None:
    program, shown = documented
    assert ADDRESS in program
    said = StringIO()
    with redirect_stdout(said):
        exec(program.replace(ADDRESS, server.url), {})
    assert said.getvalue() == shown


def test_decoding_in_one_line(documented: list[str]) -> None:
    (program,) = documented
    names: dict[str, Any] = {"np": np, "base64": base64}
    exec(program, names)
    rows = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    assert np.array_equal(names["decode"](encode(rows, fmt="object", dtype="int16", start=0)), rows)


@pytest.fixture
def names(server: Server) -> dict[str, Any]:
    """What the examples use."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    return {"client": client, "model": "tiny-moe", "prompt": "Which experts?"}


def test_collecting_a_stream(names: dict[str, Any], documented: list[str]) -> None:
    (program,) = documented
    exec(program, names)
    routing = names["routing"]
    assert len(routing.prompt_rows) == len("Which experts?")
    assert len(routing.generated_rows) == len(routing.token_ids) - 1


def test_references(names: dict[str, Any], documented: list[str]) -> None:
    (program,) = documented
    exec(program, names)
    rows = names["fetch"](names["reference"], base_url=names["base_url"])
    assert rows.shape == (5, names["reference"]["shape"][0], 4)


def test_plotting(documented: list[str]) -> None:
    (program,) = documented
    drawn: dict[str, np.ndarray] = {}
    plt = SimpleNamespace(
        imshow=lambda load: drawn.update(load=load), plot=lambda line: drawn.update(line=line)
    )
    rows = np.random.default_rng(0).integers(0, 128, (50, 6, 8), dtype=np.int16)
    exec(program, {"routing": SimpleNamespace(rows=rows), "plt": plt})
    assert (drawn["load"].shape, drawn["line"].shape) == ((6, 128), (6,))
    assert drawn["load"].mean() == pytest.approx(1)
