"""Requests that say which experts their tokens take, in vLLM's own engine core, stepped by hand;
and vLLM's own routers, whose formula must be known."""

import gc
import pickle
import re
import weakref
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.exceptions import VLLMValidationError
from vllm.logging_utils.dump_input import prepare_object_to_dump
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.router.custom_routing_router import CustomRoutingRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.serial_utils import MsgpackEncoder

from routed_experts.capture.engine.versions import UnsupportedConfig
from routed_experts.capture.scheduler.input_decoder import read_inputs
from routed_experts.capture.seams.engine import HAS_SINK
from routed_experts.capture.wire.rows import INPUT_KEY
from routed_experts.capture.worker.router_input.family import family_of, prove
from routed_experts.capture.worker.router_input.filling import RouterInputOfTables
from routed_experts.capture.worker.router_input.refusals import check_input_layers
from routed_experts.capture.worker.router_input.rewriting import rewrite_behind
from routed_experts.capture.worker.router_input.running import RunningInputs
from routed_experts.capture.worker.router_input.tables import Tables
from routed_experts.protocol.routing_input import (
    INPUT_ARG,
    EncodedInput,
    Groups,
    RoutingInput,
    routing_args,
)
from routed_experts.server.inprocess.input_check import InputCheck
from routed_experts.server.settings import Settings
from tests.contract.engine import engine as arithmetic_engine
from tests.contract.engine import sent
from tests.contract.test_moe_layers import Engine, stepped
from tests.e2e.harness import prompt_of

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="written for the worker of the CPU build"),
    pytest.mark.skipif(not HAS_SINK, reason="routing as an input needs vLLM 0.32"),
]

L, K, E = 5, 4, 16  # of the tiny model


def rows_for(num_tokens: int, seed: int = 0) -> np.ndarray:
    order = np.random.default_rng(seed).random((num_tokens, L, E)).argsort(axis=2)
    return order[:, :, :K].astype(np.int16)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    with stepped(tiny_model, additional_config={INPUT_KEY: True}) as running:
        yield running


class Client:
    """Adds requests to an engine, and knows what came of them."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.reasons: dict[str, FinishReason] = {}
        self.num_tokens: dict[str, int] = {}

    def add(self, name: str, length: int, args: Mapping[str, Any] | None = None) -> None:
        """As a program with the engine in its process."""
        self.take(request_of(name, length, args))

    def send(self, name: str, length: int, args: Mapping[str, Any] | None = None) -> Any:
        """As an API process. Returns the request as it arrives."""
        received = sent(request_of(name, length, args))
        self.take(received)
        return received

    def take(self, request: EngineCoreRequest) -> None:
        self.core.add_request(*self.core.preprocess_add_request(request))
        self.num_tokens[request.request_id] = 0

    def finish(self) -> None:
        while self.core.scheduler.has_requests():
            messages, _ = self.core.step()
            for message in messages.values():
                for output in message.outputs:
                    if output.request_id not in self.num_tokens:
                        continue
                    self.num_tokens[output.request_id] += len(output.new_token_ids)
                    if output.finish_reason is not None:
                        self.reasons[output.request_id] = output.finish_reason
        for name in self.num_tokens:
            assert name in self.reasons


def request_of(name: str, length: int, args: Mapping[str, Any] | None = None) -> EngineCoreRequest:
    sampling = SamplingParams(
        max_tokens=5, temperature=0, ignore_eos=True, extra_args=dict(args) if args else None
    )
    prompt = prompt_of(length, seed=length)
    return EngineCoreRequest(name, prompt, None, sampling, None, 0.0, None, None, None)


# ---- how it comes to the engine ----


def test_rows_are_beside_the_message_and_not_in_it() -> None:
    """So that no process copies them: vLLM's encoder takes them as they are."""
    args = routing_args(rows=rows_for(20_000))
    message, rows = MsgpackEncoder().encode(request_of("a", 4, args))
    assert len(message) < 400
    assert isinstance(rows, memoryview)
    assert np.shares_memory(np.frombuffer(rows, np.uint8), args[INPUT_ARG].arrays)


SAID: dict[str, dict[str, Any]] = {
    "rows": {"rows": rows_for(150)},
    "rows that are short enough to be in the message": {"rows": rows_for(3), "start": 2},
    "a bias": {"bias": np.linspace(-1, 1, L * E, dtype=np.float32).reshape(L, E)},
    "both": {"rows": rows_for(60), "bias": np.ones((L, E), np.float32)},
}


def test_what_an_api_process_sends_is_what_the_engine_has(engine: Engine) -> None:
    client = Client(engine.core)
    for name, said in SAID.items():
        args = routing_args(**said)
        received = client.send(name, 150, args)
        assert EncodedInput.of(received.sampling_params) == args[INPUT_ARG], name
        assert len(repr(received.sampling_params.extra_args)) < 100
    client.send("natural", 90)
    client.finish()
    assert set(client.reasons.values()) == {FinishReason.LENGTH}


def test_a_worker_of_another_process_gets_the_arrays_as_they_are() -> None:
    """vLLM pickles a step for workers, with large arrays beside the pickle."""
    read_inputs()
    args = routing_args(rows=rows_for(150))
    encoded = EncodedInput.of(sent(request_of("a", 150, args)).sampling_params)
    arrays: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(encoded, protocol=5, buffer_callback=arrays.append)
    assert len(pickled) < 1000
    assert [memoryview(array).nbytes for array in arrays] == [rows_for(150).nbytes]
    assert pickle.loads(pickled, buffers=arrays) == args[INPUT_ARG]


def test_the_prompt_of_a_request_is_hashed_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the thread for messages, and by the name that it also has in a program."""
    init_none_hash(sha256)
    monkeypatch.setattr(engine.core, "request_block_hasher", get_request_block_hasher(16, sha256))
    args = routing_args(rows=rows_for(150))
    request = request_of("a", 150, args)
    request.cache_salt = "the client's"
    in_program, _ = engine.core.preprocess_add_request(copy(request))
    router_inputs = engine.core.scheduler.aux_output_connector.router_inputs
    router_inputs.salt(in_program)
    received, _ = engine.core.preprocess_add_request(sent(request))
    monkeypatch.setattr(type(received), "update_block_hashes", None)
    router_inputs.salt(received)
    assert received.cache_salt == in_program.cache_salt
    assert received.block_hashes == in_program.block_hashes
    assert len(received.block_hashes) == 150 // 16


# ---- what the scheduler and the worker do ----


def test_given_rows_and_biases_are_followed_in_chunks_beside_others(engine: Engine) -> None:
    """The scheduler compares each step's rows with what was given, or the step fails."""
    bias = np.zeros((L, E), np.float32)
    bias[:, 3] = -np.inf
    client = Client(engine.core)
    client.add("forced", 150, routing_args(rows=rows_for(150)))
    client.add("natural", 90)
    client.add("partly", 100, routing_args(rows=rows_for(30), start=60))
    client.add("steered", 70, routing_args(bias=bias))
    allowed = np.where(bias == -np.inf, 0.5, bias)
    client.add("both", 80, routing_args(rows=rows_for(80), bias=allowed))
    client.finish()
    assert set(client.reasons.values()) == {FinishReason.LENGTH}


def test_a_worker_that_fills_nothing_is_an_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if vLLM had given what is replaced another name."""
    monkeypatch.setattr(RouterInputOfTables, "fill", lambda *args: None)
    check_that_a_step_fails(engine, "experts of 30 tokens .* actually of 0 and 0")


def test_rows_at_another_position_are_an_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = RouterInputOfTables.fill

    def late(self: Any, ids: Any, offsets: Any, starts: Any) -> None:
        fill(self, ids, offsets, np.asarray(starts) + 1)

    monkeypatch.setattr(RouterInputOfTables, "fill", late)
    check_that_a_step_fails(engine, r"requests that got other experts: \['a'\]")


def test_a_router_that_chooses_against_a_bias_is_an_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if its tokens had the bias of another request: as many are steered as should be."""
    biases_of_batch = RunningInputs.biases_of_batch

    def of_another(self: Any, request_ids: Any) -> Any:
        biases = biases_of_batch(self, request_ids)
        return {index: (name, np.ones((L, E))) for index, (name, _) in biases.items()}

    monkeypatch.setattr(RunningInputs, "biases_of_batch", of_another)
    banned = {"bias": np.where(np.arange(E) < 8, -np.inf, np.zeros((L, E)))}
    check_that_a_step_fails(engine, r"requests that got other experts: \['a'\]", banned)


def test_a_request_that_is_steered_and_said_nothing_is_an_error(engine: Engine) -> None:
    """In a step of which no request has an input. As if the worker took one for another's."""
    router_input = engine.worker._router_input
    router_input._inputs._inputs["natural"] = RoutingInput(bias=np.ones((L, E), np.float32))
    client = Client(engine.core)
    client.add("natural", 40)
    try:
        with pytest.raises(RuntimeError, match="biases of 0 requests, actually of 0 and 1"):
            client.core.step()
    finally:
        del router_input._inputs._inputs["natural"]
        router_input._tables.forget("natural")
        client.core.abort_requests(["natural"])
        client.core.scheduler.aux_output_connector._steps.clear()


def check_that_a_step_fails(
    engine: Engine, words: str, said: Mapping[str, Any] | None = None
) -> None:
    client = Client(engine.core)
    client.add("a", 40, routing_args(**(said or {"rows": rows_for(30), "start": 4})))
    try:
        with pytest.raises(RuntimeError, match=words):
            client.core.step()
    finally:
        client.core.abort_requests(["a"])
        client.core.scheduler.aux_output_connector._steps.clear()


HEADER = routing_args(rows=rows_for(40))[INPUT_ARG].header
UNFIT: dict[str, dict[str, Any]] = {
    "other layers": routing_args(rows=np.zeros((10, L + 1, 1), np.int16)),
    "an expert that the model has not": routing_args(rows=rows_for(10) + E),
    "rows behind the prompt": routing_args(rows=rows_for(41)),
    "no expert left": routing_args(bias=np.full((L, E), -np.inf)),
    "bytes that are no input": {INPUT_ARG: {"header": b"what"}},
    # As if vLLM wrote its messages in another way.
    **{
        f"its arrays in frame {place}": {
            INPUT_ARG: {"header": HEADER, "arrays": ["|u1", [1], place]}
        }
        for place in (0, 2, -1, True, "1", None, [1])
    },
}


def test_an_input_that_nobody_checked_ends_its_request_only(engine: Engine) -> None:
    client = Client(engine.core)
    client.send("natural", 90)
    for name, args in UNFIT.items():
        client.send(name, 40, args)
    client.send("forced", 50, routing_args(rows=rows_for(50)))
    client.finish()
    assert client.reasons == {
        "natural": FinishReason.LENGTH,
        **dict.fromkeys(UNFIT, FinishReason.ERROR),
        "forced": FinishReason.LENGTH,
    }
    assert {client.num_tokens[name] for name in UNFIT} == {0}


def test_an_engine_without_the_flag_ends_such_a_request_with_an_error() -> None:
    client = Client(arithmetic_engine(is_async=False))
    client.add("forced", 40, routing_args(rows=rows_for(40)))
    client.add("natural", 40)
    client.finish()
    assert client.reasons == {"forced": FinishReason.ERROR, "natural": FinishReason.LENGTH}
    assert client.num_tokens["forced"] == 0


def salted(engine: Engine, args: Mapping[str, Any] | None, own_salt: str | None) -> Any:
    """A request after the scheduler gave its KV a name. Its hashes stand for vLLM's."""
    request = SimpleNamespace(
        sampling_params=SimpleNamespace(extra_args=args),
        cache_salt=own_salt,
        block_hashes=[own_salt],
    )
    request.update_block_hashes = lambda: request.block_hashes.append(request.cache_salt)
    engine.core.scheduler.aux_output_connector.router_inputs.salt(request)
    return request


def test_no_salt_of_a_program_is_that_of_an_input(engine: Engine) -> None:
    """Nor that of another input. Whatever a program takes as a salt: here, what the engine makes of
    others."""
    args = routing_args(rows=rows_for(8))
    other_args = routing_args(rows=rows_for(8, seed=1))
    names: set[str | None] = {None, "the client's"}
    own_salts = list(names)
    for _ in range(3):
        made = [
            salted(engine, extra_args, salt) for salt in own_salts for extra_args in (args, None)
        ]
        own_salts = [request.cache_salt for request in made]
        names.update(own_salts)
    cases = [(extra_args, salt) for salt in names for extra_args in (args, other_args, None)]
    hashes = [salted(engine, extra_args, salt).block_hashes[0] for extra_args, salt in cases]
    assert len(set(hashes)) == len(cases)


def test_the_dump_of_a_dying_engine_does_not_print_an_input(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a step fails, vLLM prints what was scheduled, with sampling parameters."""
    executor = engine.core.model_executor
    execute = executor.execute_model
    dumps: list[str] = []

    def dumping(scheduled: SchedulerOutput, *args: Any, **options: Any) -> Any:
        dumps.append(prepare_object_to_dump(scheduled))
        return execute(scheduled, *args, **options)

    monkeypatch.setattr(executor, "execute_model", dumping)
    rows = rows_for(150)
    client = Client(engine.core)
    client.add("of a program", 150, routing_args(rows=rows))
    client.send("by a message", 150, routing_args(rows=rows))
    client.finish()
    assert len(re.findall(r"<routing input of \d+ bytes>", "".join(dumps))) == 2
    assert all(repr(rows.tobytes())[2:40] not in dumped for dumped in dumps)


def test_nothing_is_left_of_requests_that_ended(engine: Engine) -> None:
    client = Client(engine.core)
    client.add("forced", 40, routing_args(rows=rows_for(40)))
    client.add("steered", 40, routing_args(bias=np.ones((L, E))))
    client.finish()
    client.add("natural", 40)  # whose step tells the worker who has ended
    client.finish()
    assert not engine.core.scheduler.aux_output_connector.router_inputs._running
    assert not engine.worker._router_input._inputs
    assert not engine.worker._router_input._tables._places


# ---- what a program is told ----

MODEL = {
    "layer_ids": range(1, L + 1),
    "num_layers": L,
    "top_k": K,
    "num_experts": E,
    "groups": [1, 1, 1],
}


def request_with(args: Mapping[str, Any] | None) -> Any:
    params = SamplingParams(extra_args=None if args is None else dict(args))
    return SimpleNamespace(sampling_params=params, prompt_token_ids=list(range(10)))


def test_a_program_may_give_what_fits_the_model() -> None:
    check = InputCheck(Settings(enable_routed_experts_input=True))
    check.learn(MODEL)
    for args in (None, {"other": 1}, routing_args(rows=rows_for(10))):
        check.check(request_with(args))


@pytest.mark.parametrize(
    ("is_on", "args", "words"),
    [
        (True, {INPUT_ARG: b"bytes"}, "must be what .*routing_args returned"),
        (True, {INPUT_ARG: {"header": b"bytes"}}, "these bytes are no routing input"),
        (True, routing_args(rows=rows_for(11)), "prompt's 10 tokens"),
        (True, routing_args(rows=rows_for(10)[:, :2]), "5 layers"),
        (True, routing_args(bias=np.full((L, E), np.inf)), "16 experts of decoder layer 1,"),
        (False, routing_args(rows=rows_for(10)), "build it with additional_config"),
    ],
)
def test_a_program_is_told_what_cannot_be_followed(
    is_on: bool, args: dict[str, Any], words: str
) -> None:
    check = InputCheck(Settings(enable_routed_experts_input=is_on))
    check.learn(MODEL)
    with pytest.raises(VLLMValidationError, match=words):
        check.check(request_with(args))


def test_a_servers_default_of_experts_is_not_left_out_in_a_program() -> None:
    default = {"routed_experts_deactivate": [[1, 0]]}
    check = InputCheck(Settings(enable_routed_experts_input=True, routed_experts_default=default))
    with pytest.raises(VLLMValidationError, match="for the requests of a server alone"):
        check.check(request_with(None))


# ---- vLLM's routers ----

BIAS = torch.linspace(-0.1, 0.1, E)
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {"renormalize": False},
    "softmax, renormalised": {"renormalize": True},
    "groups": {"renormalize": False, "groups": (4, 2), "routed_scaling_factor": 16.0},
    "groups, sigmoid": {"renormalize": True, "groups": (4, 2), "scoring_func": "sigmoid"},
    "groups, sigmoid, corrected": {
        "renormalize": True,
        "groups": (4, 2),
        "scoring_func": "sigmoid",
        "e_score_correction_bias": torch.nn.Parameter(BIAS, requires_grad=False),
        "routed_scaling_factor": 2.5,
    },
    "one group, sigmoid, corrected": {
        "renormalize": False,
        "groups": (1, 1),
        "scoring_func": "sigmoid",
        "e_score_correction_bias": torch.nn.Parameter(BIAS, requires_grad=False),
    },
}


def router_of(options: Mapping[str, Any]) -> CPURouter:
    options = dict(options)
    groups = options.pop("groups", None)
    if groups is not None:
        options |= {
            "use_grouped_topk": True,
            "num_expert_group": groups[0],
            "topk_group": groups[1],
        }
    return CPURouter(top_k=K, global_num_experts=E, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", ROUTERS.values(), ids=ROUTERS)
def test_the_formulas_of_vllms_routers_are_known(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    router = router_of(options)
    family = family_of(router, E, K)
    logits = torch.zeros(3, E, dtype=dtype)
    assert prove(family, router._compute_routing, logits)


OTHERS: dict[str, dict[str, Any]] = {
    "renormalize": {"renormalize": True},
    "scale": {"scale": 1.5},
    "scoring": {"scoring": "sigmoid"},
    "groups": {"groups": Groups(4, 2, 1)},
    "a correction": {"correction": 3 * BIAS},
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_router_that_does_something_else_is_not_trusted(other: dict[str, Any]) -> None:
    """As another version's may. Where logits are all equal, these formulas give equal weights."""
    router = router_of(ROUTERS["softmax"])
    family = replace(family_of(router, E, K), **other)
    assert not prove(family, router._compute_routing, torch.zeros(3, E))


@pytest.mark.parametrize("is_replaced", [False, True], ids=["in place", "replaced"])
def test_new_weights_of_a_correction_are_followed(is_replaced: bool) -> None:
    router = router_of(ROUTERS["groups, sigmoid, corrected"])
    parameter = torch.nn.Parameter(BIAS.clone(), requires_grad=False)
    router.e_score_correction_bias = parameter
    family = family_of(router, E, K)
    if is_replaced:
        parameter.data = 3 * BIAS.flip(0)
    else:
        parameter.data.copy_(3 * BIAS.flip(0))
    assert prove(family, router._compute_routing, torch.zeros(3, E))


def test_nothing_is_left_of_a_router_that_is_gone() -> None:
    """Its tables are on the device, and a process may have one engine after the other."""
    tables = Tables(
        1,
        max_tokens=4,
        top_k=K,
        num_experts=E,
        max_requests=1,
        max_steps_in_flight=1,
        device=torch.device("cpu"),
    )
    router = router_of(ROUTERS["softmax"])
    rewrite_behind(SimpleNamespace(router=router, layer_id=0), tables, 0, family_of(router, E, K))
    logits = torch.zeros(3, E)
    router._compute_routing(torch.zeros(3, 8), logits, None)
    left = weakref.ref(tables)
    del router, tables
    gc.collect()
    assert left() is None


def own_formula(**options: Any) -> Any:
    raise AssertionError


REFUSED: dict[str, tuple[Any, str]] = {
    "a function": (
        CPURouter(K, E, custom_routing_function=own_formula),
        "formula of its own",
    ),
    "a router of functions": (
        CustomRoutingRouter(K, E, custom_routing_function=own_formula),
        "formula of its own",
    ),
    "a table of tokens": (
        FusedTopKBiasRouter(K, E, hash_indices_table=torch.zeros(4, K)),
        "by the id of a token",
    ),
    "pictures": (FusedTopKBiasRouter(K, E, bias_vl=BIAS), "for pictures"),
}


@pytest.mark.parametrize(("router", "words"), REFUSED.values(), ids=REFUSED)
def test_routers_without_a_known_formula_are_refused(router: Any, words: str) -> None:
    with pytest.raises(UnsupportedConfig, match=words):
        family_of(router, E, K)


def layers_of(**fields: Any) -> Any:
    config = SimpleNamespace(sp_size=fields.pop("sp_size", 1), dp_size=fields.pop("dp_size", 1))
    layer = {"layer_id": 7, "is_monolithic": False, "do_naive_dispatch_combine": False, **fields}
    runner = SimpleNamespace(moe_config=config, **layer)
    return SimpleNamespace(fused=(), runners=(runner,))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"is_monolithic": True}, "kernel of layer 7 routes by itself"),
        ({"sp_size": 2}, "Layer 7 spreads the tokens"),
        ({"dp_size": 2, "do_naive_dispatch_combine": True}, "other data-parallel ranks"),
    ],
)
def test_layers_whose_router_does_not_see_the_steps_tokens_are_refused(
    fields: dict[str, Any], words: str
) -> None:
    check_input_layers(layers_of())
    with pytest.raises(UnsupportedConfig, match=words):
        check_input_layers(layers_of(**fields))
