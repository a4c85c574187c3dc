"""Routing traces in llama.cpp's two spellings, from an export.

- `trace.csv`, for `--moe-cache-profile` of github.com/thecodacus/llama.cpp: a line per token and
  layer, with the step (negative in prompts), the decoder layer and the experts.
- `moe_trace.csv`, of github.com/ggml-org/llama.cpp/pull/28544: a line per choice, with the decoder
  layer and the expert.

routed-experts export answers.jsonl --output experts.parquet && python llama_cpp_trace.py
"""

import pandas as pd

table = pd.read_parquet("experts.parquet")
table = table[table.experts.str[0] >= 0]  # -1: unknown
steps = table.groupby(["request", "choice", "position"], sort=False).ngroup()
steps = steps.where(table.is_prompt.eq(False), -1 - steps)
lines = zip(steps, table.layer_id, table.experts, strict=True)
pd.DataFrame([[step, layer, *ids] for step, layer, ids in lines]).to_csv(
    "trace.csv", header=False, index=False
)
choices = table.explode("experts")[["layer_id", "experts"]]
choices.to_csv("moe_trace.csv", header=False, index=False)
