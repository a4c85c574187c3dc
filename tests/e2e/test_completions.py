"""One server with a real engine, asynchronous scheduling and a KV cache too small for its load:
every row of every answer against a Hugging Face forward pass.

A test of another situation on it is a call of `one` and of `check`. What needs no real model is in
`tests/contract`, where no server has to be started.
"""

import json
from importlib.metadata import version
from typing import Any

import orjson
import pytest
import vllm

from routed_experts.protocol.models import RoutedExpertsInfo
from tests.e2e.harness import (
    CHAT,
    COMPLETIONS,
    ON_GPU,
    Oracle,
    Server,
    answers_of,
    answers_of_stream,
    check_held_back,
    prompt_of,
    same,
    vllm_fails,
)
from tests.e2e.torture import REQUESTS, Torture

pytestmark = pytest.mark.e2e

USER: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell me something about experts."}]
}


def test_a_mix_of_everything(server: Server, oracle: Oracle) -> None:
    """Starts in a prompt, one new token, stop strings, echo, grammars, clients that leave, hits on
    prefixes and on generated tokens, preemption and so on: each of `SITUATIONS` must occur."""
    assert Torture(server, oracle, "async", REQUESTS).run() == []


def test_same_answer_with_and_without_routing(server: Server) -> None:
    for ask, path, body in (
        (server.complete, COMPLETIONS, {"prompt": prompt_of(70, seed=6), "logprobs": 3}),
        (server.chat, CHAT, {**USER, "logprobs": True, "top_logprobs": 2}),
    ):
        body |= {"max_tokens": 12, "return_token_ids": True}
        ask(**body)  # so that both hit the same prefix
        plain, routed = ask(**body), ask(**body, return_routed_experts=True)
        assert b"routed_experts" not in orjson.dumps([plain, server.stream(path, **body)])
        streamed = answers_of_stream(server.stream(path, **body, return_routed_experts=True))
        same(*answers_of(routed), *streamed)
        for answer in (plain, routed):
            del answer["id"], answer["created"]
        del routed["prompt_routed_experts"], routed["choices"][0]["routed_experts"]
        assert plain == routed


# ---- text that is held back ----


TOOL_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.mark.parametrize(
    "fields", [{"structured_outputs": {"choice": [TOOL_CALL]}}, {"tool_choice": "required"}]
)
def test_tool_call_that_the_parser_holds_back(
    server: Server, oracle: Oracle, fields: dict[str, Any]
) -> None:
    function = {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
    body = {
        **USER,
        "max_tokens": 120,
        "tools": [{"type": "function", "function": function}],
        **fields,
    }
    if vllm_fails(server, CHAT, body):
        pytest.skip(f"vLLM {vllm.__version__} fails a required tool call with this tokenizer")
    chunks = check_held_back(server, oracle, body)
    if "structured_outputs" in fields:
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        arguments = [
            call["function"].get("arguments")
            for delta in deltas
            for call in delta.get("tool_calls") or []
        ]
        assert json.loads("".join(filter(None, arguments))) == {"city": "Rome"}


# ---- what is beside the answers ----


def test_what_the_rows_mean(server: Server) -> None:
    body = server.info()
    info = RoutedExpertsInfo.model_validate(body)
    assert set(body) == set(RoutedExpertsInfo.model_fields)
    assert (info.model, info.num_layers, info.top_k, info.num_experts) == ("tiny", 5, 4, 16)
    assert (info.layer_ids, info.num_hidden_layers) == ([1, 2, 3, 4, 5], 6)  # layer 0 is dense
    ours = version("routed-experts-server")
    assert (info.dtype, info.version, info.vllm_version) == ("int16", ours, vllm.__version__)
    if not ON_GPU:
        assert (info.capture.runner, info.capture.device) == ("v1", "cpu")
    assert info.capture.kv_slots > 0
    assert info.capture.host_cache_bytes == info.capture.kv_slots * 5 * 4 * (2 + 4)  # with weights
    assert f"] routed-experts-server {ours}, vLLM {vllm.__version__}\n" in server.log.read_text()
