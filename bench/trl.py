"""TRL's own trainer on a server's rollouts: how far its log-probabilities are from the server's.

    python -m bench.trl --steps 20

Server and trainer share a GPU (or a CPU). A small Qwen3-MoE model in bfloat16 with random weights
is written once; for each variant the server loads these weights again. Then TRL's `GRPOTrainer`, in
its server mode, takes steps; before each rollout the server reads the new weights from a folder. With
`--nccl` the server has the second GPU, and TRL sends it the weights as it does for its users.

Experts that ran are taken where they get tokens (`.experts`), in the loss's forward pass and in the
pass that checkpointing computes again, and compared with the server's rows of the same tokens.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import requests
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from bench.http_server import Server, start
from bench.http_table import commit_and_device
from routed_experts.protocol.collect import collect
from routed_experts.protocol.routing import Routing
from routed_experts.replay import TokenReplay
from routed_experts.server.cli.tiny_model import make_tokenizer

VARIANTS = ("live", "ids", "ids and weights")
SMALL = {
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_experts": 16,
    "num_experts_per_tok": 4,
}
"""For a rehearsal without a GPU."""


def write_model(folder: Path, device: str) -> None:
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    sizes: dict[str, Any] = {
        "hidden_size": 1024,
        "moe_intermediate_size": 384,
        "num_hidden_layers": 8,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        **(SMALL if device == "cpu" else {}),
    }
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        intermediate_size=2 * sizes["hidden_size"],
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        **sizes,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Policy:
    """The folder from which the server reads new weights."""

    def __init__(self, folder: Path, server: Server) -> None:
        self.folder = folder
        self.url = f"http://127.0.0.1:{server.port}"
        self.info = requests.get(f"{self.url}/v1/routed_experts", timeout=60).json()

    def load(self, model: Any) -> None:
        # vLLM reads every file of weights that is there
        for old in self.folder.glob("*.safetensors"):
            old.unlink()
        model.save_pretrained(self.folder)
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(self.folder)}}
        for path, body in (("/collective_rpc", reload), ("/reset_prefix_cache", {})):
            requests.post(self.url + path, json=body, timeout=600).raise_for_status()


class ExpertsThatRan:
    """Compares them with the server's rows, as sets, in each pass of the model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.routings: dict[tuple[int, ...], Routing] = {}
        self.compared = 0  # rows of a token in a layer, forward and computed again
        self.other = 0  # of these, with other experts than the server's
        self._expected: torch.Tensor | None = None
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        layers = [module for name, module in model.named_modules() if name.endswith(".experts")]
        for layer, experts in enumerate(layers):
            experts.register_forward_pre_hook(
                lambda module, args, layer=layer: self._compare(layer, args[1])
            )

    def put(self, routings: list[Routing]) -> None:
        for routing in routings:
            self.routings[*routing.prompt_token_ids, *routing.token_ids] = routing

    def _begin(self, model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        tokens, mask = kwargs["input_ids"], kwargs["attention_mask"].bool()
        some = next(iter(self.routings.values())).rows
        expected = torch.full((*tokens.shape, *some.shape[1:]), -1, dtype=torch.int64)
        for line in range(len(tokens)):
            rows = self.routings[tuple(tokens[line][mask[line]].tolist())].rows
            # the last token has no row
            places = mask[line].nonzero()[:, 0][: len(rows)].cpu()
            expected[line, places] = torch.from_numpy(np.asarray(rows, np.int64))
        self._expected = expected.flatten(0, 1).sort(dim=-1).values.to(tokens.device)

    def _compare(self, layer: int, ids: torch.Tensor) -> None:
        assert self._expected is not None
        expected = self._expected[:, layer]
        known = expected[:, 0] >= 0
        differs = (ids.sort(dim=-1).values != expected).any(dim=-1)
        self.compared += int(known.sum())
        self.other += int((differs & known).sum())


def reward(completions: list[str], **_: Any) -> list[float]:
    """A toy: late letters of the alphabet."""
    return [sum(min(ord(c), 255) for c in text) / 100 / max(len(text), 1) for text in completions]


def run(
    variant: str, policy: Policy, start_folder: Path, args: argparse.Namespace
) -> dict[str, Any]:
    # here, so that `--help` needs no TRL
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation.vllm_client import VLLMClient
    from trl.generation.vllm_generation import VLLMGeneration

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(start_folder, dtype=torch.bfloat16)
    if not args.nccl:
        VLLMClient.init_communicator = lambda self, device: None
        VLLMGeneration.sync_weights = lambda self: policy.load(
            self.accelerator.unwrap_model(self.model)
        )
    letters = np.random.default_rng(0).integers(97, 123, (64, args.prompt)).astype(np.uint8)
    weights = variant == "ids and weights"
    trainer = GRPOTrainer(
        model,
        reward_funcs=reward,
        processing_class=make_tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": [bytes(line).decode() for line in letters]}),
        args=GRPOConfig(
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=policy.url,
            generation_kwargs={
                "return_routed_experts": True,
                "return_routed_expert_weights": weights,
            },
            per_device_train_batch_size=args.batch,
            gradient_accumulation_steps=2,
            num_generations=8,
            max_completion_length=args.new_tokens,
            max_steps=args.steps,
            learning_rate=1e-5,
            bf16=False,
            use_cpu=args.device == "cpu",
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            output_dir=str(policy.folder / "trl"),
            disable_tqdm=True,
        ),
    )
    replay = TokenReplay(trainer.model, info=policy.info, weights=weights)
    ran = ExpertsThatRan(trainer.model)
    client = trainer.vllm_generation.vllm_client
    post = client._post

    def taking_rows(url: str, **request: Any) -> Any:
        answer = post(url, **request)
        if url.endswith("/v1/completions"):
            routings = collect(answer, n=request["json"]["n"])
            ran.put(routings)
            if variant != "live":
                replay.put(routings)
        return answer

    client._post = taking_rows
    block: Callable[[], AbstractContextManager[Any]] = (
        nullcontext if variant == "live" else lambda: replay
    )
    with block():
        trainer.train()
    steps = trainer.state.log_history[:-1]
    difference = [step["sampling/sampling_logp_difference/mean"] for step in steps]
    return {
        "variant": variant,
        "steps": len(steps),
        "mean_abs_logp_difference": mean(difference),
        "first_step": difference[0],
        "last_step": difference[-1],
        "step_ms": 1000 * median(step["step_time"] for step in steps[1:]),
        "other_experts": ran.other,
        "of": ran.compared,
        "routings": len(ran.routings),
        "tokens": steps[-1]["num_tokens"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16, help="sequences of a pass")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--nccl", action="store_true", help="on two GPUs; for one variant")
    parser.add_argument("--variants", nargs="*", default=VARIANTS, choices=VARIANTS)
    args = parser.parse_args()
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # for /collective_rpc
    flags = ["--enable-return-routed-expert-weights", "--logprobs-mode", "processed_logprobs"]
    if args.device == "cuda":
        flags += ["--gpu-memory-utilization", "0.3"]
    else:
        flags += ["--enforce-eager", "--kv-cache-memory-bytes", "67108864"]
    if args.nccl:
        flags += ["--weight-transfer-config", '{"backend": "nccl"}']
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # or the trainer would take both
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        start_folder, policy_folder = folder / "start", folder / "policy"
        write_model(start_folder, args.device)
        shutil.copytree(start_folder, policy_folder)
        gpu = "1" if args.nccl else None
        server = start("ours", start_folder, flags, folder / "log", 1, gpu)
        try:
            server.wait_until_healthy()
            policy = Policy(policy_folder, server)
            for variant in args.variants:
                began = time.perf_counter()
                result = run(variant, policy, start_folder, args)
                result |= commit_and_device(args.device, None) | {"s": time.perf_counter() - began}
                print(json.dumps(result), flush=True)
        except BaseException:
            print((folder / "log").read_text(errors="replace")[-4000:], file=sys.stderr)
            raise
        finally:
            server.stop()


if __name__ == "__main__":
    main()
