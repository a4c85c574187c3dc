"""How training frameworks take rows in: what each reads, checks and makes of it, written anew from its public code.

Each function does what its framework does between the engine's answer and the tensor that the trainer replays, with its
checks, and returns that tensor without what it puts into padding. `docs/clients.md` names the commits. L is the number
of layers that the framework counts: MoE layers in `moe_or_decoder_layers`, otherwise all decoder layers.
"""

import base64
import binascii
import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


class Rejected(Exception):
    """The framework raises."""


def need(condition: Any, why: str) -> None:
    if not condition:
        raise Rejected(why)


def moe_or_decoder_layers(num_payload_layers: int, moe_layers: Sequence[int], num_layers: int) -> list[int]:
    """verl, NeMo-RL: the layer of the payload for each MoE layer of the model."""
    if num_payload_layers == num_layers:
        return list(moe_layers)
    need(num_payload_layers == len(moe_layers), "index out of range")
    return list(range(len(moe_layers)))


def decoder_layers(num_payload_layers: int, moe_layers: Sequence[int], num_layers: int) -> list[int]:
    """The others."""
    need(num_payload_layers == num_layers, "layers do not match the model")
    return list(moe_layers)


# ---- engines that the framework holds in its own process: CompletionOutput.routed_experts of `total` tokens ----


def verl(rows: np.ndarray, total: int, num_experts: int) -> np.ndarray:
    taken = torch.tensor(rows, dtype=torch.int16)
    need(len(taken) in (total, total - 1), "expected equal lengths or exactly one missing final route")
    return taken.numpy()


def verl_resumed(first: np.ndarray, second: np.ndarray, new_tokens: int) -> np.ndarray:
    """Rows of a rollout that was aborted and resumed with all its tokens as the prompt."""
    return np.concatenate([first, second[-new_tokens:]])


def nemo_rl(rows: np.ndarray, total: int, num_experts: int) -> np.ndarray:
    """-1 where rows are missing; its range check cannot read uint16."""
    dtype = torch.int8 if num_experts <= 128 else torch.int16
    taken = torch.as_tensor(rows)
    need(taken.dtype != torch.uint16, '"max" not implemented for UInt16')
    need(int(taken.max()) <= torch.iinfo(dtype).max, "id exceeds the carry dtype")
    need(len(taken) <= total, "too many routes")
    whole = torch.full((total - 1, *taken.shape[1:]), -1, dtype=dtype)
    whole[: len(taken)] = taken[: total - 1].to(dtype)
    missing = whole.eq(-1).all(dim=-1)
    need(not (whole.lt(0).any(dim=-1) & ~missing).any(), "fallback rows must use the all--1 sentinel")
    ordered = whole[~missing].sort(dim=-1).values
    need(not (ordered[..., 1:] == ordered[..., :-1]).any(), "duplicate expert ids")
    need(int(ordered.max()) < num_experts, "outside the expert range")
    return whole.numpy()


def skyrl(rows: np.ndarray, total: int, num_experts: int) -> np.ndarray:
    need(rows.ndim == 3 and np.issubdtype(rows.dtype, np.integer), "must be an integer [tokens, layers, topk] array")
    need(rows.min(initial=0) >= 0, "must be non-negative")
    need(0 < len(rows) <= total, "route rows for tokens")
    return rows.astype(np.uint8 if rows.max(initial=0) < 2**8 else np.int16)


def ms_swift(rows: np.ndarray, total: int, num_experts: int) -> np.ndarray:
    need(len(rows) in (total, total - 1), "does not match encoded length")
    return torch.as_tensor(rows).to(torch.int64).numpy()


def art(rows: np.ndarray, total: int, num_experts: int) -> np.ndarray:
    need(rows.ndim == 3, "must have rank 3")
    need(rows.dtype == (np.uint8 if num_experts <= 256 else np.uint16), "must use the dtype of the expert count")
    need(rows.shape[2] <= num_experts and int(rows.max(initial=0)) < num_experts, "outside the exact model range")
    need(len(rows) in (total, total - 1), "length does not match prompt/completion token ids")
    return rows


def prime_rl(rows: np.ndarray, start: int) -> dict[str, Any]:
    """The JSON object that its own server makes of the engine's array; its client reads it as verifiers does."""
    need(rows.ndim == 3 and np.issubdtype(rows.dtype, np.integer), "not rows")
    need(rows.min(initial=0) >= 0, "array.min() >= 0")
    data = np.ascontiguousarray(rows.astype(np.uint8 if rows.max(initial=0) <= 255 else np.uint16))
    encoded = base64.b64encode(data).decode()
    return {"data": encoded, "shape": list(data.shape), "start": start, "dtype": data.dtype.name}


# ---- HTTP ----


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
    """The rows of each new message after `path_len` tokens; a missing last row repeats the one before.

    Rows of earlier messages are kept from the turns that made them. None where rows do not cover a message.
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
    need(len(rows) == num_tokens, "misaligned")
    sent = bytearray(np.ascontiguousarray(rows).tobytes())
    return torch.frombuffer(sent, dtype=getattr(torch, rows.dtype.name)).reshape(rows.shape).to(torch.int32)[None]


def vime(value: Any, num_rows: int, num_layers: int, top_k: int, num_experts: int) -> np.ndarray:
    """Of the base64 of a .npy file. Zeros in an MoE layer are how missing rows look from vLLM's own capture."""
    loaded = np.load(io.BytesIO(base64.b64decode(value, validate=True)), allow_pickle=False)
    need(loaded.size == num_rows * num_layers * top_k, "element count does not match sample tokens")
    rows = loaded.astype(np.int32).reshape(num_rows, num_layers, top_k)
    need(((rows >= 0) & (rows < num_experts)).all(), "routed expert ids outside the range")
    return rows


def xtuner(value: Any, num_rows: int, num_layers: int, top_k: int, num_experts: int) -> np.ndarray:
    """Of nested lists, as it takes a string for a pickle."""
    need(isinstance(value, list), "not a pickle")
    rows = np.asarray(value, dtype=np.int64)
    need(rows.size == num_rows * num_layers * top_k, "rollout_routed_experts.size(0) != input_ids.size(1)")
    return rows.reshape(num_rows, num_layers, top_k)


def slime(value: Any, num_rows: int, num_layers: int, top_k: int, num_experts: int) -> np.ndarray:
    """Of the base64 of the bare array, as AReaL and miles; AReaL does not check, miles takes K from the length."""
    flat = np.frombuffer(base64.b64decode(value), dtype=np.int32)
    need(flat.size == num_rows * num_layers * top_k, "element count does not match sample tokens")
    return flat.reshape(num_rows, num_layers, top_k)
