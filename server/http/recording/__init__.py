"""Routing of all requests, written to files."""
