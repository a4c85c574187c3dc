"""OpenAI's own client: the arrays arrive in its objects, and `protocol.codec` decodes them."""

import asyncio
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from routed_experts.protocol.codec import decode
from tests.e2e.harness import Oracle, Server

pytestmark = pytest.mark.e2e

MESSAGES: Any = [{"role": "user", "content": "Which experts?"}]
ASK: dict[str, Any] = {"return_routed_experts": True, "return_token_ids": True, "ignore_eos": True}
TOKENS = 8


@pytest.fixture
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=httpx.Client(verify=False))


def async_client(server: Server) -> AsyncOpenAI:
    http = httpx.AsyncClient(verify=False)
    return AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http)


def check(oracle: Oracle, prompt: list[int], tokens: list[int], prompt_rows: np.ndarray, rows: np.ndarray) -> None:
    assert len(tokens) == TOKENS
    assert len(prompt_rows) == len(prompt)
    assert len(rows) == TOKENS - 1
    assert oracle.wrong(np.concatenate([prompt_rows, rows]), [*prompt, *tokens[:-1]]) == []


class Collected:
    """What a stream brought, chunk by chunk, as attributes of the client's objects."""

    def __init__(self) -> None:
        self.prompt: list[int] = []
        self.tokens: list[int] = []
        self.prompt_rows: np.ndarray | None = None
        self.rows: list[np.ndarray] = []

    def take(self, chunk: Any) -> None:
        (choice,) = chunk.choices
        self.prompt += getattr(chunk, "prompt_token_ids", None) or getattr(choice, "prompt_token_ids", None) or []
        self.tokens += getattr(choice, "token_ids", None) or []
        if hasattr(chunk, "prompt_routed_experts"):
            assert self.prompt_rows is None
            self.prompt_rows = decode(chunk.prompt_routed_experts)
        if hasattr(choice, "routed_experts"):
            self.rows.append(decode(choice.routed_experts))

    def check(self, oracle: Oracle) -> None:
        assert self.prompt_rows is not None
        check(oracle, self.prompt, self.tokens, self.prompt_rows, np.concatenate(self.rows))


def check_response(oracle: Oracle, response: Any) -> None:
    (choice,) = response.choices
    prompt = getattr(response, "prompt_token_ids", None) or choice.prompt_token_ids
    prompt_rows, rows = decode(response.prompt_routed_experts), decode(choice.routed_experts)
    check(oracle, prompt, choice.token_ids, prompt_rows, rows)


def test_completion(client: OpenAI, oracle: Oracle) -> None:
    response = client.completions.create(model="tiny", prompt="Hello", max_tokens=TOKENS, extra_body=ASK)
    check_response(oracle, response)


def test_chat(client: OpenAI, oracle: Oracle) -> None:
    response = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=TOKENS, extra_body=ASK)
    check_response(oracle, response)


def test_completion_streamed(client: OpenAI, oracle: Oracle) -> None:
    collected = Collected()
    for chunk in client.completions.create(
        model="tiny", prompt="Hello", max_tokens=TOKENS, stream=True, extra_body=ASK
    ):
        collected.take(chunk)
    collected.check(oracle)


def test_chat_streamed(client: OpenAI, oracle: Oracle) -> None:
    collected = Collected()
    for chunk in client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=TOKENS, stream=True, extra_body=ASK
    ):
        collected.take(chunk)
    collected.check(oracle)


def test_async(server: Server, oracle: Oracle) -> None:
    """All four at once, from one asynchronous client."""

    async def run() -> None:
        async with async_client(server) as client:
            common: dict[str, Any] = {"model": "tiny", "max_tokens": TOKENS, "extra_body": ASK}

            async def streamed(request: Any) -> Collected:
                collected = Collected()
                async for chunk in await request:
                    collected.take(chunk)
                return collected

            completion, chat, completion_stream, chat_stream = await asyncio.gather(
                client.completions.create(prompt="Hello", **common),
                client.chat.completions.create(messages=MESSAGES, **common),
                streamed(client.completions.create(prompt="Hello", stream=True, **common)),
                streamed(client.chat.completions.create(messages=MESSAGES, stream=True, **common)),
            )
        for response in (completion, chat):
            check_response(oracle, response)
        for collected in (completion_stream, chat_stream):
            collected.check(oracle)

    asyncio.run(run())


@pytest.mark.parametrize("form", ["npy", "raw", "list"])
def test_other_forms(client: OpenAI, form: str) -> None:
    common: dict[str, Any] = {"model": "tiny", "prompt": "Hello", "max_tokens": 4, "temperature": 0}
    default: Any = client.completions.create(**common, extra_body={"return_routed_experts": True})
    other: Any = client.completions.create(
        **common, extra_body={"return_routed_experts": True, "routed_experts_format": form}
    )
    for a, b in [
        (default.prompt_routed_experts, other.prompt_routed_experts),
        (default.choices[0].routed_experts, other.choices[0].routed_experts),
    ]:
        assert np.array_equal(decode(a), decode(b, num_layers=5, top_k=4))


def test_without_the_opt_in_the_attributes_are_absent(client: OpenAI) -> None:
    response = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2)
    assert not hasattr(response, "prompt_routed_experts")
    assert not hasattr(response.choices[0], "routed_experts")


@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_clients(client: OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(
            model="tiny", prompt="Hello", stream=stream, extra_body={**ASK, "routed_experts_prompt_start": 6}
        )
    assert raised.value.param == "routed_experts_prompt_start"
    assert "the prompt has 5 tokens" in raised.value.message
