"""What replay brings: transformers' log-probabilities of tokens that vLLM sampled, against vLLM's own.

With transformers' own experts, with vLLM's, and with vLLM's and their weights. The model has random weights in the
shape of Qwen3-30B-A3B, which both make from the same seeds, as needed: there is no checkpoint. vLLM ends first, as one
GPU of 80 GB has space for either only.
"""

import argparse
import json
import multiprocessing
import os
import re
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.http_table import commit_and_device, described
from bench.shapes import QWEN3_30B_A3B, TINY
from examples.replay import differences, log_probabilities
from routed_experts.capture.rows import WEIGHTS_KEY

SHAPES = {"qwen3-30b-a3b": QWEN3_30B_A3B, "tiny": TINY}
_BATCH = 4
"""Sequences of a forward pass, whose logits take 1 GB for each copy."""
_ROLLOUT = "rollout.npz"


_EMBEDDING, _ROUTER, _HEAD, _OTHERS = 0.5, 2.0, 3.0, 0.9
"""Standard deviations: of embeddings, and of what a matrix makes of normalized inputs. With these, scores of experts
and of tokens are apart, as in trained models."""


def _standard_deviation(name: str, fan_in: int) -> float:
    if "embed_tokens" in name:
        return _EMBEDDING
    scale = _ROUTER if name.endswith("mlp.gate.weight") else _HEAD if name.startswith("lm_head") else _OTHERS
    return float(scale / fan_in**0.5)


def seeded_weights(config: dict[str, Any], device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a Qwen3-MoE checkpoint, each from a seed of its own."""
    hidden, head = config["hidden_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    expert = config["moe_intermediate_size"]
    attention = {"q_proj": (query, hidden), "k_proj": (key, hidden), "v_proj": (key, hidden), "o_proj": (hidden, query)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{name}.weight"] = (hidden,)
        shapes |= {f"{prefix}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        shapes |= {f"{prefix}.self_attn.{name}.weight": (head,) for name in ("q_norm", "k_norm")}
        shapes[f"{prefix}.mlp.gate.weight"] = (config["num_experts"], hidden)
        for index in range(config["num_experts"]):
            shapes |= {f"{prefix}.mlp.experts.{index}.{name}_proj.weight": (expert, hidden) for name in ("gate", "up")}
            shapes[f"{prefix}.mlp.experts.{index}.down_proj.weight"] = (hidden, expert)
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}
    dice = torch.Generator(device)
    for name, shape in shapes.items():
        if len(shape) == 1:
            yield name, torch.ones(shape, device=device)
            continue
        dice.manual_seed(zlib.crc32(name.encode()))
        yield name, torch.randn(shape, generator=dice, device=device) * _standard_deviation(name, shape[1])


def roll_out(folder: Path, device: str, prompts: int, prompt_len: int, new_tokens: int) -> None:
    """Samples with vLLM, in this process, and writes tokens, log-probabilities, rows and weights to `folder`."""
    from vllm import LLM, SamplingParams
    from vllm.model_executor.model_loader import BaseModelLoader, register_model_loader

    config = json.loads((folder / "config.json").read_text())

    @register_model_loader("seeded")
    class _Loader(BaseModelLoader):  # type: ignore[misc]
        def download_model(self, model_config: Any) -> None: ...

        def load_weights(self, model: Any, model_config: Any) -> None:
            model.load_weights(seeded_weights(config, device))

    length = prompt_len + new_tokens
    llm = LLM(
        str(folder),
        load_format="seeded",
        skip_tokenizer_init=True,
        dtype=config["torch_dtype"],
        max_model_len=length,
        max_num_seqs=prompts,
        enable_return_routed_experts=True,
        additional_config={WEIGHTS_KEY: True},
        **({} if device == "cuda" else {"kv_cache_memory_bytes": 1 << 29, "enforce_eager": True}),
    )
    asked = np.random.default_rng(0).integers(0, config["vocab_size"], (prompts, prompt_len)).tolist()
    params = SamplingParams(
        max_tokens=new_tokens, temperature=1.0, top_p=1.0, top_k=-1, ignore_eos=True, logprobs=0, detokenize=False
    )
    outputs = llm.generate([{"prompt_token_ids": each} for each in asked], params, use_tqdm=False)
    choices: list[Any] = [output.outputs[0] for output in outputs]
    np.savez(
        folder / _ROLLOUT,
        tokens=np.array([[*prompt, *choice.token_ids] for prompt, choice in zip(asked, choices, strict=True)]),
        logprobs=np.array(
            [[of[token].logprob for of, token in zip(c.logprobs, c.token_ids, strict=True)] for c in choices],
            dtype=np.float32,
        ),
        rows=np.stack([choice.routed_experts for choice in choices]),
        weights=np.stack([choice.routed_expert_weights for choice in choices]),
    )


def trainer(folder: Path, device: str) -> Any:
    """The same model in transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = json.loads((folder / "config.json").read_text())
    with torch.device(device):
        about = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(about, dtype=getattr(torch, config["torch_dtype"])).eval()
    parameters, left = dict(model.named_parameters()), set(model.state_dict())
    with torch.no_grad():
        for name, tensor in seeded_weights(config, device):
            # transformers has the experts of a layer in one tensor.
            if (found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)) is None:
                place = name
                into = parameters[place]
            elif found[3] == "down":
                place = f"{found[1]}.down_proj"
                into = parameters[place][int(found[2])]
            else:
                place = f"{found[1]}.gate_up_proj"
                into = parameters[place][int(found[2])].chunk(2)[found[3] == "up"]
            into.copy_(tensor)
            left.discard(place)
    assert not left, f"no weights for {left}"
    return model


def table(model: Any, rollout: dict[str, np.ndarray], device: str) -> str:
    """Markdown: how far the log-probabilities are from vLLM's, for each kind of replay."""
    tokens, old = (torch.from_numpy(rollout[name]).to(device) for name in ("tokens", "logprobs"))
    # The last token has no row.
    rows, weights = (np.pad(rollout[name], [(0, 0), (0, 1), (0, 0), (0, 0)]) for name in ("rows", "weights"))
    rows = rows.astype(np.int64)
    rows[:, -1] = -1
    given, factors = torch.from_numpy(rows), torch.from_numpy(weights)
    lines = ["| replayed | mean difference | largest | K1 | K3 |", "| --- | --- | --- | --- | --- |"]
    for name, *replays in (("nothing", None, None), ("experts", given, None), ("experts and weights", given, factors)):
        new = []
        for first in range(0, len(tokens), _BATCH):
            part = tokens[first : first + _BATCH]
            taken = [None if each is None else each[first : first + _BATCH] for each in replays]
            with torch.no_grad():
                every = log_probabilities(model, part, torch.ones_like(part), *taken)
            new.append(every[:, -old.shape[1] :])
        mean, largest, k1, k3 = differences(torch.cat(new), old)
        lines.append(f"| {name} | {mean:.2e} | {largest:.2f} | {k1:.1e} | {k3:.1e} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=None, help="fewer, for less memory or a rehearsal")
    parser.add_argument("--dtype", default="bfloat16", help="of both sides")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--folder", type=Path, default=None, help="for the tokens, rows and weights")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[args.shape] | {"torch_dtype": args.dtype}
    config["num_hidden_layers"] = args.layers or config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the loader is known in one process
    process = multiprocessing.get_context("spawn").Process(
        target=roll_out, args=(folder, args.device, args.prompts, args.prompt_len, args.new_tokens)
    )
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"vLLM's process ended with {process.exitcode}")
    with np.load(folder / _ROLLOUT) as file:
        rollout = {name: file[name] for name in file.files}
    print(described(commit_and_device(args.device, None)))
    sizes = f"{args.prompts} x {args.new_tokens} tokens, prompts of {args.prompt_len}"
    print(f"{args.shape}, {config['num_hidden_layers']} layers, {args.dtype}, random weights; {sizes}\n")
    print(table(trainer(folder, args.device), rollout, args.device), flush=True)


if __name__ == "__main__":
    main()
