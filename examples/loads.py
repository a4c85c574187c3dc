"""Loads of experts for EPLB (`rebalance_experts`, also vLLM's) and SGLang
(`--init-expert-location`), from an export.

routed-experts export answers.jsonl --output experts.npz && python loads.py
"""

import json
from pathlib import Path

import numpy as np

from routed_experts.protocol.batch import spread_layers
from routed_experts.protocol.expert_load import count_experts

rows = np.load("experts.npz")
load = count_experts(rows["experts"], int(rows["num_experts"]))  # [L, E]
np.save("load.npy", load)  # EPLB
# dense layers have zeros
layers = spread_layers(load, rows["layer_ids"], rows["layer_ids"].max() + 1)
Path("load.json").write_text(json.dumps({"logical_count": layers.tolist()}))  # SGLang
