"""What differs between the supported versions of vLLM; all other code is written for the newest.

A seam looks at what vLLM has, never at its version. `engine` and `arguments` are for every engine, `cpu_kernels` for
CPUs, `http` for servers. `tests/contract/test_versions.py` lists them, and fails when the oldest supported version no
longer needs one: then delete it.
"""
