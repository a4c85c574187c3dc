"""Prefill and decode in two engines, with vLLM's NIXL connector between them: whose rows are where.

On a CPU both engines compute the same, so that nobody could tell the prefill engine's rows from the decode engine's. So
each id of what is handed over is made another here, and must arrive as that.
"""

import importlib.util
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.harness import FULL_PRECISION, ON_GPU, Answer, Oracle, check, free_port, prompt_of

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed"),
    pytest.mark.skipif(ON_GPU, reason="written for two engines on a CPU"),
]

EXPERTS = 16
BLOCK = 32
LIMIT_S = 180
CONFIG = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"num_threads": 0},
    "kv_load_failure_policy": "recompute",
}


@dataclass
class Answered:
    """What an engine says: of the rows, all L, of which the tiny model's first layer has no experts."""

    prompt: list[int]
    tokens: list[int]
    rows: np.ndarray
    cached: int
    params: dict[str, Any] | None


def run_engine(pipe: Connection, model: str, port: int) -> None:
    """An engine in a process, which it shares with its only worker."""
    os.environ |= {**FULL_PRECISION, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "UCX_TLS": "tcp,self,sm"}
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        enable_return_routed_experts=True,
        kv_cache_memory_bytes=16 << 20,
        block_size=BLOCK,
        max_model_len=512,
        max_num_batched_tokens=64,
        kv_transfer_config=KVTransferConfig(**CONFIG),  # type: ignore[arg-type]
    )
    pipe.send("ready")
    while True:
        prompt, max_tokens, params = pipe.recv()
        sampled = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        sampled.extra_args = {"kv_transfer_params": params}
        (output,) = llm.generate({"prompt_token_ids": prompt}, sampled, use_tqdm=False)
        (choice,) = output.outputs
        pipe.send(
            Answered(
                prompt,
                list(choice.token_ids),
                choice.routed_experts,
                output.num_cached_tokens,
                output.kv_transfer_params,
            )
        )


class Engine:
    def __init__(self, model: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=run_engine, args=(theirs, str(model), free_port()), daemon=True)
        self._process.start()

    def ask(self, prompt: list[int], max_tokens: int, params: dict[str, Any] | None = None) -> Answered:
        self._pipe.send((prompt, max_tokens, params))
        answered: Answered = self.receive()
        return answered

    def receive(self) -> Any:
        if not self._pipe.poll(LIMIT_S):
            raise TimeoutError("an engine does not answer")
        return self._pipe.recv()

    def stop(self) -> None:
        self._process.kill()
        self._process.join()


@dataclass
class Legs:
    prefill: Engine
    decode: Engine

    def warm_up(self) -> None:
        """What an engine loads before it has computed anything has no rows: see docs/pd.md."""
        for engine in (self.prefill, self.decode):
            engine.ask([1], 2)

    def first(self, prompt: list[int]) -> Answered:
        return self.prefill.ask(prompt, 1, {"do_remote_decode": True, "routed_experts": True})


@pytest.fixture(scope="module")
def legs(tiny_model: Path) -> Iterator[Legs]:
    engines = [Engine(tiny_model) for _ in range(2)]
    try:
        assert [engine.receive() for engine in engines] == ["ready", "ready"]
        legs = Legs(*engines)
        legs.warm_up()
        yield legs
    finally:
        for engine in engines:
            engine.stop()


def tagged(params: dict[str, Any]) -> dict[str, Any]:
    """The same with every id the next one."""
    handed = params["routed_experts"]
    ids = (np.frombuffer(handed["data"], handed["dtype"]) + 1) % EXPERTS
    return {**params, "routed_experts": {**handed, "data": ids.astype(handed["dtype"]).tobytes()}}


def untagged(answer: Answered, positions: slice) -> Answered:
    rows = answer.rows.astype(np.int16)
    rows[positions, 1:] = (rows[positions, 1:] - 1) % EXPERTS
    return replace(answer, rows=rows)


def check_rows(answer: Answered, oracle: Oracle) -> None:
    p = len(answer.prompt)
    assert len(answer.rows) == p + len(answer.tokens) - 1
    rows = answer.rows[:, 1:].astype(np.int16)
    check(Answer(answer.prompt, answer.tokens, 0, rows[:p], rows[p:]), oracle)


@pytest.mark.parametrize("length", [5, 31, 32, 33, 170])
def test_rows_go_with_the_kv(legs: Legs, oracle: Oracle, length: int) -> None:
    """Those of all that is pulled are the prefill engine's; the last prompt token's, and what follows, the other's."""
    prompt = prompt_of(length, seed=900 + length)
    first = legs.first(prompt)
    check_rows(first, oracle)
    assert first.params is not None
    answer = legs.decode.ask(prompt, 9, tagged(first.params))
    check_rows(untagged(answer, slice(0, length - 1)), oracle)


def test_what_the_decode_engine_has_keeps_its_own_rows(legs: Legs, oracle: Oracle) -> None:
    prompt = prompt_of(150, seed=990)
    check_rows(legs.decode.ask(prompt[:70], 2), oracle)
    first = legs.first(prompt)
    assert first.params is not None
    answer = legs.decode.ask(prompt, 9, tagged(first.params))
    check_rows(untagged(answer, slice(64, 149)), oracle)


def test_the_next_turn_hits_what_was_pulled(legs: Legs, oracle: Oracle) -> None:
    prompt = prompt_of(100, seed=991)
    first = legs.first(prompt)
    assert first.params is not None
    before = legs.decode.ask(prompt, 4, tagged(first.params))
    turn = [*prompt, *before.tokens, *prompt_of(20, seed=992)]
    answer = legs.decode.ask(turn, 5)
    assert answer.cached == 96
    check_rows(untagged(answer, slice(0, 96)), oracle)


def test_a_proxy_that_drops_the_rows_leaves_them_unknown(legs: Legs, oracle: Oracle) -> None:
    prompt = prompt_of(90, seed=993)
    first = legs.first(prompt)
    assert first.params is not None
    del first.params["routed_experts"]
    answer = legs.decode.ask(prompt, 4, first.params)
    assert (answer.rows[:89, 1:] == -1).all()
    whole = legs.prefill.ask([*prompt, *answer.tokens], 1)
    assert np.array_equal(np.sort(answer.rows[89:, 1:], axis=2), np.sort(whole.rows[89 : 89 + 4, 1:], axis=2))


def test_a_prefill_engine_that_dies_before_the_pull(legs: Legs, oracle: Oracle) -> None:
    """The last test here. The decode engine computes the prompt, and no row that was handed over is left."""
    prompt = prompt_of(110, seed=994)
    first = legs.first(prompt)
    assert first.params is not None
    legs.prefill.stop()
    check_rows(legs.decode.ask(prompt, 6, tagged(first.params)), oracle)
