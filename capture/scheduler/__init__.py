"""The engine core, one process a data-parallel rank: the rows of all tokens whose KV is there, and
which of them each request is sent."""
