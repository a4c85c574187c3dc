"""Step, decoder layer and experts of generated tokens for `--moe-cache-profile` of github.com/thecodacus/llama.cpp.

routed-experts export answers.jsonl --output experts.parquet && python llama_cpp_trace.py
"""

import pandas as pd

table = pd.read_parquet("experts.parquet")
table = table[~table.is_prompt & (table.experts.str[0] >= 0)]
steps = table.groupby(["request", "choice", "position"], sort=False).ngroup()
lines = zip(steps, table.layer_id, table.experts, strict=True)
pd.DataFrame([[step, layer, *ids] for step, layer, ids in lines]).to_csv("trace.csv", header=False, index=False)
