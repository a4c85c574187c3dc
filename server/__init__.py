"""What runs in the API process."""

PLUGIN_GROUP = "vllm.endpoint_plugins"
PLUGIN_NAME = "routed_experts"
