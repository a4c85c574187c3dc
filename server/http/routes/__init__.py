"""The routes, and their description."""
