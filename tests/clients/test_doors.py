"""Clients that cannot add fields, at vLLM's token-in, token-out endpoint.

One server, with the defaults that `docs/train.md` gives for verifiers.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.clients import consumers as of
from tests.clients.test_collect import ROOT
from tests.contract.served import serving_quickly
from tests.e2e.harness import SMALL_KV, Oracle, Server, prompt_of

pytestmark = pytest.mark.e2e


def documented_default() -> str:
    _, _, entry = (ROOT / "docs" / "train.md").read_text().partition("| [verifiers]")
    default, *_ = re.findall(r"`(\{\"return_routed_experts.*?\})`", entry, re.DOTALL)
    return default


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = (
        *SMALL_KV,
        "--max-model-len",
        "2500",
        "--max-num-batched-tokens",
        "256",
        "--enable-scale-out",
    )
    flags += ("--routed-experts-default", documented_default())
    with serving_quickly(tiny_model, tmp_path_factory.mktemp("doors") / "log", *flags) as running:
        yield running


def generate(server: Server, tokens: list[int], start: int, max_tokens: int = 5) -> bytes:
    """As renderers sends it: nothing of ours but vLLM's own prompt start."""
    params = {"max_tokens": max_tokens, "temperature": 0, "stop_token_ids": [258], "logprobs": 1}
    params |= {"skip_special_tokens": False, "routed_experts_prompt_start": start}
    with server.client() as client:
        body = {"model": "tiny", "token_ids": tokens, "sampling_params": params}
        response = client.post("/inference/v1/generate", json=body)
    assert response.status_code == 200, response.text
    return response.content


def test_verifiers_turns(server: Server, oracle: Oracle) -> None:
    parts: list[Any] = []
    tokens: list[int] = []
    made_up = []
    for turn in (prompt_of(70, seed=5), prompt_of(12, seed=6)):
        path_len = len(tokens)
        tokens += turn
        (choice,) = of.renderers(generate(server, tokens, max(path_len - 1, 0)))["choices"]
        assert isinstance(choice["routed_experts"]["data"], memoryview)
        parts += of.verifiers(
            choice["routed_experts"], path_len, [len(turn), len(choice["token_ids"])]
        )
        tokens += choice["token_ids"]
        made_up.append(len(tokens) - 1)  # repeats the row before
    batch = of.prime_rl_trainer(np.concatenate(parts), len(tokens))[0]
    from_model = [at for at in range(len(tokens)) if at not in made_up]
    assert not [wrong for wrong in oracle.wrong(batch, tokens) if wrong.position in from_model]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": prompt_of(9, seed=3)}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Which experts?"}]}),
    ],
)
def test_beam_search(server: Server, path: str, body: dict[str, Any]) -> None:
    """Only the server's default asks: vLLM's answer is better than none."""
    request = {"model": "tiny", "max_tokens": 4, "use_beam_search": True, "n": 2, **body}
    with server.client() as client:
        answered = client.post(path, json=request)
        plain = client.post(path, json={**request, "return_routed_experts": False})
        for own in ({"return_routed_experts": True}, {"routed_experts_format": "npy"}):
            refused = client.post(path, json={**request, **own})
            assert (refused.status_code, refused.json()["error"]["param"]) == (
                400,
                "return_routed_experts",
            )
    assert answered.status_code == 200, answered.text
    assert "routed" not in answered.text
    choices, plain_choices = (
        [*map(said, answers.json()["choices"])] for answers in (answered, plain)
    )
    assert len(choices) == 2
    assert choices == plain_choices


def said(choice: dict[str, Any]) -> tuple[Any, ...]:
    """What does not differ from one answer to the next."""
    return (
        choice["index"],
        choice["finish_reason"],
        choice.get("text"),
        choice.get("message", {}).get("content"),
    )
