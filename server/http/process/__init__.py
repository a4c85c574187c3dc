"""The start of the API process, and its self-test."""
