"""vLLM's front end in Rust returns our rows from `/inference/v1/generate`, bit for bit."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contract.engine import engine
from tests.contract.rust import RustFrontEnd, rust_front_end
from tests.contract.served import every_layer_of
from tests.e2e.harness import prompt_of


@pytest.fixture(scope="module")
def front_end(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RustFrontEnd]:
    with rust_front_end(
        engine(bare_rows=True), tiny_model, tmp_path_factory.mktemp("rust")
    ) as running:
        yield running


def rows_in(choice: dict[str, Any]) -> np.ndarray[Any, Any]:
    return np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))


@pytest.mark.parametrize(
    ("length", "start", "max_tokens"), [(130, 0, 20), (130, 100, 3), (5, 5, 1), (1, 0, 9)]
)
def test_generate_returns_the_rows_of_all_tokens_but_the_last(
    front_end: RustFrontEnd, length: int, start: int, max_tokens: int
) -> None:
    prompt = prompt_of(length, 0)
    for _ in range(2):  # the second hits the prefix of the first
        choice = front_end.generate(
            prompt, max_tokens=max_tokens, routed_experts_prompt_start=start
        )
        rows = rows_in(choice)
        assert rows.dtype == np.uint16
        assert np.array_equal(rows, every_layer_of([*prompt, *choice["token_ids"][:-1]], start))


def test_a_stream_has_them_in_its_last_chunk(front_end: RustFrontEnd) -> None:
    response = front_end.post(
        "/inference/v1/generate",
        token_ids=prompt_of(9, 0),
        sampling_params={"max_tokens": 3},
        stream=True,
    )
    assert response.text.count('"routed_experts"') == 1
    assert '"routed_experts"' in response.text.split("data: ")[-2]


@pytest.mark.parametrize(
    "fields",
    [
        {"extra_args": {"routed_experts_deactivate": [1]}},
        {"vllm_xargs": {"return_routed_experts": True}},
    ],
)
def test_a_field_of_our_server_that_generate_passes_on_is_refused(
    front_end: RustFrontEnd, fields: dict[str, Any]
) -> None:
    """There, the front end tells of an error with status 200."""
    prompt = prompt_of(5, 0)
    front_end.generate(prompt, max_tokens=2)
    choice = front_end.generate(prompt, max_tokens=2, **fields)
    assert choice["finish_reason"] == "error"
    assert choice["token_ids"] == []
    assert len(rows_in(choice)) == 0
    front_end.generate(prompt, max_tokens=2)


def test_it_passes_over_the_fields_of_our_server(front_end: RustFrontEnd) -> None:
    """At their own place. So `routed-experts serve` refuses to start with it."""
    response = front_end.post(
        "/v1/completions", prompt=prompt_of(5, 0), max_tokens=2, return_routed_experts=True
    )
    assert response.status_code == 200
    assert "prompt_routed_experts" not in response.text
    assert front_end.arrived[-1].sampling_params.extra_args is None
