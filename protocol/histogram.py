"""The former name of `routed_experts.protocol.expert_load`; gone in 0.3."""

import warnings

from routed_experts.protocol.expert_load import *  # noqa: F403

warnings.warn(
    "routed_experts.protocol.histogram is now routed_experts.protocol.expert_load", DeprecationWarning, stacklevel=2
)
