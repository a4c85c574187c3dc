"""Load over time, balance, pairs of experts and rarity, from an export.

routed-experts export answers.jsonl --output experts.npz && python -i measures.py
"""

import numpy as np

file = np.load("experts.npz")
rows = file["experts"][(file["experts"] >= 0).all(axis=(1, 2))].astype(int)  # [N, L, K], those that are known
chosen = np.zeros((*rows.shape[:2], int(file["num_experts"])))  # [N, L, E], 1 where a token chose an expert
np.put_along_axis(chosen, rows, 1, axis=2)
load = chosen.cumsum(axis=0) / np.arange(1, len(rows) + 1)[:, None, None]  # after each token
share = load / rows.shape[2]
balance = -(share * np.log(share, where=share > 0, out=np.zeros_like(share))).sum(axis=2) / np.log(chosen.shape[2])
pairs = np.einsum("nli,nlj->lij", chosen, chosen)  # tokens that chose both experts
rarity = -np.log2(np.take_along_axis(load[-1:], rows, axis=2)).mean(axis=(1, 2))  # bits, of each token
