"""The capture inside vLLM's worker and scheduler. The only files that import vLLM's engine internals.

Written for the newest vLLM; `capture.seams` adapts older ones. `config` refuses configurations; `worker` and
`scheduler` have the classes that vLLM instantiates.
"""
