"""Real answers through the clients that people use, collected whole, and the example programs as written."""

import asyncio
import csv
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
import requests
from openai import AsyncOpenAI, BadRequestError, OpenAI

from routed_experts.protocol.batch import verify
from routed_experts.protocol.collect import Routing, collect, collect_async
from routed_experts.server.cli.main import main
from tests.e2e.harness import Oracle, Server, prompt_of

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
P, G, N = 150, 12, 2
ROUTING: dict[str, Any] = {"return_routed_experts": True, "return_token_ids": True}
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": G, "n": N, "temperature": 1, "ignore_eos": True}
PROMPT = prompt_of(P, seed=9)


def check(routings: list[Routing], oracle: Oracle, choices: int = N) -> None:
    assert len(routings) == choices
    for routing in routings:
        assert routing.prompt_token_ids is not None
        assert routing.token_ids is not None
        tokens = [*routing.prompt_token_ids, *routing.token_ids]
        assert len(routing.rows) == len(tokens) - 1
        verify(routing, num_experts=16)
        assert oracle.wrong(routing.rows, tokens[:-1]) == []


def openai_client(url: str, body: dict[str, Any]) -> Any:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", http_client=httpx.Client(verify=False, timeout=300))
    fields = {name: value for name, value in body.items() if name not in ("ignore_eos", *ROUTING)}
    return client.completions.create(**fields, extra_body={**ROUTING, "ignore_eos": True})


def httpx_lines(url: str, body: dict[str, Any]) -> Any:
    with httpx.stream("POST", f"{url}/v1/completions", json=body, verify=False, timeout=300) as response:
        yield from response.iter_lines()


def requests_lines(url: str, body: dict[str, Any]) -> Any:
    with requests.post(f"{url}/v1/completions", json=body, stream=True, timeout=300) as response:
        yield from response.iter_lines()


async def aiohttp_lines(url: str, body: dict[str, Any]) -> AsyncIterator[Any]:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
        async for line in response.content:
            yield line


async def httpx_async_lines(url: str, body: dict[str, Any]) -> AsyncIterator[Any]:
    async with (
        httpx.AsyncClient(verify=False, timeout=300) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as response,
    ):
        async for line in response.aiter_lines():
            yield line


def test_the_openai_clients_asynchronous_stream(server: Server, oracle: Oracle) -> None:
    bad: Any = {**ROUTING, "routed_experts_prompt_start": 6}
    chat: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Which experts?"}]}
    chat |= {"max_tokens": G, "n": N, "extra_body": {**ROUTING, "ignore_eos": True}}

    async def run() -> list[Routing]:
        transport = httpx.AsyncClient(verify=False, timeout=300)
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=transport) as client:
            for streamed in (False, True):
                with pytest.raises(BadRequestError, match="the prompt has 5 tokens") as raised:
                    await client.completions.create(model="tiny", prompt="Hello", stream=streamed, extra_body=bad)
                assert raised.value.param == "routed_experts_prompt_start"
            stream: Any = await client.chat.completions.create(**chat, stream=True)
            return await collect_async(stream)

    check(asyncio.run(run()), oracle)


@pytest.mark.parametrize("client", [openai_client, httpx_lines, requests_lines, aiohttp_lines, httpx_async_lines])
def test_streams(server: Server, oracle: Oracle, client: Callable[..., Any]) -> None:
    stream = client(server.url, {**BODY, **ROUTING, "prompt": PROMPT, "stream": True})
    check(asyncio.run(collect_async(stream)) if isinstance(stream, AsyncIterator) else collect(stream), oracle)


def test_f6_the_same_export_twice(server: Server, tmp_path: Path) -> None:
    """F6: the same rows of the same tokens."""
    (tmp_path / "prompts.txt").write_text("Which experts?\nAnd why?\n")
    texts = []
    for name in ("one.csv", "other.csv"):
        command = ["export", "--url", server.url, "--prompts", str(tmp_path / "prompts.txt"), "--max-tokens", "12"]
        assert main([*command, "-o", str(tmp_path / name)]) == 0
        rows = csv.DictReader((tmp_path / name).open(newline="", encoding="utf-8"))
        texts.append([{name: value for name, value in row.items() if name != "id"} for row in rows])
    assert texts[0] == texts[1]


def run_example(name: str, *args: str) -> str:
    """What `examples/name` prints."""
    command = [sys.executable, str(ROOT / "examples" / name), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_examples(server: Server) -> None:
    assert "(4, 26, 5, 4) int16" in run_example("rollout.py", "--url", server.url)
    out = run_example("conversation.py", "--url", server.url)
    assert out.startswith("turn 1: 21 new rows of 21\n")
    total = re.search(r"rows \((\d+), 5, 4\) of (\d+) tokens, 0 missing", out)
    assert total is not None
    assert int(total[1]) == int(total[2]) - 1
