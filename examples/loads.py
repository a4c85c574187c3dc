"""Loads of experts for EPLB (`rebalance_experts`, also vLLM's) and SGLang (`--init-expert-location`), from an export.

routed-experts export answers.jsonl --output experts.npz && python loads.py
"""

import numpy as np
import torch

from routed_experts.protocol.expert_load import count_experts

rows = np.load("experts.npz")
load = count_experts(rows["experts"], int(rows["num_experts"]))  # [L, E]
np.save("load.npy", load)  # EPLB
layers = np.zeros((rows["layer_ids"].max() + 1, load.shape[1]), np.int64)  # dense layers have zeros
layers[rows["layer_ids"]] = load
torch.save({"logical_count": torch.from_numpy(layers)}, "load.pt")  # SGLang
