"""What both ends of the wire share: the forms of rows, the request's fields, and what clients do
with responses.

Imports numpy and msgspec; `models` also needs pydantic. Nothing here knows vLLM.
"""
