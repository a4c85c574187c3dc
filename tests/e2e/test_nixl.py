"""Prefill and decode in two servers, with vLLM's NIXL connector between them and a proxy in front:
`examples/`.

On a CPU, on a GPU each, or on one. Both engines compute the same, so that nobody could tell the
prefill engine's rows from the decode engine's. So the tests relay some requests themselves, and
make each id of what is handed over another, which must arrive as that.
"""

import base64
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from examples.prefill_decode import CONFIG, ON_CPU, for_prefill
from tests.e2e.changes import Running
from tests.e2e.harness import (
    ASK,
    COMPLETIONS,
    DRAFTS,
    FULL_PRECISION,
    NGRAM,
    ON_GPU,
    ONE_PROCESS,
    ROOT,
    SMALL_KV,
    Answer,
    Oracle,
    Server,
    answer_of,
    answers_of,
    answers_of_stream,
    check,
    free_port,
    prompt_of,
    rows_of,
    wait_until_idle,
)
from tests.e2e.offload_on_cpu import kv_transfer_config

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.release,
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed"),
]

TENSOR = "--tensor-parallel-size 2"
EXPERTS = 16
BLOCK, BLOCKS = 32, 40


def nixl(lease_s: int) -> dict[str, Any]:
    """The connector of an instance, whose KV waits for so long to be pulled."""
    connector = CONFIG | ({} if ON_GPU else ON_CPU)
    extra = {**connector.get("kv_connector_extra_config", {}), "kv_lease_duration": lease_s}
    return {**connector, "kv_connector_extra_config": extra}


def lease(seconds: int) -> tuple[str, str]:
    """For how long KV waits to be pulled."""
    return "--kv-transfer-config", json.dumps(nixl(seconds))


FLAGS = (
    *SMALL_KV,
    "--served-model-name",
    "tiny",
    "--block-size",
    str(BLOCK),
    "--max-model-len",
    "512",
)
FLAGS += ("--max-num-batched-tokens", "64", "--max-num-seqs", "8")
FLAGS += ("--enable-prompt-tokens-details",)
# However busy the machine is. What nobody pulls, as of all choices of a prompt but one, stays as
# long: there is room.
FLAGS += (*lease(180), "--kv-cache-memory-bytes", str(256 << 20))


@dataclass
class Legs:
    """The program of the example: its proxy and both of its servers."""

    proxy: Server
    prefill: Server
    decode: Server

    def first(self, prompt: list[int], **fields: Any) -> dict[str, Any]:
        """The `kv_transfer_params` of the prefill leg's answer."""
        answer = self.prefill.complete(**for_prefill({**ASK, "prompt": prompt, **fields}))
        params: dict[str, Any] = answer["kv_transfer_params"]
        assert "prompt_routed_experts" not in answer  # they are in `params`
        return params

    def first_without_rows(self, prompt: list[int]) -> dict[str, Any]:
        params = self.first(prompt)
        del params["routed_experts"]
        return params

    def second(
        self,
        prompt: list[int],
        max_tokens: int,
        params: dict[str, Any] | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """The decode leg's answer."""
        body = {**ASK, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **fields}
        return self.decode.complete(**body, **({"kv_transfer_params": params} if params else {}))

    def through_both(self, prompt: list[int], max_tokens: int = 9, seed: int = 0) -> Answer:
        """The answer to rows that were made others, with the ids that they had."""
        answer = answer_of(self.second(prompt, max_tokens, tagged(self.first(prompt), seed)))
        return untagged(answer, slice(0, len(prompt) - 1), seed)

    def suspended(self, leg: Server) -> list[psutil.Process]:
        """The processes of a server, stopped."""
        started = psutil.Process(self.proxy.process.pid).children()
        port = leg.url.rpartition(":")[2]
        (parent,) = (
            one for one in started if one.cmdline()[one.cmdline().index("--port") + 1] == port
        )
        everyone = [parent, *parent.children(recursive=True)]
        for process in everyone:
            process.suspend()
        return everyone

    def nothing_is_left(self) -> None:
        for server in (self.prefill, self.decode):
            wait_until_idle(server)


def devices(flags: Sequence[str]) -> tuple[str, str]:
    """The first GPUs and the last, one for each tensor-parallel rank of prefill and decode. If few,
    they share some."""
    gpus = [str(gpu) for gpu in range(torch.cuda.device_count())]
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    prefill, decode = (
        2 if (leg, TENSOR) in pairwise(flags) else 1 for leg in ("--prefill", "--decode")
    )
    return ",".join(gpus[:prefill]), ",".join(gpus[-decode:])


@contextmanager
def running(model: Path, log: Path, *flags: str) -> Iterator[Legs]:
    # of the instances, and where they tell each other of their KV
    port = free_port(1, 2, 1001, 1002)
    command = [
        sys.executable,
        "examples/prefill_decode.py",
        str(model),
        "--port",
        str(port),
        *FLAGS,
        *flags,
    ]
    command += (
        ["--devices", *devices(flags)]
        if ON_GPU
        else ["--worker-extension-cls", "tests.e2e.nixl_on_cpu.Patient"]
    )
    command += () if TENSOR in flags else ONE_PROCESS
    env = {**os.environ, **FULL_PRECISION}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True, env=env
        )
    legs = Legs(*(Server(model, f"http://127.0.0.1:{port + at}", process, log) for at in range(3)))
    try:
        legs.proxy.wait_until_healthy()
        yield legs
    finally:
        if process.poll() is None:
            process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def legs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Legs]:
    with running(tiny_model, tmp_path_factory.mktemp("legs") / "log") as legs:
        yield legs


def _tags(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, EXPERTS, (count, 1, 1))


def tagged(params: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    """The same with other ids, which say of each row which hand-over (`seed`) and which position it
    is of."""
    handed = params["routed_experts"]
    ids = np.frombuffer(base64.b64decode(handed["data"]), handed["dtype"]).reshape(handed["shape"])
    ids = (ids + _tags(seed, len(ids))) % EXPERTS
    data = base64.b64encode(ids.astype(handed["dtype"]).tobytes()).decode()
    return {**params, "routed_experts": {**handed, "data": data}}


def untagged(answer: Answer, positions: slice, seed: int = 0) -> Answer:
    """An answer whose rows at `positions` are of the hand-over `seed`, with the ids that they
    had."""
    rows = rows_of(answer)
    rows[positions] = (rows[positions] - _tags(seed, len(rows))[positions]) % EXPERTS
    p = len(answer.prompt)
    return Answer(answer.prompt, answer.tokens, 0, rows[:p], rows[p:])


@pytest.mark.parametrize("length", [31, 32, 170])
def test_rows_go_with_the_kv(legs: Legs, oracle: Oracle, length: int) -> None:
    """Those of all that is pulled are those that were handed over, whatever they are; from the last
    token of the prompt on, they are the decode engine's."""
    prompt = prompt_of(length, seed=length)
    params = tagged(legs.first(prompt), seed=length)
    answer = answer_of(legs.second(prompt, 9, params))
    check(untagged(answer, slice(0, length - 1), seed=length), oracle)


def test_kv_of_a_shorter_prompt_is_not_pulled(legs: Legs, oracle: Oracle) -> None:
    """NIXL's worker would end the engine: it needs more blocks, whatever number of tokens is
    given."""
    for seed, said in enumerate(({}, {"remote_num_tokens": None}, {"remote_num_tokens": 1000000})):
        params = {**legs.first_without_rows(prompt_of(40, seed=987)), **said}
        check(answer_of(legs.second(prompt_of(150, seed=980 + seed), 4, params)), oracle)


def test_a_prefill_leg_with_blocks_to_read_does_not_wait(legs: Legs, oracle: Oracle) -> None:
    """vLLM alone waits for KV that nobody fetches."""
    prompt = prompt_of(40, seed=700)
    params = {
        **legs.first_without_rows(prompt),
        "do_remote_prefill": False,
        "do_remote_decode": True,
    }
    inline = {"routed_experts_delivery": "inline"}  # not only in its kv_transfer_params
    check(answer_of(legs.second(prompt, 4, params, **inline)), oracle)


# ---- Through a proxy, as clients see it ----


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("n", "start"), [(1, 0), (2, 40)])
def test_completions(legs: Legs, oracle: Oracle, stream: bool, start: int, n: int) -> None:
    body = {
        "prompt": prompt_of(100, seed=800 + stream + start + n),
        "max_tokens": 12,
        "ignore_eos": True,
        "n": n,
    }
    body |= {**ASK, "routed_experts_prompt_start": start, "temperature": n - 1}
    answers = (
        answers_of_stream(legs.proxy.stream(**body), start, n)
        if stream
        else answers_of(legs.proxy.complete(**body), start)
    )
    assert len(answers) == n
    for answer in answers:
        check(answer, oracle)


# ---- A prefill server that dies; the last test of these servers ----


def test_a_prefill_server_that_dies_during_the_pull(legs: Legs, oracle: Oracle) -> None:
    # It is stopped first, so that the pull begins, and usually fails: then no row that was handed
    # over is left. Or UCX has read the KV without it, and reports that once it has died: then the
    # rows that were handed over are right.
    legs.nothing_is_left()
    prompts = [prompt_of(110, seed=994), prompt_of(90, seed=995)]
    during, before = (tagged(legs.first(prompt)) for prompt in prompts)
    everyone = legs.suspended(legs.prefill)
    running = Running(legs.decode, 0, 6, prompt=prompts[0], kv_transfer_params=during)
    time.sleep(1)  # clock: in which a pull may begin; both outcomes are right
    assert running.num_tokens == 0
    for process in everyone:
        process.kill()
    answer = running.answer()
    pulled = untagged(answer, slice(0, len(prompts[0]) - 1))
    was_pulled = oracle.wrong(pulled.prompt_rows, prompts[0]) == []
    check(pulled if was_pulled else answer, oracle)
    check(answer_of(legs.second(prompts[1], 6, before)), oracle)
    wait_until_idle(legs.decode)
    with legs.proxy.client() as client:
        response = client.post(COMPLETIONS, json={"prompt": [1, 2, 3]})
    assert (response.status_code, response.json()["error"]["code"]) == (502, 502)


# ---- Instances that are not alike ----


def beside_offloading(nixl_first: bool) -> tuple[str, ...]:
    """Both servers offload too; the first connector that has KV loads it."""
    children = [nixl(180), kv_transfer_config(128 << 20)]  # for all that is computed here
    connectors = {"connectors": children if nixl_first else children[::-1]}
    config = {**CONFIG, "kv_connector": "MultiConnector", "kv_connector_extra_config": connectors}
    return "--num-gpu-blocks-override", str(BLOCKS), "--kv-transfer-config", json.dumps(config)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(beside_offloading(nixl_first=True), id="NIXL, then offloading"),
        pytest.param(beside_offloading(nixl_first=False), id="offloading, then NIXL"),
        pytest.param(("--speculative-config", json.dumps(NGRAM)), id="n-gram drafts"),
        pytest.param(("--decode", TENSOR), id="tensor parallel 1 to 2"),
        pytest.param(("--prefill", TENSOR), id="tensor parallel 2 to 1"),
    ],
)
def test_other_instances(
    tiny_model: Path, tmp_path: Path, oracle: Oracle, flags: tuple[str, ...]
) -> None:
    with running(tiny_model, tmp_path / "log", *flags) as legs:
        for length in (5, 32, 33, 170):
            check(
                legs.through_both((prompt_of(5, seed=960 + length) * length)[:length], 60), oracle
            )
        bodies = [
            {"prompt": prompt_of(7, seed=970 + i) * (i + 1), "max_tokens": 40, **ASK}
            for i in range(8)
        ]
        with ThreadPoolExecutor(len(bodies)) as threads:
            for chunks in threads.map(
                lambda body: legs.proxy.stream(**body, ignore_eos=True), bodies
            ):
                check(answer_of(chunks), oracle)
        if "--num-gpu-blocks-override" in flags:
            # other prompts take the blocks of what was pulled
            for seed in range(2 * BLOCKS * BLOCK // 400):
                legs.decode.complete(prompt=prompt_of(400, seed=10_000 + seed), max_tokens=1)
            again = answer_of(legs.second(prompt := (prompt_of(5, seed=1130) * 170)[:170], 9))
            check(untagged(again, slice(0, len(prompt) // BLOCK * BLOCK)), oracle)
            assert (
                legs.decode.metric("vllm:prompt_tokens_cached_by_source_total", source="host") > 0
            )
        if "--speculative-config" in flags:
            drafted, accepted = (legs.decode.metric(name) for name in DRAFTS)
            assert 0 < accepted < drafted
        legs.nothing_is_left()


@pytest.mark.long
def test_pulls_after_the_lease(tiny_model: Path, tmp_path: Path, oracle: Oracle) -> None:
    """The prefill server waits a few seconds only: other prompts have a prompt's blocks by the time
    of its decode leg; of another, the server is stopped during the pull, and does not see
    heartbeats."""
    flags = (*lease(6), "--kv-cache-memory-bytes", str(4 << 20))
    with running(tiny_model, tmp_path / "log", *flags) as legs:
        prompt = prompt_of(170, seed=980)
        params = tagged(legs.first(prompt))
        time.sleep(8)  # clock: longer than the lease, which is vLLM's
        for seed in range(60):
            legs.prefill.complete(prompt=prompt_of(400, seed=2000 + seed), max_tokens=1)
        check(answer_of(legs.second(prompt, 9, params)), oracle)
        check(legs.through_both(prompt_of(170, seed=981)), oracle)
        prompt = prompt_of(170, seed=982)
        params = tagged(legs.first(prompt))
        everyone = legs.suspended(legs.prefill)
        pulling = Running(legs.decode, 0, 9, prompt=prompt, kv_transfer_params=params)
        time.sleep(8)  # clock: longer than the lease, which is vLLM's
        assert pulling.num_tokens == 0
        for process in everyone:
            process.resume()
        check(pulling.answer(), oracle)
        assert "its pull outlived the lease" in legs.proxy.log.read_text()
