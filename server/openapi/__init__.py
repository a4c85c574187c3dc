"""Writes `openapi.yaml` and `docs/http.md` from the routes of the server. A tool of the repository."""
