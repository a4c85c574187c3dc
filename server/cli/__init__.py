"""The command `routed-experts`: `serve`, and tools for saved responses.

No other package imports this one. Modules that need vLLM, torch or transformers are imported when their command runs.
"""
