"""What runs in the API process, and the command line.

Rooms: `http` (the server), `outputs` (rows of requests under way), `inprocess` (engines that programs build), `cli`,
`page`, `openapi`. `vllm_api` is the only module here that imports names of vLLM's that are not stable.
"""

PLUGIN_GROUP = "vllm.endpoint_plugins"
PLUGIN_NAME = "routed_experts"
GO_BACK = f"For vLLM's own capture, set VLLM_PLUGINS to the plugins to load, without {PLUGIN_NAME}."
MAX_RESPONSE_BYTES = 1 << 30
"""Most bytes of routing in one answer, unless the command line says otherwise."""
