"""The command `routed-experts`: `serve`, `tiny-model`, and what all commands say on the console.

Modules that need vLLM, torch or transformers are imported when their command runs. A command that
cannot run raises `CommandError`.
"""
