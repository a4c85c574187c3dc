"""What a request asks for: its routing fields and its routing as an input."""
