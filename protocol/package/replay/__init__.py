"""Hands rows to a trainer's routers: `replayed` to those of transformers in a loop of one's own,
`TokenReplay` in a trainer that calls the model by itself, `MegatronReplay` to Megatron-core's.

Needs torch (the extra `torch`). A replayed router takes the experts of the rows instead of its own
top k. Its weights are those that it computes for these experts from its own scores, so gradients
reach it. Where a row has a -1, it chooses by itself.
"""

from routed_experts.replay.block import Replay, replayed
from routed_experts.replay.errors import ReplayError
from routed_experts.replay.megatron import MegatronReplay
from routed_experts.replay.token_replay import TokenReplay

__all__ = ["MegatronReplay", "Replay", "ReplayError", "TokenReplay", "replayed"]
