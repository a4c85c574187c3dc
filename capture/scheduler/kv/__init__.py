"""Rows of KV that a connector loads: from offloading, a store, or a prefill instance.

Only this package depends on the behaviour of vLLM's connectors and on the fields of
`kv_transfer_params`.
"""
