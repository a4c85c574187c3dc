"""An engine in this process whose routers' scores are recorded, and whose every row is held against
them.

python -m tests.gpu.recorded MODEL ['{"dtype": "bfloat16", ...}']

The second argument is of vLLM's own arguments. Prints what was counted, as JSON.

What each layer hands to its experts, ids and weights, is recorded too, and weights are held against
that bit for bit.

Where each MoE layer hands its router's scores on, a copy is written into a buffer that stays where
it is. That is inside of vLLM's MoE operator and before the choice, whether the gate is in the layer
or in front of it, and whether the experts' kernel routes by itself or not. So it holds eagerly and,
as the copy is recorded with them, in CUDA graphs and under torch.compile, where no hook of a module
runs (on a CPU the operator is traced: `enforce_eager` is needed). Which tokens a step computed, and
where their KV is, comes from the model runner: V1's, on CPU and CUDA, or V2's, whose drafts and
asynchronous scheduling leave positions and ids on the GPU alone. Reading them makes each step wait.

Holds for one worker that sees all tokens and layers, or tensor parallelism, whose workers all do:
not for pipeline parallelism. For data parallelism, where each rank routes its own tokens: each rank
is such a program, with vLLM's VLLM_DP_RANK, VLLM_DP_SIZE and so on in its environment and an engine
in a process of its own, and ends when its input does, as the others need it until they are done. A
step in microbatches (dual-batch overlap) has its scores where vLLM's own slices say.
"""

import json
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

# before vLLM reads it
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if "VLLM_DP_RANK" in os.environ else "0"

import cloudpickle
import numpy as np
import torch
from vllm import LLM, RequestOutput, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig, is_full_attention_spec
from vllm.v1.worker.ubatching import dbo_current_ubatch_id, dbo_enabled

from routed_experts.capture.wire.rows import WEIGHTS_KEY, captures_weights
from tests.e2e.harness import prompt_of
from tests.e2e.images import PLACE, make_image
from tests.gpu.scores import Part, Recording, Rule, judge, judge_weights, rule_of

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker

RANK = os.environ.get("VLLM_DP_RANK")
KINDS = ("steps in full graphs", "steps in microbatches", "steps of both")
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "kv_cache_memory_bytes": 64 << 20,
    "max_model_len": 512,
}
OPTIONS |= {
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "disable_log_stats": False,
    "cudagraph_metrics": True,
}
# Of a GPU's memory only what is free is held against it: the KV cache has a size of its own.
OPTIONS |= {"enforce_eager": True} if current_platform.is_cpu() else {"gpu_memory_utilization": 0.3}


class Recorder(Worker):
    """vLLM's worker, with a record of the routers' scores; the capture is mixed into it."""

    recording: Recording
    seen: Counter[str]

    def load_model(self, **options: Any) -> None:
        super().load_model(**options)
        layers = {
            int(re.findall(r"layers\.(\d+)\.", module.layer_name)[-1]): module
            for module in self.model_runner.get_model().modules()
            if isinstance(module, MoERunner)
        }
        (num_experts,) = {layer.moe_config.num_logical_experts for layer in layers.values()}
        shape = (len(layers), self.model_runner.max_num_tokens, num_experts)
        self.scores = torch.full(shape, torch.nan, device=self.device)
        self.firsts: list[int] = []  # of the step's microbatches, their first tokens
        for row, layer_id in zip(self.scores, sorted(layers), strict=True):
            layer = layers[layer_id]
            layer._apply_quant_method = _recording(layer._apply_quant_method, row, self.firsts)
        if captures_weights(self.vllm_config):
            (top_k,) = {layer.router.top_k - _fused_shared(layer) for layer in layers.values()}
            self.handed = torch.full(
                (2, len(layers), shape[1], top_k), -1, dtype=torch.int32, device=self.device
            )
            for index, layer_id in enumerate(sorted(layers)):
                method = layers[layer_id].routed_experts.quant_method
                method.apply = _recording_choice(method.apply, self.handed[:, index], self.firsts)
        self.recording = Recording(sorted(layers))
        # by request, images: first position, length, number
        self.shown: dict[str, set[tuple[int, int, int]]] = {}
        self.seen = Counter(dict.fromkeys(KINDS, 0))

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        (self.group,) = (index for index, spec in enumerate(specs) if is_full_attention_spec(spec))
        if self.parallel_config.use_ubatching:
            runner = self.model_runner.ubatch_runner
            prepare = runner.prepare

            def seeing(*args: Any, **kwargs: Any) -> Any:
                state = prepare(*args, **kwargs)
                self.firsts[:] = [part.token_slice.start for part in state.slices]
                return state

            runner.prepare = seeing

    def execute_model(self, scheduler_output: Any) -> Any:
        self.scores.fill_(torch.nan)  # what a layer does not write in this step is not known
        self.firsts.clear()
        output = super().execute_model(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            for shown in new.mm_features:
                shown_item = (
                    shown.mm_position.offset,
                    shown.mm_position.length,
                    int(shown.identifier),
                )
                self.shown.setdefault(new.req_id, set()).add(shown_item)
            if new.lora_request:
                self.recording.adapters[new.req_id] = new.lora_request.lora_int_id
        if scheduler_output.total_num_scheduled_tokens:
            self._record(scheduler_output.num_scheduled_tokens)
        return output

    def _record(self, scheduled: dict[str, int]) -> None:
        runner = self.model_runner
        n = sum(scheduled.values())
        if self.use_v2_model_runner:
            batch, tables = runner.execute_model_state.input_batch, runner.block_tables
            tokens, positions, block_size = (
                batch.input_ids,
                batch.positions,
                tables.block_sizes[self.group],
            )
            blocks = tables.input_block_tables[self.group][: batch.num_reqs].cpu().numpy()
        else:
            batch, table = runner.input_batch, runner.input_batch.block_table[self.group]
            tokens, positions, block_size = runner.input_ids.gpu, runner.positions, table.block_size
            blocks = table.block_table.np
        ids, at = tokens[:n].cpu().numpy(), positions[:n].cpu().numpy()
        parts, first = [], 0
        for request, row in zip(batch.req_ids, blocks, strict=False):
            own = slice(first, first + scheduled[request])
            every = np.arange(int(at[own][-1]) + 1)
            slots = row[every // block_size].astype(np.int64) * block_size + every % block_size
            text = ids[own].astype(np.int64)
            for start, length, number in self.shown.get(request, ()):
                text[(at[own] >= start) & (at[own] < start + length)] = -number
            parts.append(Part(request, at[own].copy(), text, slots))
            first = own.stop
        assert first == n
        is_graph = runner.execute_model_state.cudagraph_stats.runtime_mode == "FULL"
        for kind, is_so in zip(
            KINDS, (is_graph, bool(self.firsts), is_graph and bool(self.firsts)), strict=True
        ):
            self.seen[kind] += is_so
        if hasattr(self, "handed"):
            self.recording.handed.extend(
                self.handed[:, :, :n].permute(2, 0, 1, 3).cpu().numpy().copy()
            )
        self.recording.step(self.scores[:, :n].transpose(0, 1).cpu().numpy().copy(), parts)

    def recorded(self) -> bytes:
        """The record, and how many steps were one CUDA graph each, or ran in microbatches;
        pickled."""
        pickled: bytes = cloudpickle.dumps((self.recording, self.seen))
        return pickled


def _recording(
    apply: Callable[..., Any], into: torch.Tensor, firsts: Sequence[int]
) -> Callable[..., Any]:
    """`apply`, which is given a layer's scores, copying them `into` [tokens, experts] first.
    `firsts` are the first tokens of the step's microbatches, where it runs in them."""

    def recording_apply(*, router_logits: torch.Tensor, **others: Any) -> Any:
        first = firsts[dbo_current_ubatch_id()] if dbo_enabled() else 0
        # Columns after the experts are of shared ones.
        into[first : first + len(router_logits)].copy_(router_logits[:, : into.shape[1]])
        return apply(router_logits=router_logits, **others)

    return recording_apply


def _fused_shared(layer: MoERunner) -> int:
    return int(getattr(layer.router, "num_fused_shared_experts", 0))


def _recording_choice(
    apply: Callable[..., Any], into: torch.Tensor, firsts: Sequence[int]
) -> Callable[..., Any]:
    """`apply`, which is given a layer's choice, copying it `into` [2, tokens, K] first."""

    def recording_apply(
        *, topk_weights: torch.Tensor, topk_ids: torch.Tensor, **others: Any
    ) -> Any:
        first, top_k = firsts[dbo_current_ubatch_id()] if dbo_enabled() else 0, into.shape[2]
        rows = slice(first, first + len(topk_ids))
        into[0, rows].copy_(topk_ids[:, :top_k])
        into[1, rows].copy_(topk_weights[:, :top_k].view(torch.int32))
        return apply(topk_weights=topk_weights, topk_ids=topk_ids, **others)

    return recording_apply


def mix(
    dice: random.Random, turn: int, images: int = 0
) -> list[tuple[dict[str, Any], SamplingParams]]:
    """Prompts that share prefixes or not, of one token to several chunks, some for several choices.
    Each has one of so many `images` after the prefix; their names are their numbers."""
    requests: list[tuple[dict[str, Any], SamplingParams]] = []
    for index in range(6):
        stem = prompt_of(200, seed=dice.randrange(4))[: dice.choice([0, 31, 64, 130, 200])]
        own = prompt_of(dice.choice([1, 2, 33, 90]), seed=100 * turn + index)
        n = dice.choice([1, 1, 1, 2, 3])
        params = SamplingParams(
            n=n, max_tokens=dice.randrange(1, 50), temperature=float(n > 1), ignore_eos=True
        )
        if images:
            number = dice.randrange(images) + 1
            prompt: dict[str, Any] = {"prompt_token_ids": [*stem, *PLACE, *own]}
            prompt["multi_modal_data"] = {"image": make_image(number, 10, 6 + number)}
            requests.append((prompt | {"multi_modal_uuids": {"image": str(number)}}, params))
            continue
        requests.append(({"prompt_token_ids": [*stem, *own]}, params))
    return requests


def main(
    model: str,
    turns: int = 2,
    adapters: Sequence[str] = (),
    weights: bool = True,
    images: int = 0,
    **options: Any,
) -> None:
    """Prints what was counted; the engine is there until everybody's is not needed any more."""
    llm = LLM(
        model,
        enable_return_routed_experts=True,
        worker_cls="tests.gpu.recorded.Recorder",
        additional_config={WEIGHTS_KEY: weights},
        **OPTIONS | options,
    )
    print(json.dumps(counted(llm, Path(model), turns, adapters, images)), flush=True)
    if RANK is not None:
        sys.stdin.read()


@dataclass
class Answered:
    """What an engine answered, and the number of each prompt's image; 0 for none."""

    outputs: list[RequestOutput]
    images: list[int]


def counted(
    llm: LLM, model: Path, turns: int, adapters: Sequence[str], images: int = 0
) -> dict[str, int]:
    """Every prompt is also asked of each of the `adapters`, whose folders these are."""
    answered = answers_of(llm, turns, adapters, images)
    recording: Recording
    (pickled,) = llm.collective_rpc("recorded")
    recording, seen = cloudpickle.loads(pickled)
    counts: Counter[str] = Counter({"steps": recording.steps, **seen})
    counts["asynchronous"] = int(llm.llm_engine.vllm_config.scheduler_config.async_scheduling)
    counts.update(drafts_of(llm))
    counts["swaps of adapters"] = swaps_of_adapters(recording)
    judged = Judged(recording, rule_of(model, recording.layer_ids), counts)
    for output, image in zip(answered.outputs, answered.images, strict=True):
        judged.add(output, image)
    return dict(counts)


def answers_of(llm: LLM, turns: int, adapters: Sequence[str], images: int) -> Answered:
    loras = [
        None,
        *(LoRARequest(path, number, path) for number, path in enumerate(adapters, start=1)),
    ]
    dice = random.Random(int(RANK or 0))
    answered = Answered([], [])
    for turn in range(turns):
        requests = [*product(mix(dice, turn, images), loras)]
        prompts: Any = [prompt for (prompt, _), _ in requests]
        answered.images += [
            int(prompt.get("multi_modal_uuids", {"image": 0})["image"]) for prompt in prompts
        ]
        answered.outputs += llm.generate(
            prompts,
            [params for (_, params), _ in requests],
            lora_request=[lora for _, lora in requests] if adapters else None,
            use_tqdm=False,
        )
        if turn == turns // 2:
            llm.reset_prefix_cache()
    return answered


def drafts_of(llm: LLM) -> Counter[str]:
    names = ("draft_tokens", "accepted_tokens")
    counts: Counter[str] = Counter()
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_num_")
        if name in names and name != metric.name:
            counts[name] += metric.value
    return counts


def swaps_of_adapters(recording: Recording) -> int:
    loaded = [
        recording.adapters[owner] for owner in recording.owners if owner in recording.adapters
    ]
    return sum(number != before for before, number in pairwise(loaded))


class Judged:
    """Holds each answer against the record, and counts."""

    def __init__(self, recording: Recording, rule: Rule, counts: Counter[str]) -> None:
        self._recording = recording
        self._rule = rule
        self._counts = counts
        # by prompt, what the model without an adapter chose
        self._of_base: dict[tuple[int, ...], np.ndarray] = {}

    def add(self, output: RequestOutput, image: int) -> None:
        """An answer to a prompt with this image."""
        recording = self._recording
        names = [recording.name_of(output.request_id, choice.index) for choice in output.outputs]
        prompt = list(output.prompt_token_ids or ())
        prompt = [-image if image and token == PLACE[1] else token for token in prompt]
        for name, choice in zip(names, output.outputs, strict=True):
            rows = choice.routed_experts
            assert rows.dtype in (np.uint8, np.uint16), "some rows are not known"
            rows = rows[:, recording.layer_ids].astype(np.int64)
            tokens = [*prompt, *choice.token_ids][:-1]
            self._counts.update(
                judge(recording, self._rule, name, tokens, rows, len(prompt), names)
            )
            if image:
                self._counts["hits on images"] += self._hits_on_images(name, tokens)
            self._counts.update(_if_misplaced(recording, self._rule, name, tokens, rows))
            if recording.handed:
                names = [name, *(other for other in names if other != name)]
                own = choice.routed_expert_weights[:, recording.layer_ids]
                self._counts.update(judge_weights(recording, names, tokens, rows, own, len(prompt)))
            self._compare_with_base(name, prompt, np.sort(rows[: len(prompt)], axis=2))

    def _hits_on_images(self, name: str, tokens: list[int]) -> int:
        """How many of an image's tokens, which are negative, others have computed."""
        owners = [
            {self._recording.owners[by] for by in slots}
            for slots in self._recording.computations(name, tokens)
        ]
        return sum(
            token < 0 and bool(by) and name not in by
            for token, by in zip(tokens, owners, strict=True)
        )

    def _compare_with_base(self, name: str, prompt: list[int], sets: np.ndarray) -> None:
        """`sets` [P, L, K] are the sorted rows of a prompt."""
        if name not in self._recording.adapters:
            self._of_base[tuple(prompt)] = sets
            return
        self._counts["prompts' rows of adapters"] += len(sets)
        is_unlike = (sets != self._of_base[tuple(prompt)]).any(axis=(1, 2))
        self._counts["unlike the base's"] += int(is_unlike.sum())


def _if_misplaced(
    recording: Recording, rule: Rule, request: str, tokens: list[int], rows: np.ndarray
) -> Counter[str]:
    """How many rows would be right at the next position, or with their layers one further on."""
    counter: Counter[str] = Counter()
    for axis, name in enumerate(("right at the next position", "right in the next layer")):
        counts = judge(recording, rule, request, tokens, np.roll(rows, 1, axis))
        counter[name] = counts["rows"] - counts["wrong"]
    return counter


if __name__ == "__main__":
    main(sys.argv[1], **json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}"))
