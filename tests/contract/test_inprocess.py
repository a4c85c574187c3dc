"""Engines that a program builds itself with `enable_return_routed_experts=True`: vLLM's real `LLM`,
`LLMEngine` and `AsyncLLM`, around the model that does arithmetic."""

import asyncio
import gc
import itertools
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import closing
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
from fastapi import FastAPI
from vllm import LLM, CompletionOutput, RequestOutput, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import BeamSearchParams, RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.llm_engine import LLMEngine

from examples import turns
from routed_experts.capture import SCHEDULER, WORKERS
from routed_experts.capture.engine.classes import is_capturing
from routed_experts.capture.engine.versions import UnsupportedConfig
from routed_experts.capture.scheduler.scheduler import SchedulerCapture
from routed_experts.capture.seams.arguments import vllm_captures
from routed_experts.capture.seams.engine import HAS_AUX_OUTPUTS
from routed_experts.server.http.process import entry_point
from tests import programs
from tests.contract.engine import BLOCK, NUM_BLOCKS, K, no_collections
from tests.contract.served import DECODER_LAYERS, InProcessClient, ServedExecutor, every_layer_of
from tests.e2e.harness import prompt_of

pytestmark = pytest.mark.e2e

DELTA, CUMULATIVE, FINAL = (
    RequestOutputKind.DELTA,
    RequestOutputKind.CUMULATIVE,
    RequestOutputKind.FINAL_ONLY,
)


def arguments(model: Path, **more: Any) -> dict[str, Any]:
    """Of any engine, with so many experts as the arithmetic has."""
    sizes = {
        "block_size": BLOCK,
        "max_model_len": BLOCK * (NUM_BLOCKS - 1),
        "max_num_batched_tokens": 64,
    }
    sizes |= {"kv_cache_memory_bytes": 8 << 20, "enforce_eager": True, "dtype": "float32"}
    args = {
        "model": str(model),
        "distributed_executor_backend": ServedExecutor,
        "enable_return_routed_experts": True,
    }
    args["hf_overrides"] = {"num_experts": 1 << 15, "num_hidden_layers": DECODER_LAYERS}
    return {**sizes, **args, **more}


def check(rows: Any, tokens: list[int], start: int = 0) -> None:
    """`rows` are those of `tokens`, as vLLM's own capture would return them: uint16 above 256
    experts, zeros in layers without experts; and the program may write into them."""
    want = every_layer_of(tokens[:-1], start)
    assert type(rows) is np.ndarray
    assert (rows.dtype, rows.shape) == (np.uint16, want.shape)
    assert rows.flags.c_contiguous
    assert rows.flags.writeable
    assert np.array_equal(rows, want)


def check_finished(output: RequestOutput, start: int = 0) -> None:
    assert output.finished
    for choice in output.outputs:
        check(choice.routed_experts, [*(output.prompt_token_ids or ()), *choice.token_ids], start)


def params(**more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 6, "temperature": 1.0, "ignore_eos": True, **more})


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with no_collections():
        yield


# ---- LLM and LLMEngine, without an engine process ----


@pytest.fixture(scope="module")
def no_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield


@pytest.fixture(scope="module", params=[True, False], ids=["async", "sync"])
def llm(request: pytest.FixtureRequest, no_process: None, tiny_model: Path) -> Iterator[LLM]:
    made = LLM(**arguments(tiny_model, async_scheduling=request.param))
    yield made
    made.llm_engine.engine_core.shutdown()


def prompts_of(*lengths: int) -> list[Any]:
    return [{"prompt_token_ids": prompt_of(length, length)} for length in lengths]


def generate(llm: LLM, prompts: list[Any], sampling: Any, **more: Any) -> list[RequestOutput]:
    """What was generated, whose rows were checked."""
    outputs = llm.generate(prompts, sampling, **{"use_tqdm": False, **more})
    for output in outputs:
        check_finished(output)
    return outputs


def test_turns_of_a_conversation(llm: LLM) -> None:
    """One that continues, another from the same history, and one whose history was rewritten."""
    turn, prompt = partial(turns.turn, llm, max_tokens=8, ignore_eos=True), prompt_of(20, 1)
    first = turn(prompt)
    tokens = [*prompt, *first.token_ids]
    others = [
        [*tokens, *prompt_of(5, 2)],
        [*tokens, *prompt_of(7, 3)],
        [*tokens[:15], tokens[15] ^ 1, *prompt_of(9, 4)],
    ]
    for routing in (first, *(turn(other, first) for other in others)):
        check(routing.rows, [*routing.prompt_token_ids, *routing.token_ids])
        assert len(routing.token_ids) == 8


@pytest.mark.parametrize("options", [{}, {"n": 3}, {"n": 2, "skip_clone": True}])
def test_generate_with_lists_of_prompts(llm: LLM, options: dict[str, Any]) -> None:
    """With `skip_clone` vLLM gives all requests the one object."""
    shared = params(**options)
    for _ in range(2):
        outputs = generate(llm, prompts_of(3, 100, 17, 300), shared)
        assert [len(output.outputs) for output in outputs] == [shared.n] * 4


def test_parameters_of_each_prompt(llm: LLM) -> None:
    prompts = prompts_of(20, 40, 60, 20)
    sampling = [params(routed_experts_prompt_start=start, seed=4) for start in (0, 40, 33, 20)]
    sampling[-1].max_tokens = 1
    for output, one_sampling in zip(
        llm.generate(prompts, sampling, use_tqdm=True), sampling, strict=True
    ):
        check_finished(output, one_sampling.routed_experts_prompt_start)
    assert [one_sampling.extra_args for one_sampling in sampling] == [None] * 4, (
        "the program's own parameters"
    )


def test_the_readme(llm: LLM, monkeypatch: pytest.MonkeyPatch, documented: list[str]) -> None:
    """Its program, with an engine that is there already."""
    (program,) = documented
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr("vllm.LLM", lambda model, **options: calls.append(options) or llm)
    names: dict[str, Any] = {}
    exec(program, names)
    assert calls == [{"enable_return_routed_experts": True}]
    assert names["rows"].shape == (2 + 16 - 1, DECODER_LAYERS, K)
    check(names["rows"][:2].copy(), [39, 72, 0])  # the tiny model's tokens for "Hi"


def test_a_stop_string(llm: LLM) -> None:
    (whole,) = generate(llm, prompts_of(25), params(max_tokens=20))
    (output,) = generate(
        llm, prompts_of(25), params(max_tokens=20, stop=whole.outputs[0].text[7:10])
    )
    assert 7 < len(output.outputs[0].token_ids) < 20


@pytest.mark.skipif(
    HAS_AUX_OUTPUTS, reason="vLLM 0.31 and newer: a model's configuration has no such flag"
)
def test_an_engine_says_that_it_returns_routed_experts(llm: LLM, online: "Online") -> None:
    """Where servers built on vLLM's classes look it up; without it they give out no rows."""
    for engine in (llm, llm.llm_engine, online.engine):
        assert engine.model_config.enable_return_routed_experts
    for engine in (llm.llm_engine, online.engine):
        assert not vllm_captures(engine.vllm_config), "vLLM's own scheduler and worker read that"


def test_beam_search_is_refused(llm: LLM) -> None:
    with pytest.raises(VLLMValidationError, match="cannot be returned with beam search"):
        llm.beam_search(prompts_of(5), BeamSearchParams(beam_width=2, max_tokens=3))


def steps(engine: LLMEngine) -> list[RequestOutput]:
    """All that comes until nothing is left to do."""
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def test_the_engines_own_steps(llm: LLM) -> None:
    """`LLMEngine.add_request` and `step`, with the three kinds of outputs at once."""
    engine = llm.llm_engine
    for kind in (DELTA, CUMULATIVE, FINAL):
        engine.add_request(kind.name, prompts_of(40)[0], params(output_kind=kind, n=2))
    outputs = steps(engine)
    for kind in (DELTA, CUMULATIVE, FINAL):
        check_outputs(
            kind,
            2,
            [output for output in outputs if output.request_id == kind.name],
            prompt_of(40, 40),
        )


def check_outputs(
    kind: RequestOutputKind, n: int, outputs: list[RequestOutput], prompt: list[int]
) -> None:
    """All choices of a request, whose outputs came in this order."""
    for index in range(n):
        parts = [part for output in outputs for part in output.outputs if part.index == index]
        *earlier, last = parts
        assert last.finish_reason is not None
        assert all(part.finish_reason is None for part in earlier)
        if kind == DELTA:
            check_deltas(parts, prompt)
            continue
        check(last.routed_experts, [*prompt, *last.token_ids])
        assert kind == CUMULATIVE or not earlier
        assert all(part.routed_experts is None for part in earlier)


def check_deltas(parts: list[CompletionOutput], prompt: list[int]) -> None:
    """Each has the rows of the tokens that came with it, the first also those of the prompt."""
    tokens = list(prompt)
    end = 0
    for part in parts:
        tokens += part.token_ids
        check(part.routed_experts, tokens, end)
        end = len(tokens) - 1


@pytest.mark.skipif(
    not hasattr(EngineArgs, "aux_output_config"), reason="vLLM 0.30 and older: no such argument"
)
def test_aux_output_config_asks_too(no_process: None, tiny_model: Path) -> None:
    """And an engine after another, in the same process."""
    args = arguments(tiny_model, aux_output_config={"enable_return_routed_experts": True})
    del args["enable_return_routed_experts"]
    engine = LLMEngine.from_engine_args(EngineArgs(**args))
    engine.add_request("r", prompts_of(40)[0], params(output_kind=FINAL))
    check_finished(*steps(engine))
    engine.engine_core.shutdown()


@pytest.mark.skipif(
    not HAS_AUX_OUTPUTS, reason="vLLM 0.30 and older: keeps its engine, without this package too"
)
def test_an_engine_that_is_let_go_ends(no_process: None, tiny_model: Path) -> None:
    """Nothing of ours keeps it: a program that deletes its engine wants its memory back, for the
    next one."""
    made = LLM(**arguments(tiny_model))
    generate(made, prompts_of(5), params())
    executor, ended = made.llm_engine.model_executor, []
    executor.shutdown = lambda: ended.append(True)
    gc.disable()
    try:
        del made
        assert ended == [True]
    finally:
        gc.enable()


# ---- AsyncLLM ----


class Online:
    """An engine, and the event loop that it lives in, and was made in or before."""

    def __init__(self, model: Path, in_loop: bool = True) -> None:
        self._runner = asyncio.Runner()
        make = partial(AsyncLLM.from_engine_args, AsyncEngineArgs(**arguments(model)))

        async def make_in_loop() -> AsyncLLM:
            return make()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(EngineCoreClient, "make_async_mp_client", InProcessClient)
            self.engine = self.run(make_in_loop()) if in_loop else make()

    def run(self, test: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(asyncio.wait_for(test, 300))

    def close(self) -> None:
        self.engine.shutdown()
        self._runner.close()


@pytest.fixture(scope="module", params=[True, False], ids=["made in the loop", "made before"])
def online(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Online]:
    with closing(Online(tiny_model, request.param)) as made:
        yield made


@pytest.fixture
def new(tiny_model: Path) -> Iterator[Online]:
    with closing(Online(tiny_model)) as made:
        yield made


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that runs in the loop of the engine that is its first argument."""

    @wraps(test)
    def run(**fixtures: Any) -> None:
        next(iter(fixtures.values())).run(test(**fixtures))

    return run


async def read(
    online: Online, prompt: Any, sampling: SamplingParams, turns: int = 0
) -> list[RequestOutput]:
    outputs = []
    async for output in online.engine.generate(prompt, sampling, str(next(_names))):
        outputs.append(output)
        for _ in range(turns):  # of the loop, in which the engine makes its steps
            await asyncio.sleep(0)
    return outputs


_names = itertools.count()


@in_loop
async def test_all_kinds_of_outputs_at_once(online: Online) -> None:
    jobs = list(itertools.product((DELTA, CUMULATIVE, FINAL), (0, 100), (1, 3)))
    jobs_sampling = [
        (params(output_kind=kind, n=n, max_tokens=20), pauses) for kind, pauses, n in jobs
    ]
    results = await asyncio.gather(
        *(read(online, prompts_of(100)[0], *job) for job in jobs_sampling)
    )
    merged = 0
    for (kind, pauses, n), outputs in zip(jobs, results, strict=True):
        merged += pauses > 0 and kind == DELTA and len(outputs) < 20
        check_outputs(kind, n, outputs, prompt_of(100, 100))
    assert merged == 2, "no outputs merged"


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE, FINAL])
@in_loop
async def test_requests_that_are_aborted(online: Online, kind: RequestOutputKind) -> None:
    """As with vLLM's own: the rows of what was generated, or nothing where nothing was."""
    engine, sampling = online.engine, params(output_kind=kind, max_tokens=900)
    queue = await engine.add_request("long", prompts_of(40)[0], sampling)
    early = await engine.add_request("early", prompts_of(30)[0], sampling)
    await engine.abort("early")
    assert (await early.get()).outputs[0].routed_experts is None
    (running,) = engine.engine_core.core.scheduler.requests.values()
    while running.num_output_tokens < 10:
        await asyncio.sleep(0)
    await engine.abort("long")
    outputs = [await queue.get()]
    while not outputs[-1].finished:
        outputs.append(await queue.get())
    check_outputs(kind, 1, outputs, prompt_of(40, 40))
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert (
        sum(
            len(output.outputs[0].token_ids)
            for output in (outputs if kind == DELTA else outputs[-1:])
        )
        > 5
    )


async def poll(online: Online, name: str, sampling: SamplingParams | None = None) -> Any:
    queue = await online.engine.add_request(
        name, prompts_of(40)[0], sampling or params(output_kind=FINAL)
    )
    while (output := queue.get_nowait()) is None:
        await asyncio.sleep(0.01)
    return output


@in_loop
async def test_a_reader_that_polls(new: Online) -> None:
    """From the first request on, when nobody has said yet what rows look like."""
    for name in ("first", "second"):
        check_finished(await poll(new, name))


@in_loop
async def test_a_reader_that_polls_sees_errors(new: Online) -> None:
    first = await new.engine.add_request(
        "first", prompts_of(40)[0], params(output_kind=FINAL, max_tokens=500)
    )
    first.put(ValueError("of the engine"))
    with pytest.raises(ValueError, match="of the engine"):
        first.get_nowait()


@in_loop
async def test_a_question_to_the_workers_that_failed_is_asked_again(
    new: Online, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What rows look like, which nobody has said yet. One reader has the error."""
    fails = AsyncMock(side_effect=RuntimeError("no worker says so"))
    with monkeypatch.context() as patch:
        patch.setattr(new.engine.engine_core, "collective_rpc_async", fails)
        with pytest.raises(RuntimeError, match="no worker says"):
            await poll(new, "first")
    (output,) = await read(new, prompts_of(40)[0], params(output_kind=FINAL))
    check_finished(output)


@in_loop
async def test_a_prompt_that_is_streamed_in_is_refused(online: Online) -> None:
    async def inputs() -> AsyncIterator[StreamingInput]:
        yield StreamingInput(prompt=prompts_of(5)[0])

    with pytest.raises(
        VLLMValidationError, match="cannot be returned for a prompt that is streamed in"
    ):
        await read(online, inputs(), params(output_kind=DELTA))


# ---- classes of a program's own ----


class CountingScheduler(AsyncScheduler):
    """A program's own."""

    steps = 0

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self.steps += 1
        return super().schedule(*args, **kwargs)


class NoScheduler:
    """Derives from nothing of vLLM's."""


def test_a_scheduler_of_the_programs_own(no_process: None, tiny_model: Path) -> None:
    """Given as the class; `tests/e2e/test_in_process.py` gives names, and a worker's too."""
    made = LLM(**arguments(tiny_model, scheduler_cls=CountingScheduler))
    generate(made, prompts_of(100, 20), params(n=2))
    scheduler = made.llm_engine.engine_core.engine_core.scheduler
    assert isinstance(scheduler, CountingScheduler)
    assert isinstance(scheduler, SchedulerCapture)
    assert scheduler.steps > 5
    made.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheduler_cls": NoScheduler}, "NoScheduler does not derive from vLLM's Scheduler"),
        ({"scheduler_cls": "their.Class"}, "their.Class cannot be imported"),
        (
            {"worker_cls": f"{__name__}.NoScheduler"},
            "NoScheduler does not derive from vLLM's Worker",
        ),
        ({"worker_cls": "NoModule"}, "NoModule cannot be imported"),
        ({"worker_cls": b"pickled"}, "must be a class at the top of a module"),
        (
            {"scheduler_cls": type("Local", (Scheduler,), {})},
            "must be a class at the top of a module",
        ),
        ({"kv_sharing_fast_prefill": True}, "Fast prefill skips layers"),
        (
            {"additional_config": {"routed_experts_default": []}},
            "routed_experts_default must be a JSON object",
        ),
    ],
)
def test_what_cannot_be_captured_is_refused(
    tiny_model: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedConfig, match=message) as refused:
        EngineArgs(**arguments(tiny_model, **options)).create_engine_config()
    assert "VLLM_PLUGINS" in str(refused.value)


# ---- what it changes ----


def test_paths_can_be_given(tiny_model: Path) -> None:
    """vLLM makes JSON of the configuration."""
    additional = {"routed_experts_store": tiny_model / "store"}
    config = EngineArgs(
        **arguments(tiny_model, additional_config=additional)
    ).create_engine_config()
    assert config.additional_config["routed_experts_store"] == str(tiny_model / "store")
    assert config.compute_hash()


def test_an_engine_captures_with_a_worker_of_the_programs_own(tiny_model: Path) -> None:
    """A server asks the same before it answers."""
    own = "vllm.v1.worker.cpu_worker.CPUWorker"
    config = EngineArgs(**arguments(tiny_model, worker_cls=own)).create_engine_config()
    assert config.parallel_config.worker_cls not in (own, *WORKERS.values())
    assert is_capturing(config.parallel_config.worker_cls)
    assert not is_capturing(own)


def test_arguments_that_were_filled_in_can_be_used_again(tiny_model: Path) -> None:
    args = EngineArgs(**arguments(tiny_model))
    for _ in range(2):
        config = args.create_engine_config()
        assert config.parallel_config.worker_cls == WORKERS["cpu"]
        assert config.scheduler_config.scheduler_cls == SCHEDULER
        assert not vllm_captures(config)
    assert args.enable_return_routed_experts or not HAS_AUX_OUTPUTS


GIVEN = """
import os, sys
import vllm.v1.worker.cpu_worker  # and with it what a configuration imports
from vllm.engine.arg_utils import EngineArgs
given = dict(model=sys.argv[1], dtype="float32", enforce_eager=True, kv_cache_memory_bytes=8 << 20)

def refused(*words):
    try:
        EngineArgs(**given, enable_return_routed_experts=True).create_engine_config()
    except ValueError as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError("it was built")
"""
PROGRAMS = {
    "without the argument nothing changes, and with it one line says so": """
config = EngineArgs(**given).create_engine_config()
assert hasattr(EngineArgs.create_engine_config, "__wrapped__"), "the plugin was not loaded"
assert config.additional_config == {}
assert config.scheduler_config.scheduler_cls is None
assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
loaded = {name for name in sys.modules if name.startswith("routed_experts.")}
inprocess = ("server.inprocess", "server.inprocess.patching", "server.inprocess.plugin")
seams = ("capture", "capture.seams", "capture.seams.arguments")
ours = ("protocol", "protocol.version", "server", *inprocess, *seams)
assert loaded <= {f"routed_experts.{name}" for name in ours}, loaded
for _ in range(2):
    EngineArgs(**given, enable_return_routed_experts=True).create_engine_config()
""",
    # What fails in this package fails for those who ask.
    **{
        missing: f"""
sys.modules["routed_experts.{missing}"] = None  # so that importing it fails
config = EngineArgs(**given).create_engine_config()
assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
refused("The capture of routed experts cannot be loaded: ", "VLLM_PLUGINS")
"""
        for missing in ("server.inprocess.engine_hooks", "capture.engine.config")
    },
    "another front end of vLLM's gets vLLM's own capture, unless it returns rows": """
from vllm.usage.usage_lib import UsageContext
SERVER, PROGRAM = UsageContext.OPENAI_API_SERVER, UsageContext.LLM_CLASS

def is_ours(context):
    args = EngineArgs(**given, enable_return_routed_experts=True)
    try:
        return "routed_experts" in args.create_engine_config(context).parallel_config.worker_cls
    except ValueError as error:  # vLLM's own does not run here
        assert "AuxOutput Connector requires Model Runner V2" in str(error), error
        return False

assert is_ours(SERVER)
os.environ |= {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": "/bin/true"}
assert (is_ours(SERVER), is_ours(SERVER), is_ours(PROGRAM)) == (False, False, True)
from pathlib import Path
from tempfile import mkdtemp
from routed_experts.capture.wire.vllm_rows import sends_bare_rows

rust = Path(mkdtemp()) / "vllm-rs"
rust.write_text("#!/bin/sh\\necho vllm-rs 0.33.0\\n")
rust.chmod(0o755)
os.environ["VLLM_RUST_FRONTEND_PATH"] = str(rust)
assert is_ours(SERVER)
args = EngineArgs(**given, enable_return_routed_experts=True)
assert sends_bare_rows(args.create_engine_config(SERVER))
assert not sends_bare_rows(EngineArgs(**given, enable_return_routed_experts=True).create_engine_config(PROGRAM))
os.environ["VLLM_PLUGINS"] = "routed_experts"
try:
    EngineArgs(**given, enable_return_routed_experts=True).create_engine_config(SERVER)
except ValueError as error:
    assert "passes over the fields of routed-experts-server" in str(error), error
else:
    raise AssertionError("the fields would be passed over in silence")
del os.environ["VLLM_PLUGINS"]
os.environ["VLLM_USE_RUST_FRONTEND"] = "0"
sys.modules["smg_grpc_servicer"] = sys
assert not is_ours(SERVER)
os.environ["VLLM_PLUGINS"] = "routed_experts"
refused("vLLM's gRPC server cannot return what routed-experts-server captures", "VLLM_PLUGINS")
""",
    "without the plugin vLLM's own capture is meant": """
os.environ["VLLM_PLUGINS"] = "another"
args = EngineArgs(**given, enable_return_routed_experts=True)
from routed_experts.capture.seams.arguments import asks
assert asks(args)
if hasattr(args, "aux_output_config"):
    refused("AuxOutput Connector requires Model Runner V2")  # it does not run here
""",
}
FORK = """
for name, program in eval(sys.argv[2]).items():
    print("----", name, flush=True)
    if os.fork() == 0:
        exec(program)
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


@pytest.mark.release
def test_programs_in_processes_of_their_own(tiny_model: Path) -> None:
    """Forks of one that has imported vLLM, which takes longer than all the rest."""
    command = ["-c", GIVEN + FORK, str(tiny_model), repr(PROGRAMS)]
    done = programs.run(command, as_users_do=True, check=True)  # which modules there are, counts
    first = done.stdout.split("---- ")[1]
    (said,) = [line for line in first.splitlines() if "routed-experts-server" in line]
    assert "INFO" in said
    assert "VLLM_PLUGINS" in said
    (beside,) = (
        text for text in done.stdout.split("---- ") if text.startswith("another front end")
    )
    warnings = [
        line
        for line in beside.splitlines()
        if "WARNING" in line and "vLLM's own capture is used" in line
    ]
    assert ["Rust" in line for line in warnings] == [True, False]  # one for each front end


def test_an_endpoint_plugin_that_cannot_be_loaded_ends_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM would log what it raises before, and serve without it."""
    monkeypatch.setitem(sys.modules, "routed_experts.server.http.process.plugin", None)
    plugin = entry_point.make()
    assert set(plugin.required_tasks) == {"generate"}
    with pytest.raises(
        UnsupportedConfig, match=r"cannot be loaded: .*server\.http\.process\.plugin.*VLLM_PLUGINS"
    ):
        plugin.attach_router(FastAPI())
