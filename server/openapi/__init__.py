"""The description of the API: `schemas` is what the routes declare, `examples` shows them, `spec` writes the file."""
