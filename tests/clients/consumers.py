"""How verifiers and prime-rl take rows in, written anew from their public code; `docs/train.md`
has the versions."""

import binascii
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def renderers(body: bytes) -> dict[str, Any]:
    """prime-rl's and verifiers' client: cuts the data out of the bytes before it parses them."""
    prefix = b'"routed_experts":{"data":"'
    first = body.find(prefix)
    if first < 0:
        return json.loads(body)
    first += len(prefix)
    end = body.index(b'"', first)
    payload = json.loads(body[:first] + body[end:])
    payload["choices"][0]["routed_experts"]["data"] = memoryview(body)[first:end]
    return payload


def verifiers(payload: Any, path_len: int, node_lengths: Sequence[int]) -> list[np.ndarray | None]:
    """The rows of each new message after `path_len` tokens; a missing last row repeats the one
    before.

    Rows of earlier messages are kept from the turns that made them. None where rows do not cover a
    message.
    """
    data = np.frombuffer(binascii.a2b_base64(payload["data"]), dtype=payload.get("dtype", "uint8"))
    rows = data.reshape(payload["shape"])
    skipped = path_len - int(payload.get("start", 0) or 0)
    ends = skipped + np.cumsum(node_lengths)
    if skipped < 0:
        return [None] * len(node_lengths)
    if len(rows) and ends[-1] == len(rows) + 1:
        rows = np.concatenate([rows, rows[-1:]])
    begins = ends - np.asarray(node_lengths)
    return [rows[a:b].copy() if b <= len(rows) else None for a, b in zip(begins, ends, strict=True)]


def prime_rl_trainer(rows: np.ndarray, num_tokens: int) -> torch.Tensor:
    """[1, tokens, L, K] int32 from the bytes that its orchestrator sends."""
    assert len(rows) == num_tokens
    sent = bytearray(np.ascontiguousarray(rows).tobytes())
    return (
        torch.frombuffer(sent, dtype=getattr(torch, rows.dtype.name))
        .reshape(rows.shape)
        .to(torch.int32)[None]
    )
