"""What goes wrong in vLLM alone too (`docs/support.md`): beside it, each row is right, or unknown
and counted.

Where vLLM has mended a fault, its test fails without the capture: then the sentence in
`docs/support.md` goes, and so does the test.
"""

from collections.abc import Iterator

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.triton_utils import HAS_TRITON
from vllm.v1.engine import FinishReason
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from routed_experts.capture.wire.prefill_rows import PARAM
from tests.contract.engine import BLOCK, Client, tokens
from tests.contract.loads import PULL, REMOTE, engine_with_store, store
from tests.contract.offloading import NAME as OFFLOADING
from tests.contract.offloading import engine_that_offloads, num_loaded
from tests.contract.test_versions import looks_first

IS_MENDED = looks_first(OffloadingConnectorScheduler.update_state_after_alloc.__code__.co_names)
"""Whether vLLM's offloading sees what other connectors load (0.33)."""

PROMPT = tokens(6 * BLOCK + 1)


@pytest.fixture(autouse=True)
def stores() -> Iterator[None]:
    with store():
        yield


@pytest.fixture(params=[False, True], ids=["vLLM alone", "with the capture"])
def captures(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def start(captures: bool) -> int | None:
    """Of a request: vLLM's own scheduler knows no rows."""
    return 0 if captures else None


def offer(prompt: list[int], captures: bool) -> dict[str, object]:
    """What a decode request gets from a prefill instance that has computed `prompt`."""
    prefill = Client(engine_with_store(PULL, is_async=False))
    params = prefill.answer(
        "prefill", prompt, max_tokens=1, kv_transfer_params=dict(REMOTE)
    ).kv_transfer_params
    assert params is not None
    return {name: value for name, value in params.items() if captures or name != PARAM}


@pytest.mark.skipif(HAS_TRITON, reason="vLLM's kernel for this needs Triton, which is installed")
def test_top_k_in_a_step_for_which_nothing_was_drafted() -> None:
    """With drafts, top_k is applied to the drafted positions. On a CPU the step raises where there
    is none, which ends the engine: there are no rows of it."""
    logits, top_k = torch.empty(0, 8), torch.empty(0, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="Expected reduction dim to be specified"):
        apply_top_k_top_p(logits, top_k, None)


def test_two_resets_of_what_is_offloaded_without_a_step_between(captures: bool) -> None:
    """The second one fails, in vLLM's assertion; it has nothing left to reset, and the engine goes
    on."""
    core = engine_that_offloads(is_async=False, captures=captures)
    core.model_executor.worker._chance = 0
    client = Client(core)
    client.add("running", PROMPT, start(captures), max_tokens=40)
    client.steps(4)
    assert core.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    with pytest.raises(AssertionError):
        core.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    core.model_executor.worker._chance = 1
    client.add("after", PROMPT, start(captures))
    client.run()
    assert {request.finish for request in client.received.values()} == {FinishReason.LENGTH}
    if captures:
        client.finish()


def test_a_pull_into_a_block_that_is_copied_out_still(captures: bool) -> None:
    """vLLM alone keeps the pull's KV as that of the block's request before: a later one loads it,
    and computes with it. The capture tells offloading of such blocks."""
    connectors = {"connectors": (PULL, OFFLOADING), "num_blocks": 12, "chunk": 256}
    core = engine_that_offloads(is_async=False, captures=captures, **connectors)
    client, pulled = Client(core), tokens(9 * BLOCK, seed=1)
    core.model_executor.worker._chance = 0  # copies nothing before it has to
    client.add("before", PROMPT, start(captures), max_tokens=1)
    steps_until(client, "before")
    client.add("pulls", pulled, start(captures), kv_transfer_params=offer(pulled, captures))
    steps_until(client, "pulls")
    core.model_executor.worker._chance = 1
    client.run()
    core.empty_prefix_cache()
    client.add("loads", PROMPT, start(captures))
    if captures:
        client.finish()
        assert num_loaded(core) == 6
    elif not IS_MENDED:
        with pytest.raises(AssertionError, match="loads: its blocks hold another prefix"):
            client.run()


def steps_until(client: Client, name: str) -> None:
    for _ in range(100):
        client.step()
        if client.received[name].finish is not None:
            return
    raise AssertionError(f"{name} does not end")


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_pull_that_needs_every_block(captures: bool, drafts: int) -> None:
    """With drafts it is never admitted, as vLLM wants a block more for them, and those behind it
    wait until it is aborted. Their rows are whole then."""
    num_blocks = 12  # of which vLLM keeps one for padding
    core = engine_with_store(
        PULL, is_async=False, num_blocks=num_blocks, drafts=drafts, captures=captures
    )
    client, prompt = Client(core), tokens((num_blocks - 2) * BLOCK + 1)
    client.add(
        "pulls", prompt, start(captures), kv_transfer_params=offer(prompt, captures), max_tokens=1
    )
    client.add("behind", tokens(20), start(captures), max_tokens=9)
    client.steps(40)
    waits = {name for name, request in client.received.items() if request.finish is None}
    assert waits == ({"pulls", "behind"} if drafts else set())
    client.abort("pulls")
    steps_until(client, "behind")
    if captures:
        client.finish(but="pulls")
