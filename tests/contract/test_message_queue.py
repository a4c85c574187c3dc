"""vLLM's queue of messages to its workers, in shared memory: what a request gives stays as it is
there.

Arrays of a megabyte and more are beside the message. vLLM copies them off the ring, which the next
messages overwrite.
"""

from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np
import pytest
from vllm.distributed.device_communicators.shm_broadcast import Handle, MessageQueue

from routed_experts.protocol.routing_input import EncodedInput, RoutingInput

L, K = 8, 64  # a row of 1 KiB
CHUNK_BYTES = 16 << 20
"""As vLLM's executor has it; longer messages go through a socket."""
NUM_CHUNKS = 2
NUM_ROWS = (512, 1024, 4096, 16_000, 20_000)  # in the message, three beside it, through the socket
NUM_MESSAGES = 5 * len(NUM_ROWS)
TIMEOUT_S = 120.0


def message_of(number: int) -> EncodedInput:
    """What the message with this number has."""
    num_rows = NUM_ROWS[number % len(NUM_ROWS)]
    first = np.random.default_rng(number).integers(0, 1000, (num_rows, L, 1), dtype=np.int16)
    return RoutingInput(rows=first + np.arange(K, dtype=np.int16)).encode()


def keep_all(handle: Handle, answers: Connection) -> None:
    """A worker that keeps every message, and says at the end which of them are not what was sent."""
    messages = MessageQueue.create_from_handle(handle, 0)
    messages.wait_until_ready()
    kept = [messages.dequeue(TIMEOUT_S) for _ in range(NUM_MESSAGES)]
    answers.send([number for number, said in enumerate(kept) if said != message_of(number)])


@pytest.mark.release
def test_what_a_request_gives_outlives_the_ring_of_messages() -> None:
    messages = MessageQueue(1, 1, max_chunk_bytes=CHUNK_BYTES, max_chunks=NUM_CHUNKS)
    context = get_context("spawn")
    answers, of_worker = context.Pipe(duplex=False)
    worker = context.Process(target=keep_all, args=(messages.export_handle(), of_worker))
    worker.start()
    try:
        messages.wait_until_ready()
        for number in range(NUM_MESSAGES):
            messages.enqueue(message_of(number), TIMEOUT_S)
        assert answers.poll(TIMEOUT_S)
        assert answers.recv() == []
    finally:
        worker.kill()
        worker.join()
