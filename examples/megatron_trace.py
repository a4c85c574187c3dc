"""The router trace that Megatron's `--moe-routing-trace-path` writes, for its `tools/moe_routing`,
from an export.

Each choice of a response is a step.

routed-experts export answers.jsonl --output experts.parquet && python megatron_trace.py
"""

import json

import pandas as pd

table = pd.read_parquet("experts.parquet")
table = table[table.experts.str[0] >= 0]  # -1: unknown
steps = table.groupby(["request", "choice"], sort=False).ngroup()
with open("router_trace_rank0.jsonl", "w") as file:
    for (step, layer), rows in table.groupby([steps, "layer_id"]):
        experts = [sorted(ids.tolist()) for ids in rows.experts]
        line = {
            "step": step,
            "stage": "pre_dispatch",
            "block": "decoder",
            "layer": layer,
            "rank": 0,
        }
        line |= {"num_tokens": len(experts), "topk": len(experts[0]), "top_indices": experts}
        file.write(json.dumps(line) + "\n")
