"""Engines that sleep and whose weights change, in the orders in which trainers have them do it:
every row is of the weights of its moment, and sleep gives back what it gives back without the
capture.

Run by hand on a machine with a GPU, on which nothing else runs meanwhile. `tests/gpu_runs.py` says
how.
"""

import asyncio
import gc
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e.changes import LONG, Across, Paused, Weights, make_weights, roll_out
from tests.e2e.harness import (
    FULL_PRECISION,
    OPTIONS,
    SERVER_FLAGS,
    Answer,
    Server,
    check,
    prompt_of,
    serving,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

CYCLES = int(os.environ.get("ROUTED_EXPERTS_SLEEP_CYCLES", "30"))
WARM_CYCLES = 10
"""After so many, nothing is used for the first time any more."""
SLEEPING: dict[str, Any] = {
    **{
        **OPTIONS,
        "kv_cache_memory_bytes": 64 << 20,
        "gpu_memory_utilization": 0.5,
        "max_num_seqs": 16,
    },
    **{"block_size": 32, "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 64]}},
    **{"enable_sleep_mode": True, "worker_extension_cls": "tests.gpu.sleeping.Memory"},
}
MIB = 1 << 20


@pytest.fixture(scope="module")
def both(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Weights]:
    return make_weights(tmp_path_factory.mktemp("weights"), tiny_model)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in FULL_PRECISION.items():
        monkeypatch.setenv(variable, value)
    # A forked engine inherits pytest's stdout and the tests' CUDA.
    monkeypatch.setenv("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")


def as_answer(prompt: list[int], tokens: list[int], array: np.ndarray) -> Answer:
    """What an engine in this process has given. The tiny model's first layer has no experts."""
    rows = array[:, 1:].astype(np.int16)
    return Answer(prompt, tokens, 0, rows[: len(prompt)], rows[len(prompt) :])


# ---- LLM, V2 runner with graphs: levels, tags, orders, over and over ----


@contextmanager
def llm_of(model: Path, *, captures: bool) -> Iterator[Any]:
    from vllm import LLM

    llm = LLM(
        str(model), enable_return_routed_experts=captures, max_num_batched_tokens=4096, **SLEEPING
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


@dataclass
class Trained:
    """An engine of this program, and which of the models' weights it has."""

    llm: Any
    both: list[Weights]
    captures: bool
    weights: int = 0

    def load(self, weights: int) -> None:
        self.llm.collective_rpc(
            "reload_weights", kwargs={"weights_path": str(self.both[weights].model)}
        )
        self.weights = weights

    def memory(self) -> dict[str, int]:
        memory: dict[str, int] = self.llm.collective_rpc("memory_of_tests")[0]
        return memory

    def memory_asleep(self) -> dict[str, int]:
        self.llm.sleep(level=1)
        memory = self.memory()
        self.llm.wake_up()
        return memory

    def roll_out(self) -> None:
        """Prompts that share a prefix: for the first nothing may be found that the weights before
        have left."""
        from vllm import SamplingParams

        stem = prompt_of(70, seed=1)
        sampled = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        for behind in (1, 9):
            prompt: Any = {"prompt_token_ids": [*stem, *prompt_of(behind, behind)]}
            (output,) = self.llm.generate(prompt, sampled, use_tqdm=False)
            assert output.num_cached_tokens == (0 if behind == 1 else 64)
            if self.captures:
                (choice,) = output.outputs
                answer = as_answer(
                    list(output.prompt_token_ids), list(choice.token_ids), choice.routed_experts
                )
                check(answer, self.both[self.weights].oracle)

    def cycles(self, first: int, end: int) -> None:
        """Goes through the orders, with each level and with weights that change or do not."""
        for cycle in range(first, end):
            ORDERS[cycle % len(ORDERS)](self, cycle // 2 % 2, 1 + cycle // 3 % 2)
            assert not self.llm.llm_engine.is_sleeping()
            self.roll_out()


def as_verl_does(engine: Trained, weights: int, level: int) -> None:
    engine.llm.sleep(level=level)
    engine.llm.wake_up(tags=["weights"])
    engine.load(weights)
    engine.llm.wake_up(tags=["kv_cache"])
    engine.llm.reset_prefix_cache()


def as_nemo_rl_does(engine: Trained, weights: int, level: int) -> None:
    engine.llm.reset_prefix_cache()
    engine.llm.sleep(level=level)
    engine.llm.wake_up(tags=["weights", "kv_cache"])
    engine.load(weights)


def kv_cache_first(engine: Trained, weights: int, level: int) -> None:
    engine.llm.sleep(level=level)
    engine.llm.wake_up(tags=["kv_cache"])
    engine.llm.wake_up(tags=["weights"])
    engine.load(weights)


def without_new_weights(engine: Trained, weights: int, level: int) -> None:
    engine.llm.sleep(level=1)
    engine.llm.wake_up()


def awake(engine: Trained, weights: int, level: int) -> None:
    engine.llm.sleep(level=0, mode="keep")
    engine.load(weights)
    engine.llm.reset_prefix_cache()
    engine.llm.wake_up(tags=["scheduling"])


ORDERS = [as_verl_does, as_nemo_rl_does, without_new_weights, kv_cache_first, awake]


def test_levels_tags_and_orders_over_and_over(
    both: list[Weights], capsys: pytest.CaptureFixture[str]
) -> None:
    working: dict[str, dict[str, int]] = {}
    asleep: dict[str, dict[str, int]] = {}
    for captures, ends in (
        (True, {"early": WARM_CYCLES, "late": CYCLES}),
        (False, {"without": WARM_CYCLES}),
    ):
        with llm_of(both[0].model, captures=captures) as llm:
            assert not captures or llm.collective_rpc("tensors_outside_of_tests") == [[]]
            engine = Trained(llm, both, captures)
            engine.roll_out()
            done = 0
            for name, end in ends.items():
                engine.cycles(done, end)
                done = end
                working[name], asleep[name] = engine.memory(), engine.memory_asleep()
                engine.roll_out()

    more = asleep["early"]["device"] - asleep["without"]["device"]
    with capsys.disabled():
        print(
            f"\nbytes while working: {working}\nbytes asleep: {asleep}\nmore on the device asleep: {more}"
        )
    for memory in (working, asleep):
        for what, limit in (("device", 32), ("awake", 0), ("host", 64)):
            assert memory["late"][what] - memory["early"][what] <= limit * MIB, f"{what} grew"
    assert working["late"]["ours_awake"] == working["late"]["ours"] > 0
    assert (
        asleep["late"]["ours_awake"] == asleep["late"]["awake"] == asleep["without"]["awake"] == 0
    )
    assert more <= 16 * MIB


# ---- AsyncLLM, V1 runner: what runs meanwhile ----


@dataclass
class Rollout:
    """A request under way in an `AsyncLLM`."""

    prompt: list[int]
    tokens: list[int]
    arrays: list[np.ndarray]
    finish_reason: str | None = None

    async def read(self, outputs: AsyncIterator[Any]) -> None:
        async for output in outputs:
            (choice,) = output.outputs
            self.tokens += choice.token_ids
            self.finish_reason = choice.finish_reason
            if choice.routed_experts is not None:
                self.arrays.append(choice.routed_experts)

    async def wait_for(self, num_tokens: int) -> None:
        while len(self.tokens) < num_tokens:
            await asyncio.sleep(0.001)

    async def wait_until_quiet(self) -> int:
        while True:
            before = len(self.tokens)
            await asyncio.sleep(0.2)
            if len(self.tokens) == before:
                return before

    def answer(self) -> Answer:
        return as_answer(self.prompt, self.tokens, np.concatenate(self.arrays))


def test_requests_that_run_meanwhile(both: list[Weights], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    asyncio.run(run_meanwhile(both))


async def run_meanwhile(both: list[Weights]) -> None:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    options = {**SLEEPING, "enable_return_routed_experts": True, "max_num_batched_tokens": 64}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(str(both[0].model), **options))
    weights = 0

    async def change() -> None:
        nonlocal weights
        weights = 1 - weights
        await engine.collective_rpc(
            "reload_weights", kwargs={"weights_path": str(both[weights].model)}
        )

    def start(number: int, max_tokens: int = LONG) -> tuple[Rollout, asyncio.Task[None]]:
        prompt: Any = prompt_of(70 + number, seed=number)
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        params.output_kind = RequestOutputKind.DELTA
        rollout = Rollout(prompt, [], [])
        outputs = engine.generate({"prompt_token_ids": prompt}, params, f"request {number}")
        return rollout, asyncio.create_task(rollout.read(outputs))

    async def pause(keeps_kv: bool) -> None:
        await engine.pause_generation(mode="keep", clear_cache=not keeps_kv)

    async def resume() -> None:
        await change()
        await engine.resume_generation()

    async def sleep(level: int) -> None:
        await engine.sleep(level=level, mode="keep")

    async def wake_up() -> None:
        await engine.wake_up(tags=["weights"])
        await change()
        await engine.wake_up(tags=["kv_cache"])

    ways: list[tuple[bool, Callable[[], Awaitable[None]], Callable[[], Awaitable[None]]]] = [
        (False, lambda: pause(False), resume),
        (True, lambda: pause(True), resume),
        (False, lambda: sleep(1), wake_up),
        (False, lambda: sleep(2), wake_up),
    ]
    try:
        assert (await engine.collective_rpc("routed_experts_info"))[0]["runner"] == "v1"
        number = 0
        for keeps_kv, stop, go_on in ways * 2:
            before = both[weights].oracle
            running = [start(number := number + 1) for _ in range(3)]
            await asyncio.gather(*(rollout.wait_for(10) for rollout, _ in running))
            await stop()
            counts = [await rollout.wait_until_quiet() for rollout, _ in running]
            late = start(number := number + 1, max_tokens=8)
            await go_on()
            await asyncio.gather(*(task for _, task in (*running, late)))
            for (rollout, _), count in zip(running, counts, strict=True):
                assert 10 <= count < LONG
                first = len(rollout.prompt) + count - 1
                check(rollout.answer(), Across(before, both[weights].oracle, first, keeps_kv))
            check(late[0].answer(), both[weights].oracle)
            await engine.reset_prefix_cache()

        for mode in ("wait", "abort"):
            rollout, task = start(number := number + 1, max_tokens=120)
            await rollout.wait_for(10)
            before = both[weights].oracle
            await engine.sleep(level=2, mode=mode)
            await task
            assert rollout.finish_reason == ("length" if mode == "wait" else "abort")
            check(rollout.answer(), before)
            await wake_up()
            rollout, task = start(number := number + 1, max_tokens=20)
            await task
            check(rollout.answer(), both[weights].oracle)
    finally:
        engine.shutdown()


# ---- over HTTP, V2 runner with graphs ----


@pytest.fixture(scope="module")
def dev_server(both: list[Weights], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = (*SERVER_FLAGS, "--enable-sleep-mode", "--weight-transfer-config", '{"backend": "ipc"}')
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    with serving(both[0].model, tmp_path_factory.mktemp("log") / "log", *flags, env=env) as server:
        yield server


def test_weights_from_a_trainer(dev_server: Server, both: list[Weights]) -> None:
    """vLLM's own sender of weights, on the same GPU, into an engine that slept and under an
    answer."""
    import httpx
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.ipc_engine import (
        IPCTrainerInitInfo,
        IPCTrainerWeightTransferEngine,
    )

    class Checkpoint(WeightSource):
        weights: dict[str, torch.Tensor]

        def metadata(self) -> list[ParamMeta]:
            return [
                ParamMeta(name, weight.dtype, tuple(weight.shape))
                for name, weight in self.weights.items()
            ]

        if isinstance(WeightSource.metadata, property):  # from vLLM 0.33 on
            metadata = cached_property(metadata)

        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(self.weights.items())

        __iter__ = iter_full  # before 0.33

    class Client(HTTPVLLMWeightSyncClient):
        def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
            httpx.post(f"{self.base_url}/{path}", json=json, timeout=120).raise_for_status()

    checkpoints = [
        {name: weight.cuda() for name, weight in weights.checkpoint().items()} for weights in both
    ]
    source = Checkpoint()
    source.weights = checkpoints[0]  # vLLM 0.33 reads their names and shapes at once
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        trainer = IPCTrainerWeightTransferEngine.trainer_init(
            IPCTrainerInitInfo(rank=0), client=Client(dev_server.url), source=source
        )
        for turn in range(1, 5):
            weights, others = turn % 2, 1 - turn % 2
            source.weights = checkpoints[weights]
            dev_server.post(f"/sleep?level={1 + turn // 2 % 2}")
            dev_server.post("/wake_up?tags=weights")
            trainer.send_weights()
            dev_server.post("/wake_up?tags=kv_cache")
            roll_out(dev_server, both[weights].oracle, seed=turn)

            keeps_kv = turn > 2
            path = f"/pause?mode=keep&clear_cache={json.dumps(not keeps_kv)}"
            paused = Paused(dev_server, path, seed=40 + turn)
            source.weights = checkpoints[others]
            trainer.send_weights()
            dev_server.post("/resume")
            paused.check(both[weights].oracle, both[others].oracle, keeps_kv)
