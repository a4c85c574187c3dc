"""Traces of github.com/birkansit/moe-cache-lab (`TRACE_FORMAT.md`, version 1), from an export with
steps: what an expert cache would have to load, in the order in which the engine asked for it.

A trace has one response: its prompt layer by layer, then token by token. So it is written only
where the steps say that it was computed like that: not of prompts in chunks or with a prefix hit,
and not with drafts.

routed-experts export answers.jsonl --output experts.parquet && python moe_cache_lab_trace.py
"""

import json

import pandas as pd
import pyarrow.parquet as pq

table = pd.read_parquet("experts.parquet")
model = json.loads(pq.read_schema("experts.parquet").metadata[b"routed_experts"])
head = {
    "record_type": "metadata",
    "format": "moe-cache-lab.routing-jsonl",
    "format_version": 1,
    "model_id": "unknown",  # an export does not say it
    "num_experts": model["num_experts"],
    "experts_per_token": model["top_k"],
    "capture_method": "routed-experts-server",
}
for (request, choice), rows in table.groupby(["request", "choice"]):
    of_layer = rows[rows.layer == 0]
    steps = of_layer.step[of_layer.is_prompt.eq(False)].tolist()
    of_prompt = set(of_layer.step[of_layer.is_prompt.eq(True)])
    in_order = [*of_prompt, *steps]
    is_known = of_layer.step.notna().all() and (rows.experts.str[0] >= 0).all()
    if not is_known or len(of_prompt) != 1 or in_order != sorted(set(in_order)):
        print(f"response {request}, choice {choice}: not computed in the order of a trace")
        continue
    prompt = rows[rows.is_prompt.eq(True)].sort_values(["layer", "position"])
    generated = rows[rows.is_prompt.eq(False)].sort_values(["position", "layer"])
    with open(f"trace-{request}-{choice}.jsonl", "w") as file:
        print(json.dumps(head), file=file)
        for row in pd.concat([prompt, generated]).itertuples():
            event = {
                "record_type": "routing_selection",
                "phase": "prompt" if row.is_prompt else "generated",
                "token_position": row.position,
                "layer": row.layer if pd.isna(row.layer_id) else int(row.layer_id),
                "selected_experts": row.experts.tolist(),
            }
            print(json.dumps(event), file=file)
