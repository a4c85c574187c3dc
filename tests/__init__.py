import os

# The tiny model has no use for more threads, and those of two engines on the same cores would spin
# for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
