"""What rows would take as one more layer of the KV cache, in place of `kv_transfer_params`.

NIXL's pull of a prompt's KV with that layer and without, and what puts rows there and takes them out. Two agents of
NIXL in two processes, a GPU each, or on a CPU; the 48 layers of Qwen3-30B-A3B, of 2 KiB for each token, and rows of 768
bytes.
"""

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.http_table import commit_and_device, described
from bench.long_answers import K, L

STEPS = (256, 8192)
BLOCK = 16
KV_BYTES = 2 * 4 * 128 * 2  # of a token in a layer: keys and values of 4 heads of 128 numbers of 16 bits
ROW_BYTES = L * K * 2


class Instance:
    """One side's KV cache, with a layer of rows behind the others, and its agent."""

    def __init__(self, name: str, device: str, tokens: int, value: int) -> None:
        from nixl._api import nixl_agent, nixl_agent_config  # where it is installed

        self.blocks = tokens // BLOCK
        sizes = [KV_BYTES] * L + [ROW_BYTES]
        self.layers = [
            torch.full((self.blocks, BLOCK * size), value, dtype=torch.uint8, device=device) for size in sizes
        ]
        self.agent = nixl_agent(name, nixl_agent_config())
        gpu = self.layers[0].device.index or 0
        self.kind = "VRAM" if device.startswith("cuda") else "DRAM"
        memory = [(layer.data_ptr(), layer.nbytes, gpu, "") for layer in self.layers]
        self.agent.register_memory(self.agent.get_reg_descs(memory, self.kind))
        self.described = [
            (layer.data_ptr() + block * layer.shape[1], layer.shape[1], gpu)
            for layer in self.layers
            for block in range(self.blocks)
        ]

    def ids(self, blocks: np.ndarray, num_layers: int) -> np.ndarray:
        """Of these blocks in so many layers, among all that are described."""
        return (np.arange(num_layers)[:, None] * self.blocks + blocks).reshape(-1)


def prefill(device: str, tokens: int, pipe: Connection) -> None:
    instance = Instance("prefill", device, tokens, value=7)
    pipe.send((instance.agent.get_agent_metadata(), instance.described))
    pipe.recv()


def pulls(decode: Instance, metadata: bytes, described_there: list[Any], prompts: Sequence[int], repeats: int) -> None:
    agent = decode.agent
    other = agent.add_remote_agent(metadata)
    here = agent.prep_xfer_dlist("NIXL_INIT_AGENT", agent.get_xfer_descs(decode.described, decode.kind))
    there = agent.prep_xfer_dlist(other, agent.get_xfer_descs(described_there, decode.kind))
    dice = np.random.default_rng(0)

    def pull(tokens: int, num_layers: int) -> float:
        """Milliseconds."""
        mine, theirs = (dice.permutation(decode.blocks)[: tokens // BLOCK] for _ in range(2))
        began = time.perf_counter()
        ids = decode.ids(mine, num_layers), decode.ids(theirs, num_layers)
        handle = agent.make_prepped_xfer("READ", here, ids[0], there, ids[1])
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        took = 1e3 * (time.perf_counter() - began)
        assert state == "DONE"
        assert (decode.layers[num_layers - 1][torch.from_numpy(mine)] == 7).all(), "it did not arrive"
        agent.release_xfer_handle(handle)
        return took

    print("| a pull of | KV alone | even turns to odd | with rows | to KV alone |\n| --- | --- | --- | --- | --- |")
    for tokens in prompts:
        pull(tokens, L)
        alone, both = [], []
        for repeat in range(repeats):
            for times, num_layers in ((alone, L), (both, L + 1))[:: -1 if repeat % 2 else 1]:
                times.append(pull(tokens, num_layers))
        noise, more = median(alone[::2]) - median(alone[1::2]), median(both) - median(alone)
        print(f"| {tokens:,} tokens | {median(alone):.2f} ms | {noise:+.2f} | {median(both):.2f} | {more:+.2f} ms |")


def copies(decode: Instance, counts: Sequence[int], repeats: int) -> None:
    device = decode.layers[0].device
    layer = decode.layers[-1].view(-1, ROW_BYTES)

    def milliseconds(work: Callable[[], Any]) -> float:
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(1e3 * (time.perf_counter() - began))
        return median(times)

    def put(rows: torch.Tensor, slots: torch.Tensor) -> None:
        layer.index_copy_(0, slots, rows)

    def take(host: torch.Tensor, slots: torch.Tensor) -> None:
        host.copy_(layer.index_select(0, slots), non_blocking=True)

    print("\n| rows | put there | taken to the host |\n| --- | --- | --- |")
    for tokens in counts:
        rows = torch.zeros((tokens, ROW_BYTES), dtype=torch.uint8, device=device)
        slots = torch.randperm(len(layer), device=device)[:tokens]
        host = torch.empty(rows.shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
        times = milliseconds(partial(put, rows, slots)), milliseconds(partial(take, host, slots))
        print(f"| {tokens:,} | {times[0]:.2f} ms | {times[1]:.2f} ms |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--prompts", nargs="+", type=int, default=[1536, 16384], metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=31)
    args = parser.parse_args()
    if args.device == "cpu":
        os.environ.setdefault("UCX_TLS", "tcp,self,sm")
    print(described(commit_and_device(args.device, None)), flush=True)
    devices = ["cuda:0", "cuda:1"] if args.device == "cuda" else ["cpu", "cpu"]
    context = multiprocessing.get_context("spawn")
    pipe, far = context.Pipe()
    tokens = max(args.prompts)
    process = context.Process(target=prefill, args=(devices[0], tokens, far), daemon=True)
    process.start()
    decode = Instance("decode", devices[1], tokens, value=0)
    pulls(decode, *pipe.recv(), args.prompts, args.repeats)
    copies(decode, sorted({*(step for step in STEPS if step < tokens), *args.prompts}), args.repeats)
    pipe.send(None)
    process.join(30)


if __name__ == "__main__":
    main()
