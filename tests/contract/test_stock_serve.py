"""`vllm serve MODEL --enable-return-routed-experts`, vLLM's own command, with this package installed."""

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.envs import disable_envs_cache

from routed_experts.protocol.models import FieldError
from routed_experts.server.inprocess.engine_hooks import _beam_search_online
from tests.contract.engine import K, L, Rows, Tokens
from tests.contract.served import DECODER_LAYERS, LAYER_IDS, serving, vllms
from tests.e2e.harness import ASK, Server, answers_of, answers_of_stream, prompt_of, same

GENERATE = "/inference/v1/generate"
OVERRIDES = json.dumps({"num_experts": 1 << 15, "num_hidden_layers": DECODER_LAYERS})
HELLO = [{"role": "user", "content": "Which experts?"}]
FLAGS = ("--enable-return-routed-experts", "--enable-scale-out", "--hf-overrides", OVERRIDES)


def rows_of(tokens: list[int], start: int = 0) -> Rows:
    """What an answer has for all tokens but the last."""
    return Tokens(tokens).rows(start, len(tokens) - 1).astype(np.uint16)


def vllms_rows_of(tokens: list[int], start: int = 0) -> Rows:
    """The same as vLLM's own capture has it: zeros in layers without experts."""
    rows = np.zeros((len(tokens) - 1 - start, DECODER_LAYERS, K), dtype=np.uint16)
    rows[:, LAYER_IDS] = rows_of(tokens, start)
    return rows


def npy(text: str) -> Any:
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


def generate(server: Server, prompt: list[int], start: int = 0, **body: Any) -> dict[str, Any]:
    asked = {"max_tokens": 7, "n": 2, "temperature": 1.0, "routed_experts_prompt_start": start}
    with server.client() as client:
        response = client.post(GENERATE, json={"model": "tiny", "token_ids": prompt, "sampling_params": asked, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def check_generate(server: Server, start: int) -> None:
    """The answer in vLLM's own form, which its own way of asking gets, whole and streamed."""
    prompt = prompt_of(30, 6)  # whose rows fit one line
    whole = generate(server, prompt, start)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    for choice in whole["choices"]:
        rows = npy(choice["routed_experts"])
        assert rows.dtype == np.uint16
        assert np.array_equal(rows, vllms_rows_of([*prompt, *choice["token_ids"]], start))
    params = {"max_tokens": 7, "routed_experts_prompt_start": start}
    tokens, parts = list(prompt), []
    for chunk in server.stream(GENERATE, token_ids=prompt, sampling_params=params):
        (choice,) = chunk["choices"]
        first = start + sum(map(len, parts))
        tokens += choice["token_ids"]
        parts.append(npy(choice["routed_experts"]))
        assert np.array_equal(parts[-1], vllms_rows_of(tokens, first))
    assert len(tokens) == 37
    assert start + sum(map(len, parts)) == 36


# ---- with the endpoint plugin named: the whole HTTP contract ----


@pytest.fixture(scope="module")
def extended(tiny_model: Path) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "another,routed_experts")
        with serving(tiny_model, *FLAGS, command=vllms) as server:
            yield server


@pytest.mark.parametrize("n", [1, 3])
def test_requests_that_ask(extended: Server, n: int) -> None:
    body = {**ASK, "prompt": prompt_of(70, 1), "max_tokens": 9, "n": n, "temperature": 1.0}
    whole = answers_of(extended.complete(**body))
    for one, other in zip(whole, answers_of_stream(extended.stream(**body), per_prompt=n), strict=True):
        same(one, other)
        assert np.array_equal(np.concatenate([one.prompt_rows, one.rows]), rows_of([*one.prompt, *one.tokens]))


def test_requests_that_do_not_ask_get_nothing(extended: Server) -> None:
    body = {"prompt": prompt_of(10, 1), "max_tokens": 3}
    messages = [{"role": "user", "content": "Which experts?"}]
    answers = [extended.complete(**body), extended.chat(messages=messages, max_tokens=3), *extended.stream(**body)]
    assert "routed" not in json.dumps(answers)


def test_beam_search_without_routing_is_not_refused(extended: Server) -> None:
    """There, requests ask for themselves. The executor has no log probabilities, so vLLM's search fails later."""
    with extended.client() as client:
        asked = {"model": "tiny", "prompt": "a", "max_tokens": 3, "use_beam_search": True, "n": 2}
        response = client.post("/v1/completions", json=asked)
    assert response.status_code != 400, response.text


def test_what_the_rows_mean(extended: Server) -> None:
    assert (extended.info()["num_layers"], extended.info()["top_k"]) == (L, K)


@pytest.mark.parametrize("start", [0, 17, 30])
def test_vllms_own_endpoint(extended: Server, start: int) -> None:
    check_generate(extended, start)


def test_vllms_own_endpoint_can_be_asked_in_our_way(extended: Server) -> None:
    prompt = prompt_of(20, 3)
    answer = generate(extended, prompt, routed_experts_format="list", routed_experts_layout="joined")
    for choice in answer["choices"]:
        assert choice["routed_experts"] == rows_of([*prompt, *choice["token_ids"]]).tolist()
    answer = generate(extended, prompt, return_routed_experts=False)
    assert "routed" not in json.dumps(answer).replace('"routed_experts": null', "")


def test_server_wide_defaults(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "routed_experts")
    disable_envs_cache()
    default = {"routed_experts_default": {"return_routed_experts": True, "routed_experts_format": "list"}}
    prompt = prompt_of(9, 4)
    with serving(tiny_model, *FLAGS, "--additional-config", json.dumps(default), command=vllms) as server:
        answer = server.complete(prompt=prompt, max_tokens=3, return_token_ids=True)
    tokens = [*prompt, *answer["choices"][0]["token_ids"]]
    assert answer["prompt_routed_experts"] == rows_of(tokens)[:9].tolist()
    assert answer["choices"][0]["routed_experts"] == rows_of(tokens)[9:].tolist()


def test_wrong_defaults_are_refused_at_start(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "routed_experts")
    disable_envs_cache()
    wrong = json.dumps({"routed_experts_default": {"routed_experts_format": "xml"}})
    with (
        pytest.raises(FieldError, match="routed_experts_format"),
        serving(tiny_model, *FLAGS, "--additional-config", wrong, command=vllms),
    ):
        pass


# ---- without: vLLM's own routes, with arrays from this capture ----


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Iterator[Server]:
    disable_envs_cache()  # what the engine of the server before keeps
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "")
        with serving(tiny_model, *FLAGS, command=vllms) as server:
            yield server


@pytest.mark.parametrize("start", [0, 17, 30])
def test_vllms_own_routes(plain: Server, start: int) -> None:
    check_generate(plain, start)
    with plain.client() as client:
        assert client.get("/v1/routed_experts").status_code == 404
    prompt = prompt_of(20, 3)
    for choice in plain.complete(prompt=prompt, max_tokens=4, n=2, temperature=1.0, return_token_ids=True)["choices"]:
        assert np.array_equal(npy(choice["routed_experts"]), vllms_rows_of([*prompt, *choice["token_ids"]]))


def test_beam_search_is_refused(plain: Server) -> None:
    """Its beams are put together from the answers of others, without their rows."""
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": HELLO})):
        with plain.client() as client:
            asked = {"model": "tiny", "max_tokens": 3, "use_beam_search": True, "n": 2, **body}
            response = client.post(path, json=asked)
        assert response.status_code == 400, response.text
        assert "cannot be returned with beam search" in response.json()["error"]["message"]


def test_beam_search_on_a_programs_own_engine_client() -> None:
    """Which has no configuration to look at, or one of its own."""
    serving = SimpleNamespace(engine_client=object())
    assert _beam_search_online(lambda serving: "searched", serving) == "searched"
