"""An engine in this process whose requests say which experts they take, and what transformers
computes with these experts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from vllm import LLM, RequestOutput, SamplingParams
from vllm.lora.request import LoRARequest

from routed_experts.protocol.routing_input import INPUT_ARG, RoutingInput
from routed_experts.replay import replayed
from tests.e2e.harness import OPTIONS

INPUT = {"enable_routed_experts_input": True}


class Answered(NamedTuple):
    """What a request returned."""

    tokens: list[int]  # generated
    prompt_logprobs: np.ndarray  # float64 [P - 1]
    logprobs: np.ndarray  # float64 [G], of the generated tokens
    rows: np.ndarray  # int16 [P + G - 1, L, K]
    num_cached: int  # tokens of the prompt that were in the prefix cache

    def is_same(self, other: "Answered") -> bool:
        """Bit for bit, whether or not the prefix cache helped."""
        return self.tokens == other.tokens and all(
            np.array_equal(mine, theirs)
            for mine, theirs in (
                (self.prompt_logprobs, other.prompt_logprobs),
                (self.logprobs, other.logprobs),
                (self.rows, other.rows),
            )
        )


class Program:
    """A program with an engine."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        info = llm.collective_rpc("routed_experts_info")[0]
        self.info = info
        self.layer_ids: list[int] = info["layer_ids"]
        self.num_layers = len(self.layer_ids)
        self.top_k: int = info["top_k"]
        self.num_experts: int = info["num_experts"]
        self.vocab_size: int = llm.llm_engine.vllm_config.model_config.get_vocab_size()
        self.has_prefix_cache: bool = (
            llm.llm_engine.vllm_config.cache_config.enable_prefix_caching or False
        )
        self.adapter: LoRARequest | None = None
        """Of all requests."""

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        inputs: Sequence[RoutingInput | None] | None = None,
        max_tokens: int = 1,
        with_prompt_logprobs: bool = True,
    ) -> list[Answered]:
        """All at once. Log-probabilities of a prompt keep it from using the prefix cache."""
        params = []
        for routing_input in inputs or [None] * len(prompts):
            sampling = SamplingParams(
                max_tokens=max_tokens,
                temperature=0,
                ignore_eos=True,
                prompt_logprobs=0 if with_prompt_logprobs else None,
                logprobs=0,
                detokenize=False,
            )
            if routing_input is not None:
                sampling.extra_args = {INPUT_ARG: routing_input.encode()}
            params.append(sampling)
        tokens = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(tokens, params, lora_request=self.adapter, use_tqdm=False)
        return [self._answered(output) for output in outputs]

    def one(
        self, prompt: Sequence[int], said: RoutingInput | None = None, **options: Any
    ) -> Answered:
        return self.run([prompt], [said], **options)[0]

    def random_rows(self, num_tokens: int, seed: int = 0) -> np.ndarray:
        """[n, L, K] of distinct experts."""
        shape = (num_tokens, self.num_layers, self.num_experts)
        order = np.random.default_rng(seed).random(shape).argsort(axis=2)
        return order[:, :, : self.top_k].astype(np.int16)

    def zero_bias(self) -> np.ndarray:
        return np.zeros((self.num_layers, self.num_experts), np.float32)

    def _answered(self, output: RequestOutput) -> Answered:
        choice = output.outputs[0]
        prompt = list(output.prompt_token_ids or ())
        of_prompt = [
            entry[token].logprob
            for token, entry in zip(prompt, output.prompt_logprobs or (), strict=False)
            if entry
        ]
        of_tokens = [
            entry[token].logprob
            for token, entry in zip(choice.token_ids, choice.logprobs, strict=True)
        ]
        rows = choice.routed_experts
        if rows.shape[1] != self.num_layers:
            rows = rows[:, self.layer_ids]
        return Answered(
            list(choice.token_ids),
            np.array(of_prompt),
            np.array(of_tokens),
            rows.astype(np.int16),
            output.num_cached_tokens or 0,
        )


@contextmanager
def program(model: Path, **options: Any) -> Iterator[Program]:
    settings = {
        **OPTIONS,
        "max_num_batched_tokens": 256,
        "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": 1024,
        "additional_config": INPUT,
        **options,
    }
    llm = LLM(str(model), enable_return_routed_experts=True, **settings)
    try:
        yield Program(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()


class Reference:
    """The same model in transformers."""

    def __init__(self, model: Path, layer_ids: Sequence[int]) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32
        ).eval()
        self._layer_ids = list(layer_ids)

    def logprobs(self, tokens: Sequence[int], rows: np.ndarray | None = None) -> np.ndarray:
        """Of each token but the first, float64; with the experts of `rows` [n, L, K]."""
        if rows is None:
            return self._logprobs(tokens)
        with replayed(self.model, rows[None].astype(np.int64), layer_ids=self._layer_ids):
            return self._logprobs(tokens)

    def logprobs_with_bias(self, tokens: Sequence[int], bias: np.ndarray) -> np.ndarray:
        """With routers whose gates have this bias [L, E]."""
        with self._biased_gates(torch.from_numpy(bias)):
            return self._logprobs(tokens)

    @property
    def knows_gates(self) -> bool:
        """Whether a bias can be given to the model's routers."""
        return len(self._routers()) == len(self._layer_ids)

    def _routers(self) -> list[Any]:
        return [
            module
            for module in self.model.modules()
            if type(module).__name__.lower().endswith("topkrouter")
        ]

    def _logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        ids = torch.tensor([list(tokens)])
        with torch.no_grad():
            logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        chosen = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[0, :, 0]
        result: np.ndarray = chosen.double().numpy()
        return result

    @contextmanager
    def _biased_gates(self, bias: torch.Tensor) -> Iterator[None]:
        """Replaces the product with each gate's weight. A correction of the choice is changed, too,
        for experts that are never or always chosen."""
        routers = self._routers()
        bias_of_weight = {
            id(router.weight): of_layer for router, of_layer in zip(routers, bias, strict=True)
        }
        linear = torch.nn.functional.linear

        def biased_linear(
            x: torch.Tensor, weight: torch.Tensor, offset: Any = None
        ) -> torch.Tensor:
            logits = linear(x, weight, offset)
            of_layer = bias_of_weight.get(id(weight))
            return logits if of_layer is None else _biased(logits, of_layer)

        saved = [
            (router.e_score_correction_bias, router.e_score_correction_bias.clone())
            for router in routers
            if hasattr(router, "e_score_correction_bias")
        ]
        for (correction, _), of_layer in zip(saved, bias, strict=False):
            correction[of_layer == -torch.inf] = -torch.inf
            correction[of_layer == torch.inf] = 1e4
        torch.nn.functional.linear = biased_linear
        try:
            yield
        finally:
            torch.nn.functional.linear = linear
            for correction, before in saved:
                correction.copy_(before)


def _biased(logits: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    is_never = bias == -torch.inf
    is_always = bias == torch.inf
    logits = logits + bias.masked_fill(is_never | is_always, 0)
    best = logits.masked_fill(is_never, -torch.inf).amax(-1, keepdim=True)
    return torch.where(is_always, best + 0.01, logits).masked_fill(is_never, -torch.inf)
