"""An oracle for every precision: the scores that the routers themselves were given, and their rule
in plain PyTorch.

No other forward pass in 16 bits, or of quantised weights, agrees bit for bit. So the scores are
recorded in the run that is checked (`tests/gpu/recorded.py` does that in a real engine), and say
which experts must have been chosen: all of them, in every layer. What capture and server do is not
used. Plain torch and numpy; no engine is imported.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

ROUNDING = 2.0**-20
"""What a router may be off in float32 where it computes with the scores: some units in the last
place of numbers up to 4, as the sums of two sigmoids and their biases are."""


class Verdict(IntEnum):
    """Of one layer of a row.

    EXACT: these experts and no others. TIE: another choice would be as good, as scores are equal
    bit for bit. ROUNDING: equal but for `ROUNDING`, which the same rule on the same device never
    needs.
    """

    WRONG = 0
    ROUNDING = 1
    TIE = 2
    EXACT = 3


@dataclass(frozen=True)
class Rule:
    """How a router chooses experts by its scores."""

    top_k: int
    # what is compared: "scores" as they are, or their "softmax" or "sigmoid"
    scoring: str = "scores"
    bias: torch.Tensor | None = None  # [L, experts] float32, added to that
    groups: int = 1  # experts are chosen in the best groups only, where there are several
    top_groups: int = 1
    group_best: int = 1  # how many of a group's best add up to its score

    def judge(self, scores: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """A `Verdict` [n, L] for the experts `ids` [n, L, K] by what the routers were given, [n, L,
        experts].

        Scores that are not a number were not recorded: no choice is right by them.
        """
        known = torch.from_numpy(((ids >= 0) & (ids < scores.shape[2])).all(axis=2))
        at = torch.from_numpy(np.where(known.numpy()[:, :, None], ids, 0).astype(np.int64))
        chosen = torch.zeros(scores.shape, dtype=torch.bool).scatter_(2, at, True)
        known &= chosen.sum(2) == self.top_k
        compared = self._compared(torch.from_numpy(scores).float())
        verdict = torch.full(scores.shape[:2], Verdict.WRONG, dtype=torch.int8)
        if self.scoring != "scores":
            verdict[known & self._right(compared, chosen, ROUNDING)[0]] = Verdict.ROUNDING
        right, tied = self._right(compared, chosen, 0.0)
        verdict[known & right] = Verdict.EXACT
        verdict[known & right & tied] = Verdict.TIE
        return verdict.numpy()

    def _compared(self, scores: torch.Tensor) -> torch.Tensor:
        if self.scoring == "sigmoid":
            scores = scores.sigmoid()
        elif self.scoring == "softmax":
            scores = scores.softmax(dim=2)
        return scores if self.bias is None else scores + self.bias

    def _right(
        self, compared: torch.Tensor, chosen: torch.Tensor, slack: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether `chosen` [n, L, experts] are the best, and whether others are as good: both [n,
        L]."""
        if self.groups == 1:
            return self._best(compared, chosen, torch.ones_like(chosen), slack)
        of_group = (
            compared.view(*compared.shape[:2], self.groups, -1).topk(self.group_best).values.sum(3)
        )
        last = of_group.topk(self.top_groups).values[:, :, -1:]
        right, tied = self._best(compared, chosen, self._members(of_group >= last, compared), slack)
        certain, open_ = of_group > last + slack, (of_group - last).abs() <= slack
        for at in torch.nonzero((certain | open_).sum(2) > self.top_groups).tolist():
            row, layer = at
            free = self.top_groups - int(certain[row, layer].sum())
            right[row, layer], tied[row, layer] = False, True
            for filling in combinations(open_[row, layer].nonzero().flatten().tolist(), free):
                groups = certain[row : row + 1, layer : layer + 1].clone()
                groups[0, 0, list(filling)] = True
                cell = (
                    compared[row : row + 1, layer : layer + 1],
                    chosen[row : row + 1, layer : layer + 1],
                )
                right[row, layer] |= self._best(*cell, self._members(groups, cell[0]), slack)[0][
                    0, 0
                ]
        return right, tied

    def _members(self, groups: torch.Tensor, compared: torch.Tensor) -> torch.Tensor:
        return groups.repeat_interleave(compared.shape[2] // self.groups, dim=2)

    @staticmethod
    def _best(
        compared: torch.Tensor, chosen: torch.Tensor, allowed: torch.Tensor, slack: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        least = compared.masked_fill(~chosen, torch.inf).amin(2)
        other = compared.masked_fill(~allowed | chosen, -torch.inf).amax(2)
        is_number = ~compared.isnan().any(2)
        return is_number & ~(chosen & ~allowed).any(2) & (least >= other - slack), least == other


_BY_SCORE = {
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_moe_text",
    "gpt_oss",
}
_BY_SCORE |= {"granitemoehybrid", "jamba", "llama4_text", "gemma4_text", "qwen3_vl_moe_text"}
"""Softmax over all experts, or over the chosen ones: the best scores either way."""
_BY_BIASED_SIGMOID = {
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe",
    "glm_moe_dsa",
    "lfm2_moe",
    "minimax_m2",
    "nemotron_h",
}


def rule_of(model: Path, layer_ids: Sequence[int]) -> Rule:
    """The rule by the model's configuration and, where experts have a bias, its checkpoint.

    Raises:
        ValueError: of an architecture that nobody has read up on.
    """
    config = json.loads((model / "config.json").read_text())
    config = config.get("text_config", config)
    kind = config["model_type"]
    top_k = next(
        config[name] for name in ("num_experts_per_tok", "top_k_experts") if config.get(name)
    )
    groups, top_groups = config.get("n_group") or 1, config.get("topk_group") or 1
    if kind in _BY_SCORE:
        return Rule(top_k)
    if kind == "deepseek_v2":
        return Rule(top_k, "softmax", groups=groups, top_groups=top_groups)
    if kind in _BY_BIASED_SIGMOID:
        return Rule(top_k, "sigmoid", _biases(model, layer_ids), groups, top_groups, group_best=2)
    raise ValueError(f"how {kind} chooses experts is not written down here")


def _biases(model: Path, layer_ids: Sequence[int]) -> torch.Tensor:
    """[L, experts] float32."""
    biases = {}
    for file in model.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in list(tensors.keys()):
                if match := re.search(r"layers\.(\d+)\..*(correction_bias|expert_bias)$", name):
                    biases[int(match[1])] = tensors.get_tensor(name).float()
    return torch.stack([biases[layer] for layer in layer_ids])


@dataclass(frozen=True)
class Part:
    """A request's part of a step."""

    request: str
    positions: np.ndarray  # of its tokens in this step
    tokens: np.ndarray  # their ids; numbers of their own for those of an image
    # KV slots of all of its positions up to the last of these, by its block table
    slots: np.ndarray


@dataclass
class Recording:
    """What was computed, and which computations the KV came from that each request's forward passes
    read.

    A computation is one token's way through the model. It has the next number, and is where its KV
    is until another takes its slot: so a prefix hit reads computations of other requests, and a
    preempted request may have several of one position. Its text is all tokens before it and its
    own, each with the adapter that computed it: by that, drafts that were rejected are told apart,
    and what another adapter made of the same tokens.
    """

    layer_ids: list[int]
    scores: list[np.ndarray] = field(default_factory=list)
    owners: list[str] = field(default_factory=list)
    # By request, the number of the LoRA adapter that computes it; none without.
    adapters: dict[str, int] = field(default_factory=dict)
    # By computation, the ids and the bits of their weights, [2, L, K] int32, that the experts were
    # handed.
    handed: list[np.ndarray] = field(default_factory=list)
    steps: int = 0
    _before: list[int] = field(default_factory=list)
    _tokens: list[tuple[int, int]] = field(default_factory=list)
    _texts: dict[int, int] = field(default_factory=lambda: {-1: 0})
    _at: dict[int, int] = field(default_factory=dict)
    _read: dict[str, dict[int, set[int]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(set))
    )
    _last: dict[str, np.ndarray] = field(default_factory=dict)

    def step(self, scores: np.ndarray, parts: Iterable[Part]) -> None:
        """One forward pass; `scores` [n, L, experts] are in the order of `parts`."""
        parts = list(parts)
        first = len(self.owners)
        self.steps += 1
        self.scores.extend(scores)
        for part in parts:
            adapter = self.adapters.get(part.request, 0)
            for position, token in zip(part.positions.tolist(), part.tokens.tolist(), strict=True):
                self._at[int(part.slots[position])] = len(self.owners)
                self.owners.append(part.request)
                self._tokens.append((token, adapter))
        assert len(self.owners) == len(self.scores), "as many tokens as scores"
        # Only now: a request may read what another computes in the same step.
        for part in parts:
            for position in part.positions.tolist():
                self._before.append(self._at[int(part.slots[position - 1])] if position else -1)
            self._remember(
                part.request, np.array([self._at.get(int(slot), -2) for slot in part.slots])
            )
        assert len(self._before) == len(self.owners) > first

    def _remember(self, request: str, read: np.ndarray) -> None:
        known = self._last.get(request, read[:0])
        both = min(len(known), len(read))
        new = np.flatnonzero(read[:both] != known[:both]).tolist() + list(range(both, len(read)))
        for position in new:
            self._read[request][position].add(int(read[position]))
        self._last[request] = read

    def computations(self, request: str, tokens: Sequence[int]) -> list[list[int]]:
        """Those of each of `tokens`, of which the request's forward passes read the KV."""
        read, adapter, text, computed = self._read[request], self.adapters.get(request, 0), 0, []
        for position, token in enumerate(tokens):
            text = hash((text, (token, adapter)))
            computed.append(
                [
                    number
                    for number in sorted(read[position])
                    if number >= 0 and self._text(number) == text
                ]
            )
        return computed

    def _text(self, number: int) -> int:
        unknown = []
        while number not in self._texts:
            unknown.append(number)
            number = self._before[number]
        text = self._texts[number]
        for number in reversed(unknown):
            text = self._texts[number] = hash((text, self._tokens[number]))
        return text

    def name_of(self, request_id: str, index: int) -> str:
        """The engine's name for choice `index` of a request that its caller knows as
        `request_id`."""
        names = (request_id, f"{index}_{request_id}")
        (name,) = (known for known in self._read if known.rpartition("-")[0] in names)
        return name


def judge(
    recording: Recording,
    rule: Rule,
    request: str,
    tokens: Sequence[int],
    rows: np.ndarray,
    prompt: int = 0,
    choices: Sequence[str] = (),
) -> Counter[str]:
    """What a request's rows [len(tokens), L, K] come to: counts of rows and, where it says so, of
    layers of rows.

    A row is right if all of its layers are by one of the computations that the request read. The
    first `prompt` rows may instead be by those that one of the other `choices` of the prompt read:
    the engine hands them out once.
    """
    assert len(rows) == len(tokens)
    verdicts = _verdicts(recording, rule, request, tokens, rows)
    own = verdicts[:prompt].min(axis=1, initial=Verdict.EXACT) > Verdict.WRONG
    for other in choices if not own.all() else ():
        theirs = _verdicts(recording, rule, other, tokens[:prompt], rows[:prompt])
        if theirs.min() > Verdict.WRONG:
            verdicts[:prompt] = theirs
            break
    wrong = verdicts.min(axis=1) == Verdict.WRONG
    computations = recording.computations(request, tokens)
    owners = [[recording.owners[number] for number in numbers] for numbers in computations]
    return Counter(
        {
            "rows": len(rows),
            "wrong": int(wrong.sum()),
            "not recorded": sum(not numbers for numbers in computations),
            "by another choice": int((~own & ~wrong[:prompt]).sum()),
            "hits": sum(request not in of_row and bool(of_row) for of_row in owners),
            "recomputed": sum(of_row.count(request) > 1 for of_row in owners),
            "layers": verdicts.size,
            "ties in layers": int((verdicts == Verdict.TIE).sum()),
            "roundings in layers": int((verdicts == Verdict.ROUNDING).sum()),
        }
    )


def judge_weights(
    recording: Recording,
    # The request, and the other choices of its prompt, by whose computations the first `prompt`
    # rows may be.
    names: Sequence[str],
    tokens: Sequence[int],
    rows: np.ndarray,
    weights: np.ndarray,
    prompt: int,
) -> Counter[str]:
    """How many rows have ids [n, L, K] and weights that experts were handed, bit for bit, by one
    computation."""
    ids_and_weights = np.stack([rows, weights.view(np.int32)], axis=1).astype(np.int32)
    right = np.zeros(len(rows), dtype=np.bool_)
    for name in names:
        count = len(rows) if name == names[0] else prompt
        for position, numbers in enumerate(recording.computations(name, tokens[:count])):
            right[position] |= any(
                np.array_equal(recording.handed[number], ids_and_weights[position])
                for number in numbers
            )
    return Counter({"weights": len(rows), "wrong weights": int((~right).sum())})


def _verdicts(
    recording: Recording, rule: Rule, request: str, tokens: Sequence[int], rows: np.ndarray
) -> np.ndarray:
    """[len(tokens), L] by the best of the computations that the request read; wrong where there is
    none."""
    best = np.full(rows.shape[:2], Verdict.WRONG, dtype=np.int8)
    computations = recording.computations(request, tokens)
    pairs = [
        (position, number) for position, numbers in enumerate(computations) for number in numbers
    ]
    if pairs:
        positions, numbers = zip(*pairs, strict=True)
        scores = np.stack([recording.scores[number] for number in numbers])
        for position, verdict in zip(
            positions, rule.judge(scores, rows[list(positions)]), strict=True
        ):
            if verdict.min() >= best[position].min():
                best[position] = verdict
    return best
