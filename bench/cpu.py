"""What the capture costs on this machine's CPU, with the tiny model: a smoke test of the benchmark, and a ratio."""

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from bench.compare import Case, Host, interleave, start_all, table
from routed_experts.server.tiny_model import make_tiny_model

CASES = [Case("batch 1", 1, 64, 64), Case("batch 16", 16, 64, 64)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
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
    interleave([off, ours], lines, CASES, args.repeats, results, logs / "results.json")
    for host in (off, ours):
        host.stop()
    print(table(results, dict.fromkeys(results["batch 1"], "off")))


if __name__ == "__main__":
    main()
