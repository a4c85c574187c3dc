"""What the capture costs on one GPU, with the shape of Qwen3-30B-A3B and weights that nobody has to download.

Two engines run in turns on the same GPU: that takes one of 140 GB (an H200), or fewer `--layers` on a smaller one. With
`--sequence-parallel`, on the same four.
"""

import argparse
import json
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from bench.compare import WEIGHTS, Case, Host, interleave, start_all, table
from bench.http_server import free_port
from bench.shapes import ENGINE_SHAPES, kv_bytes
from routed_experts.capture.rows import WEIGHTS_KEY

CASES = [
    Case("batch 256", 256, 128, 256),
    Case("64 + one of 16k", 64, 128, 256, long=16000),
    Case("batch 64", 64, 128, 256),
    Case("batch 1", 1, 128, 256),
    Case("prompts", 2048, 128, 2),  # next to nothing but prefill: what a step of 8,192 prompt tokens costs
]

RELOADS = [Case("64 prompts of 2k again", 64, 2048, 16, again=True)]
"""With a KV cache for a quarter of them: all are loaded again from where they were offloaded."""

SLOTS = 98304
"""Tokens that the KV cache holds: as many as batch 256 needs at once."""

SEQUENCE_PARALLEL = {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True}
"""With vLLM's default backend for all-to-all, each tensor-parallel rank routes a part of the tokens."""

OURS: list[tuple[str, bool | str]] = [("captured, not asked for", False), ("returned to every request", True)]


def engine_options(model: Path, kv_cache_bytes: int) -> dict[str, Any]:
    return {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 20480,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.4,  # only checked against what is free; the KV cache has a size of its own
        "kv_cache_memory_bytes": kv_cache_bytes,
        "disable_log_stats": True,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shape", choices=sorted(ENGINE_SHAPES), default="qwen3-30b-a3b")
    parser.add_argument("--sequence-parallel", action="store_true", help="tensor 2 x data 2 with expert parallelism")
    parser.add_argument("--skip-peer", action="store_true", help="without vLLM's own capture")
    parser.add_argument("--weights", action="store_true", help="capture the router's weights too, and return them")
    parser.add_argument("--offload", action="store_true", help="only a mix of reloads of KV that was offloaded")
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, default=names, metavar="CASE")
    parser.add_argument("--noise", action="store_true", help="only two engines without capture against each other")
    parser.add_argument("--layers", type=int, default=None, help="fewer for a rehearsal")
    parser.add_argument("--logs", type=Path, default=None, help="folder for the engines' logs and the raw results")
    args = parser.parse_args()
    logs = args.logs or Path(tempfile.mkdtemp())
    logs.mkdir(parents=True, exist_ok=True)
    model = logs / "model"
    model.mkdir(exist_ok=True)
    config = dict(ENGINE_SHAPES[args.shape])
    config["num_hidden_layers"] = args.layers or config["num_hidden_layers"]
    (model / "config.json").write_text(json.dumps(config))
    options = engine_options(model, kv_bytes(config) * (SLOTS // 3 if args.offload else SLOTS))
    if args.sequence_parallel:
        options |= SEQUENCE_PARALLEL
    cases = RELOADS if args.offload else [case for case in CASES if case.name in args.cases]
    if args.offload:
        options |= {"kv_offloading_size": 16, "max_model_len": 4096}

    def start(variant: str, log: str | None = None) -> Host:
        own: dict[str, Any] = {"data_parallel_rpc_port": free_port()} if args.sequence_parallel else {}
        if args.weights and variant == "ours":
            own["additional_config"] = {WEIGHTS_KEY: True}
        return Host.start(variant, options | own, "cuda", logs / f"{log or variant}.log")

    results: dict[str, Any] = {}
    save = logs / "results.json"
    if args.noise:
        off, other = start_all([partial(start, "off"), partial(start, "off", log="other")])
        interleave(
            [off, other], [("off", off, False), ("off, other engine", other, False)], cases, args.repeats, results, save
        )
        for host in (off, other):
            host.stop()
        print(table(results, {name: "off" for case in results.values() for name in case}))
        return
    off, ours = start_all([partial(start, "off"), partial(start, "ours")])
    asked = [*OURS, ("returned with weights", WEIGHTS)] if args.weights else OURS
    lines = [("off", off, False), *((name, ours, routing) for name, routing in asked)]
    interleave([off, ours], lines, cases, args.repeats, results, save)
    ours.stop()
    report(results, args, ours)
    if args.skip_peer or args.offload or args.sequence_parallel:
        off.stop()
        return
    peer = start("vllm")
    lines = [("off, beside vLLM's own", off, False), ("vLLM's own", peer, True)]
    interleave([off, peer], lines, cases, args.repeats, results, save)
    for host in (off, peer):
        host.stop()
    report(results, args, ours)


def report(results: dict[str, Any], args: argparse.Namespace, ours: Host) -> None:
    """Prints the table, what it was measured on, and the memory that the capture takes."""
    beside = "off, beside vLLM's own"
    baseline = {name: "off" for case in results.values() for name in case}
    baseline |= {beside: beside, "vLLM's own": beside}
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    device = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    print(f"\n{device}, {args.repeats} repeats, {args.shape}, {ours.info['num_layers']} MoE layers\n")
    print(table(results, baseline))
    print(f"\nours: {ours.info}", flush=True)


if __name__ == "__main__":
    main()
