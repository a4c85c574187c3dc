"""Engines that programs build themselves: vLLM's `enable_return_routed_experts` means this capture
there.

vLLM loads `plugin` into each of its processes, so it imports nothing of an engine until a program
asks.
"""
