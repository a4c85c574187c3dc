"""vLLM's real engine core and scheduler around a model that does arithmetic, so that every row is
known in advance.

No weights, no processes, no sockets: `engine` makes an `EngineCore`, `Client` takes the place of
the API process, and the executor that of the workers. The executor keeps a KV cache of prefixes,
and fails when a step finds another prefix in its blocks than its own; the row of a token says which
prefix the token ends.

A test of a situation makes an engine, adds requests, lets something happen between steps, and calls
`finish`. Every row is checked as it comes (`Received`), and `finish` checks that all have come and
that nothing is left:

    def test_an_abort_in_the_prefill(is_async: bool) -> None:
        client = Client(engine(is_async, chunk=48))
        client.add("gone", tokens(150))
        client.steps(2)
        client.abort("gone")
        client.add("stays", tokens(150))
        client.finish(but="gone")

Others add their own part to it: `served` an API process over HTTP, `loads` KV connectors
(`engine_with_store`), `offloading` vLLM's own connector (`engine_that_offloads`), `passes` a router
that chooses otherwise each time.
"""

import hashlib
import json
import os
import queue
import random
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine import core as engine_core
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from routed_experts.capture.scheduler.scheduler import SchedulerHooks
from routed_experts.capture.wire.envelope import Notes, Unpacker
from routed_experts.capture.wire.message import (
    OPT_IN_ARG,
    PROMPT_ROWS,
    Cause,
    OptIn,
    RowsOutput,
)
from routed_experts.capture.wire.rows import (
    INPUT_KEY,
    RECOMPUTE_KEY,
    WEIGHTS_KEY,
    captures_weights,
    combined,
    ids_of,
    steps_of,
    weights_of,
    without_steps,
)
from routed_experts.capture.wire.stats import EngineStats
from routed_experts.capture.wire.transport import StepRows, attach
from routed_experts.capture.wire.vllm_rows import BARE_ROWS_KEY, sends_bare_rows
from tests.rows import check_rows

L, K = 8, 64  # a row of 1 KiB, so that a few dozen are what the engine calls large
PART_BYTES = 64 << 10  # a prompt of 65 tokens comes in parts
DECODER_LAYERS = L + 2
LAYER_IDS = [1, 2, 3, *range(5, DECODER_LAYERS)]
"""Decoder layers of the L layers that have experts; the others are dense."""
BLOCK, NUM_BLOCKS, VOCAB, NUM_EXPERTS = 16, 64, 500, 1 << 15

Rows = np.ndarray[Any, np.dtype[np.int16]]


def tokens(count: int, seed: int = 0) -> list[int]:
    """A prompt."""
    return random.Random(seed).choices(range(VOCAB), k=count)


@lru_cache(1 << 18)
def _digest(before: bytes, token: int) -> bytes:
    return hashlib.blake2b(before + token.to_bytes(4, "little"), digest_size=16).digest()


class Tokens(list[int]):
    """The tokens of a sequence, and for each of them what stands for it and all before it."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        super().__init__(tokens)
        self._prefixes: list[bytes] = []

    def prefixes(self) -> list[bytes]:
        for token in self[len(self._prefixes) :]:
            self._prefixes.append(_digest(self._prefixes[-1] if self._prefixes else b"", token))
        return self._prefixes

    def rows(self, first: int, end: int) -> Rows:
        """The rows [n, L, K] of positions `first` to `end`: each layer's ids count from two bytes
        of the prefix."""
        ids = np.frombuffer(b"".join(self.prefixes()[first:end]), dtype=np.int16).reshape(-1, L, 1)
        return (ids & 0x3FFF) + np.arange(K, dtype=np.int16)


def weights_for(rows: Rows) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The weights of rows: any bits, words of -1 and NaN among them, which nothing but these ids
    has."""
    bits = rows.astype(np.uint32) * np.uint32(0x9E3779B1)
    bits[rows % 4 == 1] |= 0xFFFF
    bits[bits == 0xFFFFFFFF] = 0xFFFF  # which stands for unknown ones
    return bits.view(np.float32)


@dataclass
class Sequence:
    tokens: Tokens
    blocks: list[int]

    def slots(self, first: int, end: int) -> np.ndarray:
        positions = np.arange(first, end)
        return np.array(self.blocks)[positions // BLOCK] * BLOCK + positions % BLOCK


@dataclass
class Received:
    """What came for one request, checked as it comes: `missing` are the positions of rows that came
    as unknown."""

    client: "Client"
    executor: Any
    request_id: str
    prompt_len: int
    start: int | None
    prompt_id: bytes
    sequence: Tokens  # of the prompt, and after them those that came
    num_rows: int = 0  # generated ones that came
    finish: FinishReason | None = None
    kv_transfer_params: dict[str, Any] | None = None
    missing: list[int] = field(default_factory=list)
    at_end: bool = False  # whether its rows may come with its last output
    own_prompt: bool = False  # whether its prompt's rows are to be of its own KV
    num_arrays: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.sequence[self.prompt_len :]

    def take(self, output: EngineCoreOutput) -> None:
        __tracebackhide__ = True
        assert self.finish is None, "an output after the last one"
        is_first = not self.tokens
        self.sequence += output.new_token_ids
        self.finish = output.finish_reason
        self.kv_transfer_params = output.kv_transfer_params
        if self.start is None:
            assert output.routed_experts is None
            return
        if is_first and output.new_token_ids and self.start < self.prompt_len:
            prompts = self.client.prompts[self.prompt_id]
            if self.own_prompt:
                prompts = {self.request_id: prompts[self.request_id]}
            self.check_prompt(prompts)
        if output.routed_experts is not None:
            self.take_rows(*output.routed_experts)
        known = max(len(self.tokens) - 1, 0)
        assert self.num_rows == known or (
            self.at_end and self.finish is None and self.num_rows < known
        )

    def take_rows(self, first: int, rows: Rows) -> None:
        __tracebackhide__ = True
        assert first == self.prompt_len + self.num_rows
        self.num_rows += len(rows)
        self.num_arrays += 1
        self.check(rows, first, first + len(rows))

    def check_prompt(self, prompts: dict[str, Rows]) -> None:
        """That its rows are right each time they came, and whole at least once: another engine may
        be sending them."""
        __tracebackhide__ = True
        assert prompts, "tokens before the rows of their prompt"
        assert self.start is not None
        for rows in prompts.values():
            self.check(rows, self.start, self.start + len(rows))
        assert max(map(len, prompts.values())) == self.prompt_len - self.start

    def check(self, rows: Rows, first: int, end: int) -> None:
        """That `rows` are those of positions `first` to `end`."""
        __tracebackhide__ = True
        check_rows(rows, self.sequence.rows(first, end), first)


def _done(result: Any, non_block: bool) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return future if non_block else result


class ArithmeticExecutor(Executor):
    """Runs steps as a model runner does: it learns tokens and blocks from the scheduler's outputs
    alone."""

    vocab = VOCAB
    counts_steps = False  # whether requests ask for steps too
    received: type[Received] = Received  # what checks the outputs of its requests

    def _init_executor(self) -> None:
        self.accepted = self.rejected = 0  # drafts, where the configuration asks for them
        # KV that waits to be pulled by another instance, by request
        self.sending: dict[str, Any] = {}
        self._drafts: dict[str, list[int]] = {}
        self._sequences: dict[str, Sequence] = {}
        self._kv: list[bytes | None] = [None] * (NUM_BLOCKS * BLOCK)
        self._output: ModelRunnerOutput | None = None

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        return [
            {
                "layer.0": FullAttentionSpec(
                    block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32
                )
            }
        ]

    def determine_available_memory(self) -> list[int]:
        return [NUM_BLOCKS * self.get_kv_cache_specs()[0]["layer.0"].page_size_bytes]

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        return [["LBNHC"]] if method == "get_supported_kv_cache_layouts" else []

    def check_health(self) -> None:
        pass

    shutdown = check_health

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        self._copy(scheduler_output.kv_cache_block_copies or ())
        self._update(scheduler_output)
        output = self._run(scheduler_output)
        self._output = output
        return _done(None if scheduler_output.total_num_scheduled_tokens else output, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return _done(self._output, non_block)

    def take_draft_token_ids(self) -> DraftTokenIds:
        """Where the scheduler waits for each step: with asynchronous scheduling it never learns of
        drafts."""
        return DraftTokenIds(list(self._drafts), list(self._drafts.values()))

    def sample(self, prefix: bytes, request_id: str) -> int:
        """What comes after `prefix`. The choices of one prompt differ."""
        choice = request_id.partition("_")[0]
        return (
            int.from_bytes(_digest(prefix, int(choice) if choice.isdigit() else 0), "little")
            % self.vocab
        )

    def compute(
        self, request_id: str, sequence: Sequence, tokens: Tokens, start: int, end: int
    ) -> Rows:
        """Puts positions `start` to `end` of `tokens` into the KV cache; gives their rows."""
        known = tokens.prefixes()
        before = [self._kv[slot] for slot in sequence.slots(0, start)]
        assert before == known[:start], f"{request_id}: its blocks hold another prefix"
        for slot, prefix in zip(sequence.slots(start, end), known[start:end], strict=True):
            self._kv[slot] = prefix
        return tokens.rows(start, end)

    def _verify(self, sequence: Tokens, end: int, request_id: str) -> list[int]:
        """What is sampled after the tokens that are known, each draft up to `end` that is right,
        and once more."""
        last = len(self._sequences[request_id].tokens) - 1
        sampled = [self.sample(sequence.prefixes()[last], request_id)]
        for position in range(last + 1, end):
            if sequence[position] != sampled[-1]:
                break
            sampled.append(self.sample(sequence.prefixes()[position], request_id))
        self.accepted += len(sampled) - 1
        self.rejected += end - last - len(sampled)
        return sampled

    def _propose(self, prefix: bytes, request_id: str) -> list[int]:
        """Drafts, of which each is right with a probability of two thirds."""
        drafts = []
        for _ in range(self.vllm_config.num_speculative_tokens):
            token = self.sample(prefix, request_id)
            drafts.append(token if prefix[0] % 3 else (token + 1) % self.vocab)
            prefix = _digest(prefix, drafts[-1])
        return drafts

    def _update(self, step: SchedulerOutput) -> None:
        for request_id in step.finished_req_ids:
            self._sequences.pop(request_id, None)
            self._drafts.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            self._sequences[new.req_id] = Sequence(
                Tokens(new.prompt_token_ids or ()), list(new.block_ids[0])
            )
        cached = step.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            sequence = self._sequences[request_id]
            if request_id in cached.resumed_req_ids:
                self._drafts.pop(request_id, None)
                self._sequences[request_id] = sequence = Sequence(
                    Tokens(cached.all_token_ids[request_id]), []
                )
            sequence.blocks += block_ids[0] if block_ids is not None else []

    def _copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copies whole blocks of KV, (source, destination) each: all are read before any is
        written."""
        copies = [
            (target, self._kv[source * BLOCK : (source + 1) * BLOCK]) for source, target in pairs
        ]
        for target, kv in copies:
            self._kv[target * BLOCK : (target + 1) * BLOCK] = kv

    def _run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        starts = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        cached = step.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        ids = list(step.num_scheduled_tokens)
        sampled, rows, slots = [], [np.empty((0, L, K), np.int16)], [np.empty(0, np.int64)]
        for request_id, count in step.num_scheduled_tokens.items():
            sequence = self._sequences[request_id]
            # It was scheduled as if all drafts in flight were right.
            start = min(starts[request_id], len(sequence.tokens) - 1)
            end = start + count
            tokens = sequence.tokens
            if placeholders := step.scheduled_spec_decode_tokens.get(request_id):
                drafts = self._drafts.get(request_id, [])[: len(placeholders)]
                # where a batch is filled up
                drafts += [self.vocab] * (len(placeholders) - len(drafts))
                tokens = Tokens([*tokens, *drafts])
            slots.append(sequence.slots(start, end))
            rows.append(self.compute(request_id, sequence, tokens, start, end))
            sampled.append([])
            if end >= len(sequence.tokens):
                sampled[-1] += self._verify(tokens, end, request_id)
                sequence.tokens += sampled[-1]
                self._drafts[request_id] = self._propose(sequence.tokens.prefixes()[-1], request_id)
        output = ModelRunnerOutput(
            ids, {request_id: index for index, request_id in enumerate(ids)}, sampled
        )
        if ids:
            offsets = np.cumsum([0, *step.num_scheduled_tokens.values()], dtype=np.int64)
            whole = np.concatenate(rows)
            if captures_weights(self.vllm_config):
                whole = combined(whole, weights_for(whole))
            layer_ids = tuple(LAYER_IDS) if sends_bare_rows(self.vllm_config) else ()
            step_rows = StepRows(whole, np.concatenate(slots), offsets, layer_ids=layer_ids)
            attach(output, step_rows)
        return output


def sent(message: Any) -> Any:
    """A request or a message as it arrives in the other process, by vLLM's own encoding."""
    decoder = (
        engine_core.MsgpackDecoder if isinstance(message, EngineCoreRequest) else MsgpackDecoder
    )
    return decoder(type(message)).decode(MsgpackEncoder().encode(message))


@contextmanager
def no_collections() -> Iterator[None]:
    """vLLM collects all garbage as an engine starts and ends, several times, each of which takes
    longer than a test."""
    nothing = SimpleNamespace(collect=lambda *_: 0, freeze=lambda: None, unfreeze=lambda: None)
    with ExitStack() as stack:
        for module in ("utils.gc_utils", "v1.engine.core", "distributed.parallel_state"):
            stack.enter_context(patch(f"vllm.{module}.gc", nothing))
        yield


class Core(EngineCoreProc):
    """What runs in an engine's process, without its sockets and their threads."""

    def __init__(
        self, vllm_config: VllmConfig, executor_class: type[Executor], log_stats: bool
    ) -> None:
        self.output_queue = queue.Queue()
        self.engines_running = False
        EngineCore.__init__(self, vllm_config, executor_class, log_stats)

    def take(self, request: EngineCoreRequest) -> None:
        """Adds a request that has been through `sent`."""
        __tracebackhide__ = True
        self.add_request(*self.preprocess_add_request(request))

    def turn(self) -> None:
        """One turn of the engine's loop."""
        if self.has_work():
            self._process_engine_step()
        if not self.has_work():
            self._notify_idle_state_callbacks()

    def messages(self) -> Iterator[tuple[int, EngineCoreOutputs]]:
        """What it has sent since, each with the API process that it is for."""
        while not self.output_queue.empty():
            to, message = self.output_queue.get()
            yield to, sent(message)

    @property
    def capture(self) -> SchedulerHooks:
        """The scheduler's side of the capture."""
        return self.scheduler.aux_output_connector

    def is_busy(self) -> bool:
        """Whether anything is left to do; KV that waits to be pulled may stay, for which vLLM makes
        empty steps."""
        if not self.model_executor.sending:
            return bool(self.scheduler.has_requests() or self.batch_queue)
        runs = any(step.total_num_scheduled_tokens for _, step, *_ in self.batch_queue or ())
        is_waited_for = (
            self.scheduler.has_unfinished_requests() or len(self.capture.output_queue) > 0
        )
        return is_waited_for or runs or bool(self.scheduler.finished_req_ids)

    def empty_prefix_cache(self) -> None:
        assert self.scheduler.reset_prefix_cache()


@cache
def _config(is_async: bool, drafts: int = 0) -> VllmConfig:
    directory = Path(mkdtemp())
    model = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": VOCAB,
    }
    model |= {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    model |= {"num_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 4096}
    (directory / "config.json").write_text(json.dumps(model))
    speculative = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 2}
    return EngineArgs(
        model=str(directory),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        block_size=BLOCK,
        max_model_len=BLOCK * (NUM_BLOCKS - 1),
        async_scheduling=is_async,
        scheduler_cls="routed_experts.capture.scheduler.scheduler.make_scheduler",
        distributed_executor_backend=ArithmeticExecutor,
        speculative_config=speculative if drafts else None,
    ).create_engine_config()


def engine(
    is_async: bool = True,
    chunk: int = 64,  # tokens of a step
    max_num_seqs: int = 16,
    num_blocks: int | None = None,  # KV blocks of 16 tokens that it may use; few make it preempt
    drafts: int = 0,  # tokens that are drafted after each
    stages: int = 1,  # of a pipeline: so many more steps are in flight
    # the worker's side of the connector has to be `executor`'s
    kv_transfer: KVTransferConfig | None = None,
    executor: type[ArithmeticExecutor] = ArithmeticExecutor,
    weights: bool = False,  # whether rows have weights
    captures: bool = True,  # whether the scheduler is ours, or vLLM's own
    bare_rows: bool = False,  # whether the front end is not ours
    replays: bool = False,  # whether tokens whose KV is computed again take the experts that they had
) -> Core:
    """An engine with our scheduler."""
    config = deepcopy(_config(is_async and not drafts, drafts))
    # vLLM's check allows it for drafts of other methods only, and not with a connector on a CPU.
    config.scheduler_config.async_scheduling = is_async
    config.kv_transfer_config = kv_transfer
    config.additional_config = {
        WEIGHTS_KEY: weights,
        BARE_ROWS_KEY: bare_rows,
        INPUT_KEY: replays,
        RECOMPUTE_KEY: replays,
    }
    if bare_rows:
        architecture = config.model_config.model_arch_config
        architecture.num_experts = NUM_EXPERTS
        architecture.total_num_hidden_layers = DECODER_LAYERS
    config.scheduler_config.max_num_batched_tokens = chunk
    config.scheduler_config.max_num_seqs = max_num_seqs
    if num_blocks is not None:
        config.cache_config.num_gpu_blocks_override = num_blocks
        config.model_config.max_model_len = (num_blocks - 1) * BLOCK
    if not captures:
        config.scheduler_config.scheduler_cls = None
    with no_collections():
        core = Core(config, executor, log_stats=False)
    if captures and not bare_rows:
        core.capture.output_queue.part_bytes = PART_BYTES
    if stages > 1:
        core.batch_queue_size = stages + is_async
        core.batch_queue = deque(maxlen=core.batch_queue_size)
        core.step_fn = core.step_with_batch_queue
    return core


def check_nothing_is_left(capture: Any) -> None:
    """In a scheduler whose requests have all ended."""
    queue = capture.output_queue
    requests = capture.distributor.requests
    assert len(queue) == 0
    assert not queue._waiting
    assert not queue._last_rows
    assert not requests.running
    assert not requests.prefilling
    assert not requests.alone
    assert not requests.streams
    assert not requests.ended
    assert not capture.distributor.recomputed
    assert not capture._steps
    assert not capture.cache._readers
    assert not capture.prefill_rows._to_export
    assert not capture.prefill_rows.pulls


def children_of(request: EngineCoreRequest, n: int) -> list[EngineCoreRequest]:
    """The requests that vLLM makes of one with `n` choices: itself, or one for each."""
    if n == 1:
        return [request]
    parent = ParentRequest(request)
    children = [copy(request) for _ in range(n)]
    for index, child in enumerate(children):
        child.request_id, child.sampling_params = parent.get_child_info(index)
    return children


class Client:
    """Takes the place of an API process: adds and aborts requests, and keeps what the engines send,
    in order."""

    def __init__(self, *engines: Core, index: int = 0) -> None:
        self.engines = engines
        self.received: dict[str, Received] = {}
        # by id, and the request that they came with
        self.prompts: dict[bytes, dict[str, Rows]] = defaultdict(dict)
        self.starts: dict[bytes, int] = {}  # of prompts, by id: the first row that is to be sent
        # the ids of the outputs in each, but for that with the engine's numbers
        self.messages: list[list[str]] = []
        self.stats: list[EngineStats] = []
        self.causes: Counter[Cause] = Counter()  # why rows are unknown
        self.explained: Counter[str] = Counter()  # by request, how many that has been said of
        self.index = index
        self._unpackers = [Unpacker() for _ in engines]
        self._weighed: set[str] = set()  # requests that ask for weights
        # of requests that ask for them: the step of each row that came, by its position
        self.steps_of_rows: dict[str, dict[int, int]] = {}
        # rows that came with theirs, or should have
        self.num_weights = self.num_without_weights = 0

    def add(
        self,
        name: str,
        prompt: list[int],
        start: int | None = 0,
        n: int = 1,
        max_tokens: int = 4,
        kv_transfer_params: dict[str, Any] | None = None,
        weights: bool = False,
        at_end: bool = False,
        allow_missing: bool = False,
        own_prompt: bool = False,
        steps: bool = False,
    ) -> list[str]:
        """Adds a request, as vLLM does one for each of `n` choices, spread over the engines; gives
        their ids. The first prompt row to send is `start`; None for no opt-in."""
        opt_in = OptIn(
            start or 0, os.urandom(16), n > 1, weights, at_end, allow_missing, own_prompt, steps
        )
        self.starts[opt_in.prompt_id] = start or 0
        extra_args: dict[str, Any] = {}
        if start is not None:
            extra_args[OPT_IN_ARG] = opt_in.encode()
        if kv_transfer_params is not None:
            extra_args["kv_transfer_params"] = kv_transfer_params
        sampling = SamplingParams(
            n=n, max_tokens=max_tokens, detokenize=False, extra_args=extra_args or None
        )
        request = EngineCoreRequest(
            name, prompt, None, sampling, None, time.time(), None, None, None
        )
        request.client_index = self.index
        request.external_req_id = name
        children = children_of(request, n)
        request_ids = [child.request_id for child in children]
        if weights:
            self._weighed.update(request_ids)
        if steps:
            self.steps_of_rows.update((request_id, {}) for request_id in request_ids)
        for index, child in enumerate(children):
            core = self.engines[index % len(self.engines)]
            sender = child.request_id, len(prompt), start, opt_in.prompt_id, Tokens(prompt)
            received = core.model_executor.received(self, core.model_executor, *sender)
            received.at_end = at_end
            received.own_prompt = own_prompt
            self.received[child.request_id] = received
            core.take(sent(child))
        return request_ids

    def answer(
        self, name: str, prompt: list[int], start: int | None = 0, **options: Any
    ) -> Received:
        """Adds a request and steps until nothing is left to do; gives what came for it, or for its
        first choice."""
        __tracebackhide__ = True
        first, *_ = self.add(name, prompt, start, **options)
        self.run()
        return self.received[first]

    def abort(self, *request_ids: str) -> None:
        for core in self.engines:
            core.abort_requests(list(request_ids))

    def pause(self, mode: str, clear_cache: bool) -> None:
        """What the API process does for `/pause`: returns when the engines have nothing left to
        do."""
        self.wait(*[core.pause_scheduler(mode, clear_cache) for core in self.engines])

    def wait(self, *pending: Any) -> None:
        """Steps until the engines have done what they were asked for."""
        futures = [result for result in pending if isinstance(result, Future)]
        while not all(future.done() for future in futures):
            self.step()
        for future in futures:
            future.result()
        self.step()  # takes what the engines said without a step

    def step(self, *others: "Client") -> None:
        """One turn of each engine's loop, and its messages, through vLLM's own encoding, to this
        and other clients."""
        __tracebackhide__ = True
        for index, core in enumerate(self.engines):
            core.turn()
            for to, message in core.messages():
                (client,) = [client for client in (self, *others) if client.index == to]
                client.receive(message, index)

    def steps(self, count: int) -> None:
        __tracebackhide__ = True
        for _ in range(count):
            self.step()

    def run(self, *others: "Client", steps: int = 2_000) -> None:
        """Steps until nothing is left to do, for this and other clients of the same engines."""
        __tracebackhide__ = True
        while any(core.is_busy() for core in self.engines):
            assert steps > 0, "the engine does not come to an end"
            steps -= 1
            self.step(*others)

    def finish(
        self,
        but: str | Iterable[str] = (),  # requests that were aborted
        # how many rows came as unknown; None where that is looked at otherwise
        missing: int | None = 0,
        # whether the engine gave rows up, as a connector did what is not expected of it
        forgets: bool = False,
        ends: tuple[FinishReason, ...] = (FinishReason.LENGTH,),  # of the other requests
    ) -> None:
        """Steps until nothing is left to do. Rows are checked as they come; here that all of them
        came, with their weights, and that nothing is left in the engines."""
        self.run()
        for request_id in [but] if isinstance(but, str) else but:
            self.received.pop(request_id, None)
        assert all(request.finish in ends for request in self.received.values())
        assert missing in (None, self.missing())
        assert self.num_without_weights == 0
        assert any(stats.rows_forgotten for stats in self.stats) == forgets
        for core in self.engines:
            check_nothing_is_left(core.capture)

    def missing(self) -> int:
        """How many rows came as unknown."""
        return sum(len(request.missing) for request in self.received.values())

    def faults(self) -> int:
        """How many rows came as unknown without a cause; each prompt has one choice."""
        return sum(
            len(request.missing) - self.explained[name] for name, request in self.received.items()
        )

    def times_sent(self, *request_ids: str) -> int:
        """How often the prompt of these requests was sent."""
        (prompt_id,) = {self.received[request_id].prompt_id for request_id in request_ids}
        return len(self.prompts[prompt_id])

    def receive(self, message: EngineCoreOutputs, engine_index: int = 0) -> None:
        """Takes a message of one of the engines."""
        __tracebackhide__ = True
        unpacker = self._unpackers[engine_index]
        notes = Notes.decode(unpacker.open(message.outputs, message=message.timestamp))
        if notes.stats is not None:
            self.stats.append(notes.stats)
        for unknown in notes.unknown:
            self.causes[unknown.cause] += unknown.num_rows
            self.explained[unknown.request_id] += unknown.num_rows
        unpacked = list(unpacker.rows(message.outputs))
        for output, start, run, place in unpacked:
            brings = RowsOutput.of(output)
            request_id = brings.request_id if brings else output.request_id
            rows = run.of(place)
            if request_id in self.steps_of_rows:
                came = zip(range(start, start + len(rows)), steps_of(rows).tolist(), strict=True)
                self.steps_of_rows[request_id].update(came)
                rows = without_steps(rows)
            output.routed_experts = start, self._ids(request_id, rows)
        self.messages.append([_said(output) for output in message.outputs])
        for output in message.outputs:
            if (brings := RowsOutput.of(output)) is None:
                self.received[output.request_id].take(output)
            elif brings.kind == PROMPT_ROWS:
                self._take_prompt(brings, output)
            elif brings.prompt_id == (request := self.received[brings.request_id]).prompt_id:
                assert not output.new_token_ids
                request.take_rows(*output.routed_experts)

    def _ids(self, request_id: str, rows: Rows) -> Rows:
        """Those of `rows`, whose weights are checked if the request asks for them; others are sent
        ids alone."""
        if request_id not in self._weighed:
            assert rows.shape[1:] == (L, K)
            return rows
        ids, weights = ids_of(rows), weights_of(rows)
        unknown = (weights.view(np.int32) == -1).all(axis=(1, 2))
        self.num_weights += len(rows)
        self.num_without_weights += int((unknown & (ids >= 0).all(axis=(1, 2))).sum())
        known = ~unknown
        assert (ids[known] >= 0).all()
        assert np.array_equal(weights[known].view(np.int32), weights_for(ids[known]).view(np.int32))
        return ids

    def _take_prompt(self, brings: RowsOutput, output: EngineCoreOutput) -> None:
        """Each request sends a prompt once, in parts that follow each other."""
        assert not output.new_token_ids
        assert output.finish_reason is None
        start, rows = output.routed_experts
        of_prompt = self.prompts[brings.prompt_id]
        before = of_prompt.get(brings.request_id, rows[:0])
        assert start == self.starts[brings.prompt_id] + len(before)
        of_prompt[brings.request_id] = np.concatenate([before, rows])


def rows_of_prompt(request_id: str) -> str:
    """What stands in `Client.messages` for an output with rows of a prompt that come with this
    request."""
    return f"rows of the prompt of {request_id}"


def _said(output: EngineCoreOutput) -> str:
    brings = RowsOutput.of(output)
    return (
        rows_of_prompt(brings.request_id)
        if brings and brings.kind == PROMPT_ROWS
        else output.request_id
    )


SHARED = 2 * BLOCK + 5


def share_partly(
    core: Core, client: Client, prompt: list[int], max_tokens: int = 4
) -> list[tuple[int, int]]:
    """Adds a request "shares" that hits SHARED tokens of "source", which is running, the last of
    them in a part of a block.

    vLLM finds such hits in hybrid models only. What follows is its own: it copies the block for the
    request, which goes on writing into the copy. Gives the copies, as they are scheduled.
    """
    copies: list[tuple[int, int]] = []
    manager, schedule = core.scheduler.kv_cache_manager, core.scheduler.schedule
    look_up = manager.get_computed_blocks

    def hit(request: Request, *limit: Any) -> Any:
        hit = look_up(request, *limit)
        if request.request_id != "shares":
            return hit
        (tables,) = manager.coordinator.single_type_managers
        blocks = list(tables.req_to_blocks["source"][: -(-SHARED // BLOCK)])
        return type(hit[0])((blocks,)), SHARED, *hit[2:]

    def scheduled(*args: Any, **kwargs: Any) -> Any:
        step = schedule(*args, **kwargs)
        copies.extend(step.kv_cache_block_copies or ())
        return step

    manager.get_computed_blocks, core.scheduler.schedule = hit, scheduled
    client.add("shares", [*prompt[:SHARED], 1, 2, 3], max_tokens=max_tokens)
    return copies


def requests_at_random(
    client: Client,
    dice: random.Random,
    turns: int,
    disturb: Callable[[], object],  # what else happens in each turn
    ns: tuple[int, ...] = (),  # how many choices prompts have; none where each has one
    length: int = 120,  # of the longest prompt
    chances: tuple[float, float] = (0.6, 0.2),  # of a request, and of an abort, in each turn
) -> set[str]:
    """Shared prefixes, with and without the opt-in, starts within prompts, weights where there are
    some, aborts; gives those that were aborted."""
    has_weights = client.engines[0].capture.cache.has_weights
    asks_for_steps = client.engines[0].model_executor.counts_steps
    stems = [tokens(length, seed=100 + stem) for stem in range(3)]
    gone: set[str] = set()
    for turn in range(turns):
        if dice.random() < chances[0]:
            prompt = dice.choice(stems)[: dice.randrange(1, length)] + dice.choices(
                range(VOCAB), k=dice.randrange(3)
            )
            start = dice.choice((None, 0, 0, dice.randrange(len(prompt) + 1)))
            n = dice.choice(ns) if ns else 1
            forms = {"at_end": turn % 3 == 0, "weights": has_weights and turn % 2 == 0}
            forms["steps"] = asks_for_steps and turn % 4 != 0
            client.add(f"r{turn}", prompt, start, n=n, max_tokens=dice.randrange(1, 30), **forms)
        if client.received and dice.random() < chances[1]:
            gone.add(one := dice.choice(list(client.received)))
            client.abort(one)
        disturb()
        client.steps(dice.randrange(6))
    return gone
