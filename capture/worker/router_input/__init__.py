"""Routing as an input: makes the routers of a worker route tokens as their requests say.

A router routes every token by itself, as always. Then the ids and weights of those tokens are
rewritten in place whose requests say something, so all others are the router's own work, bit for
bit.

At start, `refusals` refuses layers where that is not possible, `family` says how each router makes
weights of logits, and `rewriting` puts itself behind the router: `formula` on CPUs, `kernel` on
GPUs. Before each step, `filling` passes the batch to `tables`, which hold what its tokens are told.
"""
