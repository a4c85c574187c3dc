"""Situations on the engine around arithmetic, each as short as `engine` lets a test be."""

from typing import Any

import pytest
from vllm.v1.request import Request

from routed_experts.capture.scheduler.scheduler import SchedulerHooks
from tests.contract.engine import Client, Core, engine, tokens


def test_an_abort_in_the_prefill(is_async: bool) -> None:
    """What another request finds in the blocks that it left has its rows."""
    client = Client(engine(is_async, chunk=48))
    client.add("gone", tokens(150))
    client.steps(2)
    client.abort("gone")
    client.add("stays", tokens(150))
    client.finish(but="gone")


def more_than_is_free(core: Core) -> None:
    client = Client(core)
    client.add("runs", tokens(60), max_tokens=30)
    client.steps(5)
    client.add("waits", tokens(140, seed=1), n=2)
    client.finish()


def test_a_prompt_that_is_longer_than_all_that_is_free(is_async: bool) -> None:
    more_than_is_free(engine(is_async, num_blocks=12, chunk=48))


class NewerScheduler:
    """The hooks as a newer vLLM calls them: with more arguments, and for outputs that are not
    ours."""

    def __init__(self, hooks: SchedulerHooks) -> None:
        self._hooks: Any = hooks

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._hooks, name)
        if name not in CALLED_BY_VLLM:
            return method
        return lambda *args: method(*args, "more", since="0.34")

    def take_output(self, request: Request, output: Any) -> Any:
        hooks = self._hooks
        assert not hooks.replays_prompt_logprobs(request)
        assert hooks.take_logprobs(request, output) is None
        assert hooks.take_prompt_logprobs(request, output, keys=("logprobs",)) is None
        assert hooks.release_request(request) is None
        return hooks.take_output(request, output, {"keys": True})


CALLED_BY_VLLM = {
    "build_connector_meta",
    "request_finished",
    "reset",
    "max_cache_hit",
    "request_loading",
}


def test_a_newer_vllm_gives_more_arguments_and_asks_for_more(is_async: bool) -> None:
    core = engine(is_async, num_blocks=12, chunk=48)
    core.scheduler.aux_output_connector = NewerScheduler(core.scheduler.aux_output_connector)
    more_than_is_free(core)
    with pytest.raises(AttributeError):
        _ = core.scheduler.aux_output_connector._typing_error


def test_from_the_second_token_on_rows_come_with_those_of_other_streams(is_async: bool) -> None:
    core = engine(is_async)
    client = Client(core)
    client.add("asks", tokens(20))
    while not client.received["asks"].tokens:
        client.steps(1)
    assert "asks" in core.capture.distributor.requests.streams
    client.finish()
