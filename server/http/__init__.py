"""The HTTP server: routes, request fields, responses, streams, metrics, the self-test at start, and
stopping.

vLLM's API process loads it through `entry_point`. Nothing here reads saved responses or command
lines.
"""
