"""What runs inside the engine's processes. Only `capture.engine` knows vLLM."""
