"""The command `routed-experts`: `serve`, and tools for saved responses.

Nothing else imports this package. What needs vLLM, torch or transformers is imported when its command runs.
"""
