"""The worker, one process a GPU: what the routers choose, from the device to the host."""
