"""Situations that need engines of other configurations than the shared one: a server each, with as
much as fits on it.

Every answer is checked against the oracle, and no server may hold state when its tests are done.
"""

import re
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

from routed_experts.protocol.codec import decode
from routed_experts.protocol.fetch import fetch
from routed_experts.protocol.routing import Routing
from routed_experts.protocol.saved import ModelInfo, read
from routed_experts.server.http.process.selftest import SelfTestError
from routed_experts.server.tools.saved import opened
from tests.contract.served import serving_weights
from tests.documentation import run_by
from tests.e2e.harness import (
    ASK,
    COMPLETIONS,
    ON_GPU,
    SMALL_KV,
    Oracle,
    Server,
    check_mix,
    one,
    prompt_of,
    run_program,
    serving,
    wait_until,
    wait_until_idle,
)

pytestmark = pytest.mark.e2e

# 23 blocks for 16 requests, of which one alone may take 16.
TINY_KV = (
    *SMALL_KV,
    "--block-size",
    "32",
    "--num-gpu-blocks-override",
    "24",
    "--max-model-len",
    "512",
)
TINY_KV += ("--max-num-seqs", "16", "--enable-prompt-tokens-details")
RECORDS = "tests/e2e/test_situations.py::test_what_two_api_servers_recorded"


def check_at_rest(server: Server) -> None:
    """It holds no request state and has logged no error, which vLLM may when it ends."""
    for _ in range(8):  # whichever API process answers
        wait_until_idle(server)
    assert server.errors() == []


@pytest.fixture(scope="module")
def in_processes(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two API processes that record, and where no GPU is needed for each, two tensor-parallel
    ranks."""
    folder = tmp_path_factory.mktemp("processes")
    _, _, _, *recording = shlex.split(
        run_by(RECORDS)[0].splitlines()[0].replace("FOLDER", str(folder / "recorded"))
    )
    flags = ("--api-server-count", "2", *(() if ON_GPU else ("-tp", "2")), *recording)
    # no forks: what one process puts in place, the others must have by themselves
    with serving(tiny_model, folder / "log", *TINY_KV, *flags, as_users_do=True) as server:
        yield server


@pytest.mark.release
@pytest.mark.skipif(ON_GPU, reason="needs a GPU for each rank")
def test_tensor_parallel(in_processes: Server, oracle: Oracle) -> None:
    assert sum("Worker_TP" in line for line in set(in_processes.log.read_text().split())) >= 2
    check_mix(in_processes, oracle, 800)


def _at_rest(server: Server, metric: str, least: float = 0) -> float:
    """Once it does not change, and is so much: one of the API processes has the engine's numbers,
    and may be behind."""
    wait_until(
        lambda: server.metric(metric) >= least,
        lambda: f"{metric}: {server.metric(metric)}, not {least}",
    )
    seen = [server.metric(metric)]
    while len(seen) < 9 or len(set(seen[-9:])) > 1:
        time.sleep(0.5)
        seen.append(server.metric(metric))
    return seen[-1]


@pytest.mark.release
def test_two_api_servers(in_processes: Server, oracle: Oracle) -> None:
    """Each API process takes its own requests' rows off the one engine's outputs."""
    server = in_processes
    for seed in (700, 720, 740):
        check_mix(server, oracle, seed)
    captured = _at_rest(server, "routed_experts_rows_captured_total")
    # which a stream counts when it has ended
    returned = server.metric("routed_experts_rows_returned_total")
    for seed in range(750, 762):  # whichever of the two answers
        one(server, prompt=prompt_of(20, seed=seed), max_tokens=4, ignore_eos=True)  # twice
    wait_until_idle(server)
    now = _at_rest(server, "routed_experts_rows_captured_total", captured + 24 * 23)
    assert 24 * 23 <= now - captured <= 24 * 24
    assert server.metric("routed_experts_rows_returned_total") - returned == 24 * (20 + 3)
    body = {
        "model": "tiny",
        **ASK,
        "prompt": prompt_of(30, seed=760),
        "max_tokens": 300,
        "stream": True,
    }
    for _ in range(6):  # clients that leave
        with server.client() as client, client.stream("POST", COMPLETIONS, json=body) as response:
            assert next(response.iter_lines())
    log = server.log.read_text()
    assert "ApiServer_0" in log
    assert "ApiServer_1" in log
    check_at_rest(server)


@pytest.mark.release
def test_each_of_two_api_servers_returns_what_the_other_stored(in_processes: Server) -> None:
    ask = {"prompt": prompt_of(40, seed=770), "max_tokens": 4, **ASK}
    rows = decode(in_processes.complete(**ask)["prompt_routed_experts"])
    for _ in range(6):
        reference = in_processes.complete(**ask, routed_experts_delivery="reference")[
            "prompt_routed_experts"
        ]
        arrays = [fetch(reference, base_url=f"{in_processes.url}/v1") for _ in range(6)]
        assert all(np.array_equal(array.swapaxes(0, 1), rows) for array in arrays)


def _process_of(file: str) -> str:
    """Of a whole file of recorded routing."""
    assert file.endswith(".jsonl")
    return re.split("[-.]", Path(file).name)[1]


def _routings_in(files: list[str]) -> list[Routing]:
    answers = read(opened(files), ModelInfo())
    return [routing for answer in answers for routing in answer.routings()]


def _prompt_of(routing: Routing) -> list[int]:
    return list(routing.prompt_token_ids or ())


@pytest.mark.release
def test_what_two_api_servers_recorded(
    in_processes: Server, oracle: Oracle, documented: list[str]
) -> None:
    """The last test of this server, which ends: each process then has one whole file."""
    server, folder = in_processes, in_processes.log.parent / "recorded"
    prompts = [prompt_of(20, seed=780 + index) for index in range(12)]
    recorded = "routed_experts_recorded_requests_total"
    before = _at_rest(server, recorded)
    for prompt in prompts:
        server.complete(prompt=prompt, max_tokens=4)
    _at_rest(server, recorded, before + 12)  # a server that stops waits for a few seconds only
    server.stop()
    files = sorted(map(str, folder.iterdir()))
    assert len(files) == len({_process_of(file) for file in files}) == 2
    own = [routing for routing in _routings_in(files) if _prompt_of(routing) in prompts]
    assert len(own) == 12
    for routing in own:
        tokens = [*_prompt_of(routing), *(routing.token_ids or ())]
        assert len(tokens) == 24
        assert oracle.wrong(routing.rows, tokens[:-1]) == []
    (block,) = [block for block in documented if "--routed-experts-record" in block]
    export = shlex.split(block.splitlines()[1])[1]
    said = run_program("routed_experts.server.cli", export, *files, "-o", str(folder / "out.npz"))
    assert re.search(r"\d+ responses", said)


@pytest.mark.skipif(ON_GPU, reason="the layers that skip steps there are bound in another way")
def test_a_layer_that_skips_some_steps_is_found_at_start(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that go around their routers in all but small batches, as some kernels do."""
    set_capture_fn = BaseRouter.set_capture_fn

    def set_for_small_batches(router: BaseRouter, capture: Callable[[torch.Tensor], None]) -> None:
        set_capture_fn(router, lambda ids: capture(ids) if len(ids) <= 7 else None)

    monkeypatch.setattr(BaseRouter, "set_capture_fn", set_for_small_batches)
    said = r"MoE layers \[0, 1, 2, 3, 4\] wrote no ids for some tokens"
    with (
        pytest.raises(SelfTestError, match=said),
        serving_weights(tiny_model, *SMALL_KV, "--max-model-len", "512"),
    ):
        pass
