"""`TokenReplay` in trainers as they are installed: TRL, with PEFT's adapters, and OpenRLHF's actor.

`make test-trl` installs and runs them. The oracle is what each layer's experts were called with.
"""

import re
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

trl = pytest.importorskip("trl", reason="TRL is not installed here: make test-trl")

from datasets import Dataset  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from trl.generation.vllm_client import VLLMClient  # noqa: E402
from trl.generation.vllm_generation import VLLMGeneration  # noqa: E402
from trl.trainer.utils import add_fused_lm_head  # noqa: E402

from routed_experts.protocol.collect import collect  # noqa: E402
from routed_experts.protocol.routing import Routing  # noqa: E402
from routed_experts.replay import TokenReplay  # noqa: E402
from tests.clients.conftest import Load  # noqa: E402
from tests.clients.experts import seeing_experts  # noqa: E402
from tests.clients.test_replay import CHECKPOINTING, plain_load_balancing  # noqa: E402
from tests.clients.test_token_replay import (  # noqa: E402
    check_pass,
    check_steps,
    padded,
    rollouts,
    tokens_of,
)
from tests.contract.served import serving_weights  # noqa: E402
from tests.e2e.harness import ROOT, Server  # noqa: E402


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    flags = (
        "--enforce-eager",
        "--dtype",
        "bfloat16",
        "--max-model-len",
        "256",
        "--kv-cache-memory-bytes",
        "8388608",
    )
    flags += ("--enable-return-routed-expert-weights", "--logprobs-mode", "processed_logprobs")
    with serving_weights(tiny_model, *flags, env={"VLLM_SERVER_DEV_MODE": "1"}) as server:
        yield server


class Seen:
    """Forward passes of models of transformers in this process.

    Attributes:
        passes: tokens and mask [B, S], and ids [B, S, L, K] of each.
        first: hidden states and ids [T, K] of each layer.
        recomputed: the same of each that was computed again.
        routings: those that were `put`.
    """

    def __init__(self) -> None:
        self.passes: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.first: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.recomputed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.routings: list[Routing] = []
        self._layers: list[torch.Tensor] = []

    def see_experts(self, module: Any, args: Any) -> None:
        """Before they run: a recomputed pass ends when it has what is needed."""
        if not type(module).__name__.endswith("Experts") or not is_of_transformers(module):
            return
        hidden, ids = args[0].detach().flatten(0, -2), args[1].detach()
        if torch._C._current_graph_task_id() != -1:
            self.recomputed.append((hidden, ids))
            return
        self.first.append((hidden, ids))
        self._layers.append(ids)

    def see_model(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if not type(module).__name__.endswith("ForCausalLM") or not is_of_transformers(module):
            return
        tokens = kwargs["input_ids"]
        ids = torch.stack(self._layers, dim=1).unflatten(0, tokens.shape)
        self._layers = []
        self.passes.append((tokens, kwargs["attention_mask"], ids))

    def others(self) -> tuple[int, int]:
        """How many tokens had other experts than those of the rows, of how many."""
        rows_of = {tuple(tokens_of(routing)): routing.rows for routing in self.routings}
        num_others = num_tokens = 0
        for tokens, mask, ids in self.passes:
            for line, is_token, of_line in zip(tokens, mask.bool(), ids, strict=True):
                rows = rows_of[tuple(line[is_token].tolist())]
                ran = of_line[is_token].numpy()[: len(rows)]
                num_others += int((np.sort(ran) != np.sort(rows)).any(axis=(1, 2)).sum())
                num_tokens += len(rows)
        return num_others, num_tokens


def is_of_transformers(module: Any) -> bool:
    """Not the server's."""
    return type(module).__module__.startswith("transformers.")


@contextmanager
def seeing() -> Iterator[Seen]:
    seen = Seen()

    put = TokenReplay.put

    def put_and_see(self: TokenReplay, routings: Sequence[Routing]) -> None:
        seen.routings += routings
        put(self, routings)

    of_all = torch.nn.modules.module
    handles = [
        of_all.register_module_forward_pre_hook(seen.see_experts),
        of_all.register_module_forward_hook(seen.see_model, with_kwargs=True),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenReplay, "put", put_and_see)
        yield seen
    for handle in handles:
        handle.remove()


def check_recomputed(seen: Seen) -> None:
    assert seen.recomputed
    for hidden, ids in seen.recomputed:
        assert any(
            torch.equal(hidden, other) and torch.equal(ids, of_other)
            for other, of_other in seen.first
            if other.shape == hidden.shape
        )


def load_first(server: Server) -> None:
    """The weights that the server began with, for the next run."""
    arguments = {"weights_path": str(server.model)}
    body = {"method": "reload_weights", "kwargs": arguments}
    httpx.post(f"{server.url}/collective_rpc", json=body, timeout=60).raise_for_status()
    httpx.post(f"{server.url}/reset_prefix_cache", timeout=60).raise_for_status()


def differences(log: str) -> list[float]:
    return [
        float(found) for found in re.findall(r"sampling_logp_difference\S*': '?([\d.e-]+)", log)
    ]


def test_the_example(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """No token has other experts, in no pass; live, some have. The log has the difference of each
    step: a server without the new weights would be far away."""
    monkeypatch.chdir(tmp_path)
    command = ["trl_grpo.py", str(server.model), "--url", server.url, "--folder", "policy"]
    command += ["--steps", "2"]
    others = {}
    for flags in ([], ["--live"]):
        monkeypatch.setattr(sys, "argv", [*command, *flags])
        with seeing() as seen:
            runpy.run_path(str(ROOT / "examples/trl_grpo.py"), run_name="__main__")
        others[bool(flags)] = seen.others()
        check_recomputed(seen)
        of_steps = differences("".join(capfd.readouterr()))
        assert len(of_steps) == 2
        assert 0 < min(of_steps) <= max(of_steps) < 0.1
        load_first(server)
    assert others[False][0] == 0
    assert others[False][1] > 100
    assert others[True][0] > 0


def test_the_server_mode_of_the_page(
    server: Server,
    documented: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """But for the weights, which TRL sends from GPU to GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(VLLMClient, "init_communicator", lambda self, device: None)
    monkeypatch.setattr(VLLMGeneration, "sync_weights", lambda self: None)
    settings = {"max_completion_length": 16, "max_steps": 1, "logging_steps": 1, "bf16": False}
    settings |= {"use_cpu": True, "report_to": "none", "save_strategy": "no"}
    names = {
        "GRPOConfig": trl.GRPOConfig,
        "GRPOTrainer": trl.GRPOTrainer,
        "TokenReplay": TokenReplay,
        "collect": collect,
        "url": server.url,
        "info": server.info(),
        "settings": settings,
        "model": AutoModelForCausalLM.from_pretrained(server.model, dtype=torch.bfloat16),
        "reward": lambda completions, **_: [float(len(text)) for text in completions],
        "prompts": Dataset.from_dict({"prompt": ["Why?", "Which experts?"]}),
        "tokenizer": AutoTokenizer.from_pretrained(server.model),
    }
    with seeing() as seen:
        exec("\n".join(documented), names)
    num_others, num_tokens = seen.others()
    assert num_others == 0
    assert num_tokens > 100
    check_recomputed(seen)
    assert names["replay"].passes > 1
    assert 0 < differences("".join(capfd.readouterr()))[0] < 0.1


def test_the_auxiliary_loss_of_trls_head(load: Load) -> None:
    """TRL computes it by a function of another module than the model's."""
    model, routings = load(), rollouts(lengths=(9, 9))
    add_fused_lm_head(model)
    tokens = torch.tensor([tokens_of(routing) for routing in routings])
    logits: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, args, output: logits.append(output[0]))
    with TokenReplay(model, aux_loss=True) as replay, seeing_experts(model) as ran:
        replay.put(routings)
        output = model(
            input_ids=tokens, labels=tokens, fused_lm_head=True, output_router_logits=True
        )
    ids = ran.forward_passes()[0].unflatten(0, tokens.shape)
    expected = plain_load_balancing(logits, ids, torch.ones_like(tokens))
    assert torch.allclose(output.aux_loss, expected, rtol=1e-4)


@pytest.mark.parametrize("kind", ["none", "reentrant", "not reentrant"])
def test_an_adapter(kind: str, load: Load) -> None:
    """Its router is trained, too. Without the adapter, the model is its own reference."""
    config = LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
    model = get_peft_model(load().train(), config)
    if kind != "none":
        model.gradient_checkpointing_enable(CHECKPOINTING[kind])
        model.enable_input_require_grads()
    with seeing_experts(model) as ran, TokenReplay(model) as replay:
        check_steps(model, replay, ran, recomputed=kind != "none")
    routings = rollouts()
    inputs, places = padded(routings)
    with seeing_experts(model) as ran, TokenReplay(model) as replay, torch.no_grad():
        replay.put(routings)
        adapted = model(**inputs).logits
        with model.disable_adapter():
            assert not torch.equal(model(**inputs).logits, adapted)
    for ids in ran.forward_passes():
        check_pass(ids, inputs["input_ids"].shape, routings, places)


def unpad_input(hidden: torch.Tensor, mask: torch.Tensor) -> tuple[Any, ...]:
    """As in flash-attn, which is not built for CPUs."""
    lengths = mask.sum(dim=1, dtype=torch.int32)
    indices = mask.flatten().nonzero().flatten()
    bounds = torch.nn.functional.pad(lengths.cumsum(dim=0, dtype=torch.int32), (1, 0))
    return hidden.flatten(0, 1)[indices], indices, bounds, int(lengths.max()), lengths


def pad_input(hidden: torch.Tensor, indices: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    padded = hidden.new_zeros(batch * length, *hidden.shape[1:])
    padded[indices] = hidden
    return padded.unflatten(0, (batch, length))


@pytest.fixture
def openrlhf_actor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its class. What only GPUs have is not there, and is not called, but for two functions."""
    for name in ("deepspeed", "pylatexenc", "flash_attn", "flash_attn.utils"):
        monkeypatch.setitem(sys.modules, name, MagicMock(__spec__=None))
    padding = SimpleNamespace(unpad_input=unpad_input, pad_input=pad_input)
    padding.index_first_axis = lambda hidden, indices: hidden[indices]
    padding.rearrange = lambda hidden, _: hidden.flatten(0, 1)
    monkeypatch.setitem(sys.modules, "flash_attn.bert_padding", padding)
    distributed = SimpleNamespace(all_gather=None)
    monkeypatch.setitem(sys.modules, "flash_attn.utils.distributed", distributed)
    from openrlhf.models import Actor

    return Actor


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_actor_of_openrlhf(is_packed: bool, openrlhf_actor: Any, load: Load) -> None:
    """Unmodified. Live, it takes other experts."""
    model, routings = load().train(), rollouts()
    actor = openrlhf_actor(model)
    actor.packing_samples = is_packed
    actor.gradient_checkpointing_enable()
    inputs, places = padded(routings, "left")
    if is_packed:
        ends = np.cumsum([length for *_, length in places])
        places = [
            (0, end - length, i, length)
            for end, (_, _, i, length) in zip(ends, places, strict=True)
        ]
    action_mask = inputs["attention_mask"][:, 4:]

    def step() -> torch.Tensor:
        log_probs: torch.Tensor = actor(inputs["input_ids"], action_mask, inputs["attention_mask"])
        log_probs.sum().backward()
        return log_probs

    with seeing_experts(model) as live:
        of_live = step()
    with seeing_experts(model) as ran, TokenReplay(actor) as replay:
        replay.put(routings)
        of_replayed = step()
    shape = (1, -1) if is_packed else inputs["input_ids"].shape
    check_pass(ran.forward_passes()[0], shape, routings, places)
    ran.check_recomputed(1)
    with pytest.raises(AssertionError):
        check_pass(live.forward_passes()[0], shape, routings, places)
    assert not torch.allclose(of_live, of_replayed)
