"""Rows of running requests in the process with vLLM's output processor: buffers, arrays, hand-over
between instances.

The HTTP server and engines in programs use it; nothing here depends on HTTP.
"""
