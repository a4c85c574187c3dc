"""What rows cost where KV is offloaded and loaded again: vLLM's real scheduler and
`OffloadingConnector`, and no model.

A model's steps and the copies of KV are played, as in `scheduler`: a copy is done one step after it
was asked for.
"""

import argparse
from dataclasses import dataclass
from statistics import median

from tqdm import tqdm
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from bench.scheduler import BLOCK, NUM_BLOCKS, Steps, engine_config, prompt_of

_CHUNK_BYTES = 4096  # to which vLLM rounds the one layer that the scheduler is told of


class OffloadingSteps(Steps):
    """With a connector that offloads."""

    def __init__(
        self, chunks: int, is_captured: bool, num_layers: int = 48, top_k: int = 8
    ) -> None:
        extra = {"cpu_bytes_to_use": chunks * _CHUNK_BYTES}
        connector = KVTransferConfig(
            kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra
        )
        super().__init__(
            num_layers, top_k, config=engine_config(is_captured, kv_transfer_config=connector)
        )
        self._underway: list[tuple[int, str | None]] = []  # jobs, and the request that waits for it
        self.num_loaded = self.num_stored = 0  # tokens

    def _run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        metadata = step.kv_connector_metadata
        done, self._underway = self._underway, []
        now = metadata.jobs_to_flush or ()
        for job_id, job in metadata.load_jobs.items():
            self._underway.append((job_id, job.req_id))
            self.num_loaded += len(job.dst_spec.block_ids) * BLOCK
        for job_id, job in metadata.store_jobs.items():
            (done if job_id in now else self._underway).append((job_id, None))
            self.num_stored += len(job.src_spec.block_ids) * BLOCK
        output = super()._run(step)
        if done:
            output.kv_connector_output = KVConnectorOutput(
                finished_recving={request_id for _, request_id in done if request_id is not None},
                kv_connector_worker_meta=OffloadingWorkerMetadata(
                    {job_id: 1 for job_id, _ in done}
                ),
            )
        return output


@dataclass
class Play:
    """What a mix took: steps, CPU seconds of the scheduler's thread, and tokens that were loaded
    and stored."""

    steps: int
    cpu_seconds: float
    num_loaded: int
    num_stored: int

    def seconds(self, forward_s: float) -> float:
        """With a forward pass that takes so long."""
        return self.cpu_seconds + self.steps * forward_s


def play(
    is_captured: bool,
    asks: bool,
    prompts: int = 128,
    length: int = 2048,
    rounds: int = 3,
    at_once: int = 32,
) -> Play:
    """A few rounds over prompts that the KV cache has no space for: each is loaded in every round
    but the first.

    That one is not counted.
    """
    made = OffloadingSteps(prompts * (length // BLOCK + 1), is_captured)
    assert prompts * length > NUM_BLOCKS * BLOCK, "they all fit into the KV cache"
    texts = [prompt_of(length, seed) for seed in range(prompts)]
    total = Play(0, 0.0, 0, 0)
    for turn in range(rounds + 1):
        if turn == 1:
            loaded, stored = made.num_loaded, made.num_stored
        waiting = list(texts)
        while waiting or made.scheduler.requests:
            while waiting and len(made.scheduler.requests) < at_once:
                made.add([*waiting.pop(0), turn], 16, asks)
            step = made.step()
            if turn:
                total.steps += 1
                total.cpu_seconds += step.cpu_seconds
    total.num_loaded, total.num_stored = made.num_loaded - loaded, made.num_stored - stored
    return total


VARIANTS = {
    "off": (False, False),
    "captured, not asked for": (True, False),
    "returned": (True, True),
}


def reload_table(repeats: int = 5, forward_s: float = 0.02, **mix: int) -> str:
    """Markdown: a mix of reloads with and without the capture, the variants in turns."""
    plays: dict[str, list[Play]] = {name: [] for name in VARIANTS}
    for repeat in tqdm(range(repeats), desc="reloads", unit=" turns", disable=None):
        order = list(VARIANTS.items())
        for name, (is_captured, asks) in order if repeat % 2 == 0 else order[::-1]:
            plays[name].append(play(is_captured, asks, **mix))
    head = (
        "",
        "steps",
        "tokens loaded",
        "CPU time of the scheduler's thread",
        "a step",
        "throughput to off",
    )
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    base = median(run.seconds(forward_s) for run in plays["off"])
    for name, made in plays.items():
        cpu_seconds, first = median(run.cpu_seconds for run in made), made[0]
        ratio = base / median(run.seconds(forward_s) for run in made) - 1
        cells = [name, f"{first.steps:,}", f"{first.num_loaded:,}", f"{cpu_seconds:.2f} s"]
        cells += [
            f"{1e3 * cpu_seconds / first.steps:.2f} ms",
            f"{100 * ratio:+.2f} %" if name != "off" else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(reload_table())


if __name__ == "__main__":
    main()
