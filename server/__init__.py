"""What runs in the API process."""

PLUGIN_GROUP = "vllm.endpoint_plugins"
PLUGIN_NAME = "routed_experts"
MAX_RESPONSE_BYTES = 1 << 30
"""Most bytes of routing in one answer, unless the command line says otherwise."""
