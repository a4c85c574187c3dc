"""What differs between the supported versions of vLLM; all other code is written for the newest.

A seam looks at what vLLM has, never at its version. `engine`, `aux_output` and `arguments` are for every
engine, `cpu_kernels` for CPUs; those of servers are in `server/http/seams.py`. `required` lists
what would not be missed by itself. `tests/contract/test_versions.py` lists the seams, and fails
when the oldest supported version no longer needs one: then delete it.
"""
