"""What is decided at start: the supported versions, the configurations that are refused, the KV
connectors that are known, and the classes that vLLM is given."""
