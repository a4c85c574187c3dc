"""The only files that import vLLM's engine internals. Written against vLLM 0.32.0."""
