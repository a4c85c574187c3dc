"""Weights that change under a running server, through each of vLLM's endpoints for it, and answers under way meanwhile.

On a CPU all in this process, with the experts' weights kept; `tests/gpu/test_sleep.py` is about GPUs.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from tests.conftest import SERVER_FLAGS
from tests.contract.served import serving_quickly
from tests.e2e.changes import Across, Running, Weights, make_weights, post, reload_weights
from tests.e2e.harness import (
    ASK,
    ON_GPU,
    Oracle,
    Server,
    answers_of,
    answers_of_stream,
    check,
    prompt_of,
    wait_until_idle,
)

pytestmark = pytest.mark.e2e

LONG = 400
"""Tokens of answers that are to be under way when something happens."""


@pytest.fixture(scope="module")
def both(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Weights]:
    """The tiny model's weights, and others."""
    return make_weights(tmp_path_factory.mktemp("weights"), tiny_model)


@pytest.fixture(scope="module")
def in_training(both: list[Weights], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose weights the tests change, with vLLM's endpoints for that."""
    flags, env = list(SERVER_FLAGS), {"VLLM_SERVER_DEV_MODE": "1"}
    if not ON_GPU:
        flags += ["--weight-transfer-config", '{"backend": "files-of-the-tests"}']
    with serving_quickly(both[0].model, tmp_path_factory.mktemp("log") / "log", *flags, env=env) as server:
        yield server


@pytest.fixture
def server(in_training: Server, both: list[Weights]) -> Server:
    """The same with the tiny model's weights, and nothing in its prefix cache."""
    reload_weights(in_training, both[0])
    post(in_training, "/reset_prefix_cache")
    return in_training


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    path: str


class FileEngine(WeightTransferEngine[WeightTransferInitInfo, FileUpdate]):
    """A way for weights into the engine that needs no GPU: by file."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None: ...

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdate) -> None:
        self.model.load_weights(load_file(update_info.path).items())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None: ...


WeightTransferEngineFactory.register_engine("files-of-the-tests", FileEngine)


def roll_out(server: Server, oracle: Oracle) -> None:
    """Twice, the second time on what the first has left, and nothing before it has."""
    body: dict[str, Any] = {**ASK, "prompt": prompt_of(70, seed=1), "max_tokens": 12, "ignore_eos": True}
    hits = server.metric("vllm:prefix_cache_hits_total")
    check(answers_of(server.complete(**body))[0], oracle)
    assert server.metric("vllm:prefix_cache_hits_total") == hits
    check(answers_of_stream(server.stream(**body))[0], oracle)
    assert server.metric("vllm:prefix_cache_hits_total") > hits


def test_weights_that_are_reloaded(server: Server, both: list[Weights]) -> None:
    for weights in (both[0], both[1], both[0]):
        reload_weights(server, weights)
        post(server, "/reset_prefix_cache")
        roll_out(server, weights.oracle)


@pytest.mark.parametrize("keeps_kv", [False, True])
def test_a_pause_under_an_answer(server: Server, both: list[Weights], keeps_kv: bool) -> None:
    running = Running(server, prompt=prompt_of(70, seed=3), max_tokens=LONG)
    running.wait_for(10)
    post(server, f"/pause?mode=keep&clear_cache={json.dumps(not keeps_kv)}")
    count = running.wait_until_quiet()
    assert 10 <= count < LONG
    late = Running(server, prompt=prompt_of(50, seed=4), max_tokens=8)
    reload_weights(server, both[1])
    assert late.wait_until_quiet() == 0
    post(server, "/resume")
    across = Across(both[0].oracle, both[1].oracle, 70 + count - 1, keeps_kv)
    check(running.answer(), across)
    check(late.answer(), both[1].oracle)


def test_a_pause_that_waits(server: Server, both: list[Weights]) -> None:
    running = Running(server, prompt=prompt_of(70, seed=5), max_tokens=60)
    running.wait_for(5)
    post(server, "/pause?mode=wait")
    check(running.answer(), both[0].oracle)
    assert running.num_tokens == 60
    reload_weights(server, both[1])
    post(server, "/resume")
    roll_out(server, both[1].oracle)


def test_a_pause_that_aborts(server: Server, both: list[Weights]) -> None:
    running = Running(server, prompt=prompt_of(70, seed=6), max_tokens=LONG)
    running.wait_for(10)
    post(server, "/pause?mode=abort")
    answer = running.answer()
    assert answer.finish_reason == "abort"
    check(answer, both[0].oracle)
    reload_weights(server, both[1])
    post(server, "/resume")
    roll_out(server, both[1].oracle)
    wait_until_idle(server)


def test_weights_that_are_reloaded_without_a_pause(server: Server, both: list[Weights]) -> None:
    """Some token is the last of the old weights; those behind it read their KV."""
    running = Running(server, prompt=prompt_of(70, seed=7), max_tokens=LONG)
    running.wait_for(10)
    reload_weights(server, both[1])
    answer = running.answer()
    rows = np.concatenate([answer.prompt_rows, answer.rows])
    first = both[0].oracle.wrong(rows, [*answer.prompt, *answer.tokens[:-1]])[0].position
    assert 80 <= first < 70 + LONG - 1
    across = Across(both[0].oracle, both[1].oracle, first, keeps_kv=True)
    check(answer, across)


def test_a_reset_under_an_answer(server: Server, both: list[Weights]) -> None:
    running = Running(server, prompt=prompt_of(70, seed=8), max_tokens=LONG)
    running.wait_for(10)
    post(server, "/pause?mode=keep&clear_cache=false")
    count = running.wait_until_quiet()
    reload_weights(server, both[1])
    post(server, "/reset_prefix_cache?reset_running_requests=true")
    post(server, "/resume")
    across = Across(both[0].oracle, both[1].oracle, 70 + count - 1, keeps_kv=False)
    check(running.answer(), across)
    roll_out(server, both[1].oracle)


@pytest.mark.skipif(ON_GPU, reason="tests/gpu/test_sleep.py has vLLM's own transfer")
def test_weight_transfer(server: Server, both: list[Weights]) -> None:
    post(server, "/init_weight_transfer_engine", {"init_info": {}})
    for weights, before in ((both[1], both[0]), (both[0], both[1])):
        running = Running(server, prompt=prompt_of(70, seed=9), max_tokens=LONG)
        running.wait_for(10)
        post(server, "/pause?mode=keep")
        count = running.wait_until_quiet()
        post(server, "/start_weight_update")
        post(server, "/update_weights", {"update_info": {"path": str(weights.update / "model.safetensors")}})
        post(server, "/finish_weight_update", {"weight_version": str(weights.model)})
        post(server, "/resume")
        across = Across(before.oracle, weights.oracle, 70 + count - 1, keeps_kv=False)
        check(running.answer(), across)
        post(server, "/reset_prefix_cache")
        roll_out(server, weights.oracle)


def test_sleep_without_memory_to_give_back(server: Server, both: list[Weights]) -> None:
    """What vLLM's engine does about requests when it sleeps; memory is `tests/gpu/test_sleep.py`'s."""
    for turn, (mode, level) in enumerate((("keep", 1), ("wait", 2), ("abort", 2), ("keep", 2))):
        before, after = both[turn % 2], both[1 - turn % 2]
        running = Running(server, prompt=prompt_of(70, seed=20 + turn), max_tokens=LONG)
        running.wait_for(10)
        post(server, f"/sleep?level={level}&mode={mode}")
        count = running.wait_until_quiet()
        post(server, "/wake_up?tags=weights")
        reload_weights(server, after)
        post(server, "/wake_up?tags=kv_cache")
        across = Across(before.oracle, after.oracle, 70 + count - 1, keeps_kv=False)
        check(running.answer(), across if mode == "keep" else before.oracle)
        post(server, "/reset_prefix_cache")
        roll_out(server, after.oracle)
