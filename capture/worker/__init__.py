"""The worker, one process a GPU: what the routers choose, from the device to the host.

At start, `moe_layers` finds the MoE layers, `refusals` and `weights` refuse those that cannot be
captured, and `binding` makes the others write into the device cache, with sinks of the `capturer`,
which take this rank's tokens (`token_slices`); `router_input` puts itself behind their routers where
requests may set experts. In each step, `v1` or `v2` passes the batch to the `pipeline`; `stage`
merges the rows of pipeline stages and tensor-parallel ranks. `worker` has the classes that vLLM is
given.
"""
