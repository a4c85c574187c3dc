"""The capture inside vLLM's worker and scheduler. The only files that import vLLM's engine internals.

Written against vLLM 0.32.0. `config` decides what is refused, `worker` and `scheduler` are what vLLM is given.
"""
