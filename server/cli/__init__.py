"""The command `routed-experts`: `serve`, and tools for saved responses.

No other package imports this one. Modules that need vLLM, torch or transformers are imported when their command runs.
A command that cannot run raises `CommandError`; a response that is not one raises `RoutingError`.
"""
