"""How training frameworks take rows in: what each reads, checks and makes of it, written anew from its public code.

Each function does what its framework does between the engine's answer and the tensor that the trainer replays, with its
checks, and nothing else. `docs/clients.md` names the repository, path and commit that it was read from. L is
the number of layers that the framework counts: the MoE layers where it says so, otherwise all decoder layers.
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


# ---- engines that the framework holds in its own process: CompletionOutput.routed_experts ----


def verl(rows: np.ndarray, prompt: Sequence[int], response: Sequence[int], prompt_columns: int) -> torch.Tensor:
    """[columns, L, K] int16: prompts end in column `prompt_columns`, zeros all around."""
    taken = torch.from_numpy(rows if rows.flags.writeable else rows.copy()).to(torch.int16)
    columns = torch.zeros((2 * prompt_columns, *taken.shape[1:]), dtype=torch.int16)
    first = prompt_columns - len(prompt)
    end = min(first + len(taken), len(columns))
    columns[first:end] = taken[: end - first]
    return columns


def verl_packed(rows: np.ndarray, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens, L, K] int16 for packed sequences, and the tokens that are replayed: all but the last."""
    taken = torch.tensor(rows, dtype=torch.int16)
    need(len(taken) in (num_tokens, num_tokens - 1), "expected equal lengths or exactly one missing final route")
    whole = torch.cat([taken, taken.new_zeros((num_tokens - len(taken), *taken.shape[1:]))])
    return whole, torch.arange(num_tokens) < num_tokens - 1


def verl_resumed(first: np.ndarray, second: np.ndarray, new_tokens: int) -> np.ndarray:
    """Rows of a rollout that was aborted and resumed with all its tokens as the prompt."""
    return np.concatenate([first, second[-new_tokens:]])


def verl_layers(num_payload_layers: int, moe_layers: Sequence[int], num_layers: int) -> list[int]:
    """The layer of the payload for each MoE layer of the model."""
    if num_payload_layers == num_layers:
        return list(moe_layers)
    need(num_payload_layers == len(moe_layers), "index out of range")
    return list(range(len(moe_layers)))


def nemo_rl(
    rows: np.ndarray, num_tokens: int, columns: int, num_experts: int, prompt_rows: np.ndarray | None = None
) -> torch.Tensor:
    """[columns, L, K]: routes 0 to K - 1 for the last token and padding, -1 where rows are missing."""
    dtype = torch.int8 if num_experts <= 128 else torch.int16
    taken = torch.as_tensor(rows if prompt_rows is None else np.concatenate([prompt_rows, rows]))
    need(taken.numel() == 0 or int(taken.max()) <= torch.iinfo(dtype).max, "id exceeds the carry dtype")
    taken = taken.to(dtype)
    need(taken.dim() == 3, "must have shape [tokens, num_moe_layers, topk]")
    expected = num_tokens - 1
    need(len(taken) <= expected + 1, "too many routes")
    whole = torch.arange(taken.shape[2], dtype=dtype).expand(columns, *taken.shape[1:]).clone()
    count = min(expected, len(taken))
    whole[:count] = taken[:count]
    whole[count:expected] = -1
    return whole


def nemo_rl_validate(whole: torch.Tensor, num_experts: int) -> None:
    """What its replay checks: each row of a layer is either -1 throughout, or different experts of the model."""
    missing = whole.eq(-1).all(dim=-1)
    need(not (whole.lt(0).any(dim=-1) & ~missing).any(), "fallback rows must use the all--1 sentinel")
    ordered = whole[~missing].sort(dim=-1).values
    need(not (ordered[..., 1:] == ordered[..., :-1]).any(), "duplicate expert ids")
    need(ordered.numel() == 0 or int(ordered.max()) < num_experts, "outside the expert range")


nemo_rl_layers = verl_layers
"""As many as MoE layers, or as decoder layers."""


def skyrl(rows: Any, lengths: tuple[int, int], columns: int) -> np.ndarray:
    """[columns, L, K], padded on the left; routes 0 to K - 1 for padding and the last token."""
    need(isinstance(rows, np.ndarray), "must be a NumPy array")
    need(rows.ndim == 3 and np.issubdtype(rows.dtype, np.integer), "must be an integer [tokens, layers, topk] array")
    need(rows.min(initial=0) >= 0, "must be non-negative")
    highest = int(rows.max(initial=0))
    compact = rows.astype(np.uint8 if highest < 2**8 else np.int16)
    available = sum(lengths)
    need(0 < len(compact) <= available, "route rows for tokens")
    whole = np.empty((columns, *compact.shape[1:]), compact.dtype)
    whole[...] = np.arange(compact.shape[2])
    first = columns - available
    whole[first : first + len(compact)] = compact
    return whole


def decoder_layers(num_payload_layers: int, moe_layers: Sequence[int], num_layers: int) -> list[int]:
    """The layer of the payload for each MoE layer, where rows are indexed by the decoder layer's own number."""
    need(max(moe_layers) < num_payload_layers, "layer indices out of range")
    need(num_payload_layers == num_layers, "layers do not match the model")
    return list(moe_layers)


def ms_swift(rows: Any, num_tokens: int, columns: int) -> torch.Tensor:
    """[columns, L, K] int64, padded with zeros on the right, the only side with its Megatron trainer."""
    taken = torch.as_tensor(rows)
    taken = (taken.squeeze(0) if taken.dim() >= 4 and len(taken) == 1 else taken).to(torch.int64)
    need(len(taken) in (num_tokens, num_tokens - 1), "does not match encoded length")
    return torch.cat([taken, taken.new_zeros((columns - len(taken), *taken.shape[1:]))])


def art(rows: np.ndarray, prompt: Sequence[int], response: Sequence[int], num_experts: int) -> np.ndarray:
    """[P + G, L, K]: what its server sends on, and made-up but possible routes for the last token."""
    need(rows.ndim == 3, "must have rank 3")
    need(rows.dtype == (np.uint8 if num_experts <= 256 else np.uint16), "must use the dtype of the expert count")
    need(rows.shape[2] <= num_experts and int(rows.max(initial=0)) < num_experts, "outside the exact model range")
    total = len(prompt) + len(response)
    need(len(rows) in (total, total - 1), "length does not match prompt/completion token ids")
    layers, top_k = rows.shape[1:]
    made_up = (
        np.arange(total - len(rows))[:, None, None] + np.arange(layers)[:, None] + np.arange(top_k)
    ) % num_experts
    return np.concatenate([rows, made_up.astype(rows.dtype)])


def art_dense_layers(rows: np.ndarray, dense_layers: Sequence[int]) -> np.ndarray:
    """Fills the layers that do not route with possible routes, in place as it does."""
    need(not dense_layers or dense_layers[-1] < rows.shape[1], "fewer layers than the registered model")
    need(not rows[:, list(dense_layers)].any(), "non-routed layer contained captured expert ids")
    rows[:, list(dense_layers)] = np.arange(rows.shape[2], dtype=rows.dtype)
    return rows


def prime_rl_server(rows: np.ndarray, start: int) -> dict[str, Any]:
    """The JSON object that its own server makes of the engine's array."""
    array = np.asarray(rows)
    need(array.ndim == 3 and np.issubdtype(array.dtype, np.integer), "not rows")
    need(array.min(initial=0) >= 0, "array.min() >= 0")
    dtype = np.dtype(np.uint8 if array.max(initial=0) <= 255 else np.uint16)
    data = np.ascontiguousarray(array.astype(dtype))
    return {
        "data": base64.b64encode(data).decode(),
        "shape": list(data.shape),
        "start": start,
        "dtype": dtype.name,
    }


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


def vime(choice: dict[str, Any], tokens: Sequence[int], num_layers: int, top_k: int, num_experts: int) -> torch.Tensor:
    """[tokens - 1, L, K] int32 from the base64 of a .npy file, with the checks before they are replayed."""
    loaded = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"], validate=True)), allow_pickle=False)
    flat = torch.as_tensor(loaded, dtype=torch.int32).reshape(-1)
    need(flat.numel() == (len(tokens) - 1) * num_layers * top_k, "element count does not match sample tokens")
    rows = flat.reshape(len(tokens) - 1, num_layers, top_k)
    need(((rows >= 0) & (rows < num_experts)).all(), "routed expert ids outside the range")
    return rows


def vime_moe_layers(rows: torch.Tensor, moe_layers: Sequence[int]) -> None:
    """No MoE layer of a row may be all zeros: that is how missing rows look from vLLM's own capture."""
    need(rows[:, list(moe_layers)].any(dim=-1).all(), "capture is all zero for token/layer pairs")


def vime_streamed(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The choice that its streaming rollout decodes: the last one, as vLLM's own capture sends all rows there."""
    return [chunk["choices"][0] for chunk in chunks if chunk["choices"]][-1]


def xtuner(choice: dict[str, Any], num_tokens: int, num_layers: int, top_k: int) -> torch.Tensor:
    """[tokens - 1, L, K] int64; a string is taken for a pickle, so only nested lists arrive."""
    value = choice["routed_experts"]
    need(not isinstance(value, str), "not a pickle")
    rows = np.asarray(value)
    need(rows.dtype != object, "can't convert np.ndarray of type numpy.object_")
    taken = torch.as_tensor(rows, dtype=torch.long).reshape(-1, num_layers, top_k)
    need(len(taken) == num_tokens - 1, "rollout_routed_experts.size(0) != input_ids.size(1)")
    return taken


def slime(meta_info: dict[str, Any], tokens: Sequence[int], num_layers: int, top_k: int) -> torch.Tensor:
    """[tokens - 1 - start, L, K] int32 from the base64 of the bare array."""
    flat = torch.frombuffer(bytearray(base64.b64decode(meta_info["routed_experts"])), dtype=torch.int32)
    count = len(tokens) - 1 - int(meta_info.get("routed_experts_start_len", 0))
    need(flat.numel() == count * num_layers * top_k, "element count does not match sample tokens")
    return flat.reshape(count, num_layers, top_k)


def slime_validate(rows: torch.Tensor, moe_layers: Sequence[int]) -> None:
    need(len(rows) > 0, "no routed-experts rows")
    need(all(rows[:, layer].any() for layer in moe_layers), "all zero for MoE layers")


def slime_shards(rows: torch.Tensor, num_tokens: int, num_experts: int, tp_size: int) -> list[torch.Tensor]:
    """The rows of each tensor-parallel rank under sequence parallelism: consecutive tokens, padded at the end."""
    need(len(rows) == num_tokens - 1, "rows of all tokens but the last")

    def padded(taken: torch.Tensor, count: int) -> torch.Tensor:
        pad = torch.arange(count * taken[0].numel(), dtype=taken.dtype) % num_experts
        return torch.cat([taken, pad.reshape(count, *taken.shape[1:])])

    whole = padded(rows, 1)
    whole = padded(whole, -len(whole) % tp_size)
    return list(whole.chunk(tp_size))


def miles(meta_info: dict[str, Any], num_rows: int, num_layers: int) -> np.ndarray:
    """[rows, L, K] int32, K from the length."""
    flat = np.frombuffer(base64.b64decode(meta_info["routed_experts"]), dtype=np.int32)
    return flat.reshape(num_rows, num_layers, -1) if num_rows else np.empty((0, num_layers, 0), np.int32)


def areal(meta_info: dict[str, Any]) -> np.ndarray:
    """[tokens - 1, L · K] int32"""
    count = meta_info["prompt_tokens"] + meta_info["completion_tokens"] - 1
    return np.frombuffer(base64.b64decode(meta_info["routed_experts"]), dtype=np.int32).reshape(count, -1)
