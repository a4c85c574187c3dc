"""Rows of requests under way in the process that has vLLM's output processor: buffered, as arrays, or handed over.

Used by the HTTP server and by engines in programs alike: nothing here knows of HTTP.
"""
