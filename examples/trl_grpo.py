"""GRPO by TRL's own trainer on a server's rollouts, with routing replay in each forward pass.

    VLLM_SERVER_DEV_MODE=1 routed-experts serve MODEL --logprobs-mode processed_logprobs
    python examples/trl_grpo.py MODEL --url http://localhost:8000 --folder policy

Change prompts, reward and GRPOConfig. docs/replay.md says more, and has TRL's server mode.
"""

import argparse
from contextlib import nullcontext
from pathlib import Path

import requests
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from routed_experts.protocol.collect import collect
from routed_experts.replay import TokenReplay

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--url", default="http://localhost:8000")
parser.add_argument(
    "--folder", type=Path, required=True, help="of new weights; the server reads it"
)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--live", action="store_true", help="without replay")
args = parser.parse_args()
info = requests.get(f"{args.url}/v1/routed_experts").json()
config = GRPOConfig(
    max_completion_length=24, max_steps=args.steps, learning_rate=1e-4, logging_steps=1,
    bf16=False, use_cpu=not torch.cuda.is_available(), report_to="none", save_strategy="no",
)  # fmt: skip
fields = {"model": info["model"], "logprobs": 0, "temperature": config.temperature}
fields |= {"return_routed_experts": True, "return_routed_expert_weights": info["weights"]}
fields |= {"return_token_ids": True, "max_tokens": config.max_completion_length}


def reward(completions, **_):
    return [text.count("e") / max(len(text), 1) for text in completions]


def post(path, **body):
    response = requests.post(f"{args.url}{path}", json=body)
    response.raise_for_status()
    return response


def rollout(prompts, trainer):
    if trainer.state.global_step:
        trainer.save_model(args.folder, _internal_call=True)
        if trainer.accelerator.is_main_process:
            folder = {"weights_path": str(args.folder.absolute())}
            post("/collective_rpc", method="reload_weights", kwargs=folder)
            post("/reset_prefix_cache")
        trainer.accelerator.wait_for_everyone()
    tokens = trainer.processing_class(prompts)["input_ids"]
    routings = collect(post("/v1/completions", prompt=tokens, **fields).json(), n=1)
    replay.put(routings)
    answers = {"completion_ids": [routing.token_ids for routing in routings]}
    return {"prompt_ids": tokens, "logprobs": [r.logprobs for r in routings], **answers}


class Trainer(GRPOTrainer):
    """The ratio is to the policy that sampled, and the log says how far it is: TRL has both with
    `use_vllm` only."""

    def _get_per_token_logps_and_entropies(self, *inputs, **more):
        found = super()._get_per_token_logps_and_entropies(*inputs, **more)
        self.logps = found[0].detach()
        return found

    def _compute_loss(self, model, inputs):
        sampled = inputs["old_per_token_logps"] = inputs["sampling_per_token_logps"]
        loss = super()._compute_loss(model, inputs)
        apart = (self.logps - sampled).abs()[inputs["completion_mask"].bool()].mean()
        self._metrics["train"]["sampling_logp_difference"].append(apart.item())
        return loss


model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, info["model_dtype"]))
prompts = Dataset.from_dict({"prompt": ["Which experts?", "Why?", "Hi", "How?"]})
tokenizer = AutoTokenizer.from_pretrained(args.model)
trainer = Trainer(
    model,
    reward,
    args=config,
    train_dataset=prompts,
    processing_class=tokenizer,
    rollout_func=rollout,
)
models = [model for model in (trainer.model, trainer.ref_model) if model is not None]
replay = TokenReplay(*models, info=info, weights=info["weights"], aux_loss=trainer.aux_loss_enabled)
with nullcontext() if args.live else replay:
    trainer.train()
