"""The wire format: `protocol.codec` needs only numpy, `protocol.models` needs pydantic."""
