"""KV that this engine did not compute: offloaded, stored, or pulled from a prefill instance, and the rows with it.

What vLLM's connectors do, and what may stand in `kv_transfer_params`, is known here and nowhere else.
"""
