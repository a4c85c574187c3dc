"""Rows of KV that a KV connector loads: from offloading, a store, or a prefill instance.

`tracker` follows what vLLM asks and tells a KV connector. `children` has a class for each kind of
KV connector: what it may load, and which rows come with it. `blocks` knows which blocks lack rows,
`loads` what a load does to the host cache, `offloading` and `pulls` where rows of loaded KV are
from.

Only this package depends on the behaviour of vLLM's KV connectors and on the fields of
`kv_transfer_params`.
"""
