"""The wire format: `codec` needs numpy only, `models` needs pydantic."""
