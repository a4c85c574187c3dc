"""Real answers through the clients that people use, collected whole, and the example programs as
written."""

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError

from routed_experts.protocol.batch import verify
from routed_experts.protocol.collect import Routing, collect_async
from tests import programs
from tests.e2e.harness import Oracle, Server

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
ROUTING: dict[str, Any] = {"return_routed_experts": True, "return_token_ids": True}


def test_the_openai_clients_asynchronous_stream(server: Server, oracle: Oracle) -> None:
    bad: Any = {**ROUTING, "routed_experts_prompt_start": 6}
    chat: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Which experts?"}],
    }
    chat |= {"max_tokens": 12, "n": 2, "extra_body": {**ROUTING, "ignore_eos": True}}

    async def run() -> list[Routing]:
        transport = httpx.AsyncClient(verify=False, timeout=300)
        async with AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", http_client=transport
        ) as client:
            for streamed in (False, True):
                with pytest.raises(BadRequestError, match="the prompt has 5 tokens") as raised:
                    await client.completions.create(
                        model="tiny", prompt="Hello", stream=streamed, extra_body=bad
                    )
                assert raised.value.param == "routed_experts_prompt_start"
            stream: Any = await client.chat.completions.create(**chat, stream=True)
            return await collect_async(stream)

    routings = asyncio.run(run())
    assert len(routings) == 2
    for routing in routings:
        tokens = [*(routing.prompt_token_ids or ()), *(routing.token_ids or ())]
        verify(routing, num_experts=16)
        assert routing.end == len(tokens) - 1
        assert oracle.wrong(routing.rows, tokens[:-1]) == []


def run_example(name: str, *args: str) -> str:
    """What `examples/name` prints."""
    return programs.run([str(ROOT / "examples" / name), *args], check=True).stdout


def test_the_examples(server: Server) -> None:
    assert "(4, 26, 5, 4) int16" in run_example("rollout.py", "--url", server.url)
    ranks = run_example("dataset.py", "--url", server.url).splitlines()
    assert ranks == [
        "rank 0, layers 0 to 1: [3, 2, 64, 4]",
        "rank 1, layers 2 to 4: [3, 3, 64, 4]",
    ]
    out = run_example("conversation.py", "--url", server.url)
    assert out.startswith("turn 1: 21 new rows of 21\n")
    total = re.search(r"rows \((\d+), 5, 4\) of (\d+) tokens, 0 missing", out)
    assert total is not None
    assert int(total[1]) == int(total[2]) - 1
