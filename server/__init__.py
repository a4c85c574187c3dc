"""The API process and the command line.

Packages: `http` (the server), `outputs` (rows of running requests), `inprocess` (engines in
programs), `cli`, `tools` (saved responses), `page`. `vllm_api` imports the unstable names of vLLM
for them.
"""

PLUGIN_GROUP = "vllm.endpoint_plugins"
PLUGIN_NAME = "routed_experts"
GO_BACK = (
    f"To get vLLM's own capture, set VLLM_PLUGINS to the plugins to load, without {PLUGIN_NAME}."
)
MAX_RESPONSE_BYTES = 1 << 30
"""Default maximum of routing bytes in one response."""
