"""How training frameworks take rows in: what each reads, checks and makes of it, written anew from its public code.

Each function does what its framework does between the engine's answer and the tensor that the trainer replays, with its
checks, and returns that tensor without what it puts into padding. `docs/clients.md` names the commits.
"""

import base64
import binascii
import io
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch


class Rejected(Exception):
    """The framework raises."""


def need(condition: Any, why: str) -> None:
    if not condition:
        raise Rejected(why)


def payload_layers(num_payload_layers: int, moe_layers: Sequence[int], num_layers: int, both: bool) -> list[int]:
    """The layer of the payload for each MoE layer of the model; verl and NeMo-RL also take payloads without others."""
    if both and num_payload_layers == len(moe_layers):
        return list(range(len(moe_layers)))
    need(num_payload_layers == num_layers, "layers do not match the model")
    return list(moe_layers)


# ---- engines that the framework holds in its own process: CompletionOutput.routed_experts of `total` tokens ----


class InProcess(NamedTuple):
    """What a framework takes, and makes of it."""

    dtype: Any = None  # of its tensor, if it converts
    needs_all: bool = True  # rows of all tokens, or of all but the last
    needs_known: bool = False
    needs_vllms_dtype: bool = False

    def take(self, rows: np.ndarray, total: int, num_experts: int) -> np.ndarray:
        of_model = np.uint8 if num_experts <= 256 else np.uint16
        need(
            rows.ndim == 3 and np.issubdtype(rows.dtype, np.integer), "must be an integer [tokens, layers, topk] array"
        )
        need(not self.needs_vllms_dtype or rows.dtype == of_model, "must use the dtype of the expert count")
        need(not self.needs_known or rows.min(initial=0) >= 0, "must be non-negative")
        need(int(rows.max(initial=0)) < num_experts, "outside the model's range")
        need(len(rows) in (total, total - 1) or (not self.needs_all and 0 < len(rows) < total), "route rows for tokens")
        return rows if self.dtype is None else torch.tensor(rows, dtype=self.dtype).numpy()


VERL, MS_SWIFT, SKYRL = InProcess(torch.int16), InProcess(torch.int64), InProcess(needs_all=False, needs_known=True)
ART = InProcess(needs_vllms_dtype=True)


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


class OverHTTP(NamedTuple):
    """The form that a framework asks for and decodes."""

    fmt: Any
    dtype: Any
    needs_known: bool = False

    def take(self, value: Any, num_rows: int, num_layers: int, top_k: int, num_experts: int) -> np.ndarray:
        if self.fmt == "list":
            need(isinstance(value, list), "not a pickle")
            flat = np.asarray(value, dtype=np.int64)
        else:
            data = base64.b64decode(value, validate=True)
            is_npy = self.fmt == "npy"
            flat = np.load(io.BytesIO(data), allow_pickle=False) if is_npy else np.frombuffer(data, dtype=np.int32)
        need(flat.size == num_rows * num_layers * top_k, "element count does not match sample tokens")
        rows = flat.reshape(num_rows, num_layers, top_k)
        need(not self.needs_known or ((rows >= 0) & (rows < num_experts)).all(), "routed expert ids outside the range")
        return rows


HTTP = {
    "vime": OverHTTP("npy", "auto", needs_known=True),  # zeros in an MoE layer are how it sees that rows are missing
    "xtuner": OverHTTP("list", "int16"),  # it takes a string for a pickle
    "slime, miles, AReaL": OverHTTP("raw", "int32"),  # AReaL does not check, miles takes K from the length
}
