"""Weights that change under a running server, through each of vLLM's endpoints for it, and answers
under way meanwhile.

On a CPU all in this process; `tests/gpu/test_sleep.py` is about GPUs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from routed_experts.protocol.batch import align_generated, align_logprobs
from tests.contract.served import serving_quickly
from tests.e2e.changes import (
    LONG,
    Across,
    Paused,
    Running,
    Weights,
    make_weights,
    reload_weights,
    roll_out,
)
from tests.e2e.harness import ON_GPU, SERVER_FLAGS, Server, check, prompt_of, rows_of, wait_until

pytestmark = pytest.mark.e2e

GENERATED = "vllm:generation_tokens_total"


@pytest.fixture(scope="module")
def both(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Weights]:
    """The tiny model's weights, and others."""
    return make_weights(tmp_path_factory.mktemp("weights"), tiny_model)


@pytest.fixture(scope="module")
def in_training(both: list[Weights], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose weights the tests change, with vLLM's endpoints for that."""
    flags = () if ON_GPU else ("--weight-transfer-config", '{"backend": "files-of-the-tests"}')
    log, env = tmp_path_factory.mktemp("log") / "log", {"VLLM_SERVER_DEV_MODE": "1"}
    with serving_quickly(both[0].model, log, *SERVER_FLAGS, *flags, env=env) as server:
        yield server


@pytest.fixture
def server(in_training: Server, both: list[Weights]) -> Server:
    """The same with the tiny model's weights, and nothing in its prefix cache."""
    reload_weights(in_training, both[0])
    in_training.post("/reset_prefix_cache")
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


def test_the_same_checkpoint_again_is_the_same_model(server: Server, both: list[Weights]) -> None:
    """Experts, too, are kept as their kernel needs them."""
    tokens = prompt_of(90, seed=1)
    answer = server.complete(prompt=tokens, max_tokens=1, prompt_logprobs=0)
    _, *of_tokens = answer["choices"][0]["prompt_logprobs"]
    logprobs = [
        entry[str(token)]["logprob"] for token, entry in zip(tokens[1:], of_tokens, strict=True)
    ]
    assert np.allclose(logprobs, logprobs_of(both[0].oracle.model, tokens)[1:], atol=1e-3)


def test_a_pause_under_an_answer(server: Server, both: list[Weights]) -> None:
    """That keeps its KV; `test_weight_transfer` has one whose KV is computed again."""
    paused = Paused(server, "/pause?mode=keep&clear_cache=false", seed=3)
    late = Running(server, seed=4, max_tokens=8)
    reload_weights(server, both[1])
    assert late.wait_until_quiet() == 0
    server.post("/resume")
    paused.check(both[0].oracle, both[1].oracle, keeps_kv=True)
    check(late.answer(), both[1].oracle)


def test_weights_that_are_reloaded_without_a_pause(server: Server, both: list[Weights]) -> None:
    """Some token is the last of the old weights; those behind it read their KV."""
    for seed in range(7, 12):  # on a busy machine an answer may end before
        reload_weights(server, both[0])
        server.post("/reset_prefix_cache")
        running = Running(server, seed)
        running.wait_for(10)
        reload_weights(server, both[1])
        answer = running.answer()
        if wrong := both[0].oracle.wrong(rows_of(answer), [*answer.prompt, *answer.tokens[:-1]]):
            break
    first = wrong[0].position
    assert 80 <= first < 70 + LONG - 1
    check(answer, Across(both[0].oracle, both[1].oracle, first, keeps_kv=True))


def new_weights_meanwhile(server: Server, weights: Weights) -> None:
    """Once some tokens are generated, all that is under way is aborted."""
    before = server.metric(GENERATED)
    wait_until(lambda: server.metric(GENERATED) > before + 10, "tokens do not come")
    server.post("/pause")
    reload_weights(server, weights)
    server.post("/resume")


def test_partial_rollouts(server: Server, both: list[Weights], documented: list[str]) -> None:
    """Rows, log-probabilities and the mask are those of the weights that sampled each token."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    parts: list[Any] = []

    def create(**body: Any) -> Any:
        body["extra_body"]["ignore_eos"] = True
        parts.append(client.completions.create(**body))
        return parts[-1]

    prompt = prompt_of(70, seed=5)
    names: dict[str, Any] = {"prompt": prompt, "model": "tiny", "max_tokens": LONG}
    names["client"] = SimpleNamespace(completions=SimpleNamespace(create=create))
    changing = Thread(target=new_weights_meanwhile, args=(server, both[1]))
    changing.start()
    exec("\n".join(documented), names)
    changing.join()

    assert [part.choices[0].finish_reason for part in parts] == ["abort", "length"]
    num_before = len(parts[0].choices[0].token_ids)
    rollout = names["rollout"]
    tokens = [*rollout.prompt_token_ids, *rollout.token_ids]
    assert len(tokens) == 70 + LONG
    oracle = Across(both[0].oracle, both[1].oracle, 70 + num_before - 1, keeps_kv=False)
    assert not oracle.wrong(rollout.rows, tokens[:-1])
    (mask,) = align_generated([rollout], len(tokens))
    assert np.flatnonzero(mask).tolist() == list(range(70, len(tokens)))
    (logprobs,) = align_logprobs([rollout], len(tokens))
    change = 70 + num_before
    for weights, part in ((both[0], slice(70, change)), (both[1], slice(change, None))):
        expected = logprobs_of(weights.oracle.model, tokens)
        assert np.allclose(logprobs[part], expected[part], atol=1e-3)
    assert not np.allclose(logprobs[change:], logprobs_of(both[0].oracle.model, tokens)[change:])


def logprobs_of(model: Any, tokens: list[int]) -> np.ndarray:
    """Of each token, given those before it; NaN for the first."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        scores = model(ids, use_cache=False).logits[0, :-1].log_softmax(dim=-1)
    logprobs = scores.gather(1, ids[0, 1:, None])[:, 0].numpy()
    return np.concatenate([[np.nan], logprobs])


@pytest.mark.skipif(ON_GPU, reason="tests/gpu/test_sleep.py has vLLM's own transfer")
def test_weight_transfer(server: Server, both: list[Weights]) -> None:
    server.post("/init_weight_transfer_engine", {"init_info": {}})
    before, after = both
    paused = Paused(server, "/pause?mode=keep", seed=9)
    server.post("/start_weight_update")
    server.post("/update_weights", {"update_info": {"path": str(after.file)}})
    server.post("/finish_weight_update", {"weight_version": str(after.model)})
    server.post("/resume")
    paused.check(before.oracle, after.oracle)
    server.post("/reset_prefix_cache")
    roll_out(server, after.oracle)


@pytest.mark.release
def test_sleep_without_memory_to_give_back(server: Server, both: list[Weights]) -> None:
    """What vLLM's engine does about requests when it sleeps; memory is
    `tests/gpu/test_sleep.py`'s."""
    for turn, (mode, level) in enumerate((("keep", 1), ("wait", 2), ("abort", 2), ("keep", 2))):
        before, after = both[turn % 2], both[1 - turn % 2]
        paused = Paused(server, f"/sleep?level={level}&mode={mode}", seed=20 + turn)
        server.post("/wake_up?tags=weights")
        reload_weights(server, after)
        server.post("/wake_up?tags=kv_cache")
        if mode == "keep":
            paused.check(before.oracle, after.oracle)
        else:
            check(paused.running.answer(), before.oracle)
        server.post("/reset_prefix_cache")
        roll_out(server, after.oracle)
