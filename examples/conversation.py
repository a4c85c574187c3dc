"""A conversation of several turns, each of which asks only for the routing that it has not seen,
from a raw stream.

    python examples/conversation.py --url http://localhost:8000

Needs numpy and aiohttp.
"""

import argparse
import asyncio

import aiohttp

from routed_experts.protocol.batch import join_turns
from routed_experts.protocol.collect import Routing, collect_async

TURNS = ["Which experts?", " And then?", " Why?"]


async def turn(session: aiohttp.ClientSession, model: str, tokens: list[int], seen: int) -> Routing:
    """One turn after `tokens`, of which the rows before `seen` are known."""
    body = {
        "model": model,
        "prompt": tokens,
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
        "return_routed_experts": True,
        "return_token_ids": True,
        "routed_experts_prompt_start": seen,
    }
    async with session.post("/v1/completions", json=body) as response:
        response.raise_for_status()
        # text alone
        (routing,) = await collect_async(response.content, prompt_start=seen, media=())
        return routing


async def converse(url: str) -> Routing:
    async with aiohttp.ClientSession(url) as session:
        async with session.get("/v1/routed_experts") as response:
            model = (await response.json())["model"]
        tokens: list[int] = []
        turns: list[Routing] = []
        for text in TURNS:
            async with session.post("/tokenize", json={"model": model, "prompt": text}) as response:
                tokens += (await response.json())["tokens"]
            turns.append(await turn(session, model, tokens, seen=turns[-1].end if turns else 0))
            tokens += turns[-1].token_ids or ()
            print(f"turn {len(turns)}: {len(turns[-1].rows)} new rows of {turns[-1].end}")
        return join_turns(turns)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://localhost:8000")
    routing = asyncio.run(converse(parser.parse_args().url))
    print(
        f"the whole conversation: rows {routing.rows.shape} of {routing.end + 1} tokens, {routing.missing} missing"
    )


if __name__ == "__main__":
    main()
