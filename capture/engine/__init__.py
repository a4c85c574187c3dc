"""The capture inside vLLM's worker and scheduler. The only files that import vLLM's engine internals.

Written for the newest vLLM; `capture.seams` serves older ones. `config` decides what is refused, `worker` and
`scheduler` are what vLLM is given.
"""
