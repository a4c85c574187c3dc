"""The wire format: `routed_experts.protocol.codec` needs only numpy, `routed_experts.protocol.models` needs pydantic."""
