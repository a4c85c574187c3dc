"""What the capture costs on this machine's CPU: a ratio with the tiny model, and what a step of a large one costs the
host."""

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from bench.compare import Case, Host, interleave, start_all, table
from bench.host_step import host_step_table
from bench.offloading import reload_table
from bench.scheduler import long_prompt_table, queue_table
from routed_experts.server.cli.tiny_model import make_tiny_model

CASES = [Case("batch 1", 1, 64, 64), Case("batch 16", 16, 64, 64)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--without-engine", action="store_true", help="only what a step costs the host")
    args = parser.parse_args()
    if not args.without_engine:
        compare_engines(args.repeats)
    for made in (host_step_table("cpu"), queue_table(), long_prompt_table(), reload_table()):
        print(f"\n{made}", flush=True)


def compare_engines(repeats: int) -> None:
    """Prints what the engine with the tiny model costs, with and without the capture."""
    logs = Path(tempfile.mkdtemp())
    make_tiny_model(logs / "model")
    options = {
        "model": str(logs / "model"),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "kv_cache_memory_bytes": 64 << 20,
        "disable_log_stats": True,
    }
    variants = ("off", "ours")
    off, ours = start_all([partial(Host.start, name, options, "cpu", logs / f"{name}.log") for name in variants])
    lines = [
        ("off", off, False),
        ("captured, not asked for", ours, False),
        ("returned to every request", ours, True),
    ]
    results: dict[str, Any] = {}
    interleave([off, ours], lines, CASES, repeats, results, logs / "results.json")
    for host in (off, ours):
        host.stop()
    print(table(results, dict.fromkeys(results["batch 1"], "off")))


if __name__ == "__main__":
    main()
