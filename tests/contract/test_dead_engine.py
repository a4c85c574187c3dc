"""An engine that dies while requests run: each of them learns it in OpenAI's form, and few lines
say so in the log.

A process that is killed is in `tests/e2e/test_stopping.py`.
"""

import asyncio
import logging
from pathlib import Path

import httpx
import orjson
import pytest
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.exceptions import EngineDeadError

from tests.contract.engine import Core
from tests.contract.served import InProcessClient, serving
from tests.e2e.harness import ASK, CHAT, COMPLETIONS

REQUESTS = 60


def bodies() -> list[tuple[str, dict[str, object]]]:
    """Requests of both kinds, half of them streamed, some of them with rows."""
    messages = [{"role": "user", "content": "Which experts?"}]
    made = []
    for index in range(REQUESTS):
        path, prompt = (
            (COMPLETIONS, {"prompt": "abc"}) if index % 3 else (CHAT, {"messages": messages})
        )
        body = {"model": "tiny", "stream": index % 2 == 0, **prompt, **(ASK if index % 5 else {})}
        made.append((path, body))
    return made


async def ask_all(url: str, requests: list[tuple[str, dict[str, object]]]) -> list[httpx.Response]:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        return await asyncio.gather(*(client.post(path, json=body) for path, body in requests))


def check_refused(response: httpx.Response) -> None:
    assert response.status_code == 503, response.text
    assert int(response.headers["Retry-After"]) >= 1
    error = response.json()["error"]
    assert (error["code"], error["type"]) == (503, "ServiceUnavailableError")
    assert "The engine has died" in error["message"]


def check_stream(response: httpx.Response) -> None:
    *_, last, done = filter(None, response.text.splitlines())
    assert done == "data: [DONE]"
    error = orjson.loads(last.removeprefix("data: "))["error"]
    assert (response.status_code, error["code"]) == (200, 503)
    assert "The engine has died" in error["message"]


def test_requests_of_an_engine_that_dies_end_with_503_and_a_few_lines_of_log(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # so that it is there to be asked again
    monkeypatch.setenv("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "1")
    with serving(tiny_model) as server, server.client() as client:

        def die_when_all_are_there(core: Core) -> None:
            if core.scheduler.get_num_unfinished_requests() == REQUESTS:
                raise EngineDeadError

        monkeypatch.setattr(Core, "turn", die_when_all_are_there)
        monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
        responses = asyncio.run(ask_all(server.url, bodies()))
        later = [
            client.get("/health"),
            *(client.post(path, json=body) for path, body in bodies()[:4]),
        ]
    for response, (_, body) in zip(responses, bodies(), strict=True):
        check = check_stream if body["stream"] else check_refused
        check(response)
    for response in later:
        check_refused(response)
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert [*dict.fromkeys(errors)] == [  # in one process with other tests, each is caught twice
        "AsyncLLM output_handler failed.",
        f"The engine has died: {REQUESTS} running requests end with 503.",
    ]


def test_requests_that_find_the_engine_dead_before_anybody_says_so_end_the_same(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those whose prompts were prepared when the engine died: one that is streamed, and one that
    is not."""
    monkeypatch.setenv("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "1")
    with serving(tiny_model) as server:
        arrived = []

        async def die_when_both_are_there(
            client: InProcessClient, request: EngineCoreRequest
        ) -> None:
            arrived.append(request)
            while len(arrived) < 2:
                await asyncio.sleep(0.01)
            raise EngineDeadError

        monkeypatch.setattr(InProcessClient, "add_request_async", die_when_both_are_there)
        streamed, other = asyncio.run(ask_all(server.url, bodies()[:2]))
    check_stream(streamed)
    check_refused(other)
