"""vLLM's real engine core and scheduler around a model that does arithmetic, so that every row is known in advance.

No weights, no processes, no sockets: `engine` makes an `EngineCore`, `Client` takes the place of the API process, and
the executor that of the workers. The executor keeps a KV cache of prefixes, and fails when a step finds another prefix
in its blocks than its own; the row of a token says which prefix the token ends.

A test of a situation makes an engine, adds requests, lets something happen between steps, and calls `finish`. Every row
is checked as it comes (`Received`), and `finish` checks that all have come and that nothing is left:

    def test_an_abort_in_the_prefill(is_async: bool) -> None:
        client = Client(engine(is_async, chunk=48))
        client.add("gone", tokens(150))
        client.steps(2)
        client.abort("gone")
        client.add("stays", tokens(150))
        client.finish(but="gone")

Others add their own part to it: `served` an API process over HTTP, `loads` KV connectors (`engine_with_store`),
`offloading` vLLM's own connector (`engine_that_offloads`), `test_weights` weights that change.
"""

import hashlib
import json
import os
import queue
import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass
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
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from routed_experts.capture.engine.scheduler import SchedulerConnector
from routed_experts.capture.engine.transport import attach
from routed_experts.capture.message import OPT_IN_ARG, OptIn, Unpacker, request_of_prompt
from routed_experts.capture.pipeline import StepRows
from routed_experts.capture.stats import STATS_OUTPUT_ID, EngineStats

L, K = 8, 64  # a row of 1 KiB, so that a few dozen are what the engine calls large
AT_ONCE_BYTES, PART_BYTES = 16 << 10, 64 << 10  # a prompt of 17 tokens is read by the thread, one of 65 comes in parts
BLOCK = 16
VOCAB = 500
NUM_BLOCKS = 64
NUM_EXPERTS = 1 << 15

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
        """The rows [n, L, K] of positions `first` to `end`: each layer's ids count from two bytes of the prefix."""
        ids = np.frombuffer(b"".join(self.prefixes()[first:end]), dtype=np.int16).reshape(-1, L, 1)
        return (ids & 0x3FFF) + np.arange(K, dtype=np.int16)


@dataclass
class Sequence:
    tokens: Tokens
    blocks: list[int]

    def slots(self, first: int, end: int) -> np.ndarray:
        positions = np.arange(first, end)
        return np.array(self.blocks)[positions // BLOCK] * BLOCK + positions % BLOCK


class ArithmeticExecutor(Executor):
    """Runs steps as a model runner does: it learns tokens and blocks from the scheduler's outputs alone.

    Attributes:
        accepted, rejected: how many drafts were, where the configuration asks for them.
    """

    vocab = VOCAB

    def _init_executor(self) -> None:
        self.accepted = self.rejected = 0
        self._drafts: dict[str, list[int]] = {}
        self._sequences: dict[str, Sequence] = {}
        self._kv: list[bytes | None] = [None] * (NUM_BLOCKS * BLOCK)
        self._output: ModelRunnerOutput | None = None

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        return [{"layer.0": self._spec()}]

    @staticmethod
    def _spec() -> FullAttentionSpec:
        return FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)

    def determine_available_memory(self) -> list[int]:
        return [NUM_BLOCKS * self._spec().page_size_bytes]

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        return [["LBNHC"]] if method == "get_supported_kv_cache_layouts" else []

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        self._copy(scheduler_output.kv_cache_block_copies or ())
        self._update(scheduler_output)
        output = self._run(scheduler_output)
        done: Future[ModelRunnerOutput | None] = Future()
        done.set_result(None if scheduler_output.total_num_scheduled_tokens else output)
        self._output = output
        return done if non_block else done.result()

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        assert self._output is not None
        done: Future[ModelRunnerOutput] = Future()
        done.set_result(self._output)
        return done if non_block else self._output

    def take_draft_token_ids(self) -> DraftTokenIds:
        """Where the scheduler waits for each step: with asynchronous scheduling it never learns of drafts."""
        return DraftTokenIds(list(self._drafts), list(self._drafts.values()))

    def sample(self, prefix: bytes, request_id: str) -> int:
        """What comes after `prefix`. The choices of one prompt differ."""
        choice = request_id.partition("_")[0]
        return int.from_bytes(_digest(prefix, int(choice) if choice.isdigit() else 0), "little") % self.vocab

    def compute(self, request_id: str, sequence: Sequence, tokens: Tokens, start: int, end: int) -> Rows:
        """Puts positions `start` to `end` of `tokens` into the KV cache; gives their rows."""
        known = tokens.prefixes()
        before = [self._kv[slot] for slot in sequence.slots(0, start)]
        assert before == known[:start], f"{request_id}: its blocks hold another prefix"
        for slot, prefix in zip(sequence.slots(start, end), known[start:end], strict=True):
            self._kv[slot] = prefix
        return tokens.rows(start, end)

    def _verify(self, sequence: Tokens, end: int, request_id: str) -> list[int]:
        """What is sampled behind the tokens that are known: after each draft that is right, and once more.

        Args:
            sequence: tokens, and drafts up to `end`.
        """
        first = len(self._sequences[request_id].tokens)
        sampled: list[int] = []
        while not sampled or (first + len(sampled) - 1 < end and sequence[first + len(sampled) - 1] == sampled[-1]):
            sampled.append(self.sample(sequence.prefixes()[first + len(sampled) - 1], request_id))
        self.accepted += len(sampled) - 1
        self.rejected += end - first - (len(sampled) - 1)
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
            self._sequences[new.req_id] = Sequence(Tokens(new.prompt_token_ids or ()), list(new.block_ids[0]))
        cached = step.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            sequence = self._sequences[request_id]
            if request_id in cached.resumed_req_ids:
                self._drafts.pop(request_id, None)
                sequence.blocks = []
                sequence.tokens = Tokens(cached.all_token_ids[request_id])
            sequence.blocks += block_ids[0] if block_ids is not None else []

    def _copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copies whole blocks of KV, (source, destination) each: all are read before any is written."""
        copies = [(target, self._kv[source * BLOCK : (source + 1) * BLOCK]) for source, target in pairs]
        for target, kv in copies:
            self._kv[target * BLOCK : (target + 1) * BLOCK] = kv

    def _run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        starts = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        starts |= dict(
            zip(step.scheduled_cached_reqs.req_ids, step.scheduled_cached_reqs.num_computed_tokens, strict=True)
        )
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
                drafts += [self.vocab] * (len(placeholders) - len(drafts))  # where a batch is filled up
                tokens = Tokens([*tokens, *drafts])
            slots.append(sequence.slots(start, end))
            rows.append(self.compute(request_id, sequence, tokens, start, end))
            sampled.append([])
            if end >= len(sequence.tokens):
                sampled[-1] += self._verify(tokens, end, request_id)
                sequence.tokens += sampled[-1]
                self._drafts[request_id] = self._propose(sequence.tokens.prefixes()[-1], request_id)
        output = ModelRunnerOutput(ids, {request_id: index for index, request_id in enumerate(ids)}, sampled)
        if ids:
            offsets = np.cumsum([0, *step.num_scheduled_tokens.values()], dtype=np.int64)
            attach(output, StepRows(np.concatenate(rows), np.concatenate(slots), offsets))
        return output


def sent(message: Any) -> Any:
    """A request or a message as it arrives in the other process, by vLLM's own encoding."""
    return MsgpackDecoder(type(message)).decode(MsgpackEncoder().encode(message))


@contextmanager
def no_collections() -> Iterator[None]:
    """vLLM collects all garbage as an engine starts and ends, several times, each of which takes longer than a test."""
    nothing = SimpleNamespace(collect=lambda *_: 0, freeze=lambda: None, unfreeze=lambda: None)
    with ExitStack() as stack:
        for module in ("utils.gc_utils", "v1.engine.core", "distributed.parallel_state"):
            stack.enter_context(patch(f"vllm.{module}.gc", nothing))
        yield


class Core(EngineCoreProc):
    """What runs in an engine's process, without its sockets and their threads."""

    def __init__(self, vllm_config: VllmConfig, executor_class: type[Executor], log_stats: bool) -> None:
        self.output_queue = queue.Queue()
        self.engines_running = False
        EngineCore.__init__(self, vllm_config, executor_class, log_stats)

    def take(self, request: EngineCoreRequest) -> None:
        """Adds a request that has been through `sent`."""
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
    def capture(self) -> SchedulerConnector:
        """The scheduler's side of the capture."""
        return self.scheduler.aux_output_connector


@cache
def _config(is_async: bool, drafts: int = 0) -> VllmConfig:
    directory = Path(mkdtemp())
    model = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
    }
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
        scheduler_cls="routed_experts.capture.engine.scheduler.make_scheduler",
        distributed_executor_backend=ArithmeticExecutor,
        speculative_config=speculative if drafts else None,
    ).create_engine_config()


def engine(
    is_async: bool = True,
    chunk: int = 64,
    max_num_seqs: int = 16,
    num_blocks: int | None = None,
    drafts: int = 0,
    stages: int = 1,
    kv_transfer: KVTransferConfig | None = None,
    executor: type[ArithmeticExecutor] = ArithmeticExecutor,
) -> Core:
    """An engine with our scheduler.

    Args:
        chunk: tokens of a step.
        num_blocks: KV blocks of 16 tokens that it may use; few make it preempt.
        drafts: tokens that are drafted after each.
        stages: of a pipeline: so many more steps are in flight.
        kv_transfer: its KV connector, the worker's side of which `executor` has to be.
    """
    config = deepcopy(_config(is_async and not drafts, drafts))
    # vLLM's check allows it for drafts of other methods only, and not with a connector on a CPU.
    config.scheduler_config.async_scheduling = is_async
    config.kv_transfer_config = kv_transfer
    config.scheduler_config.max_num_batched_tokens = chunk
    config.scheduler_config.max_num_seqs = max_num_seqs
    if num_blocks is not None:
        config.cache_config.num_gpu_blocks_override = num_blocks
        config.model_config.max_model_len = (num_blocks - 1) * BLOCK
    with no_collections():
        core = Core(config, executor, log_stats=False)
    core.capture.at_once_bytes, core.capture.output_queue.part_bytes = AT_ONCE_BYTES, PART_BYTES
    if stages > 1:
        core.batch_queue_size = stages + is_async
        core.batch_queue = deque(maxlen=core.batch_queue_size)
        core.step_fn = core.step_with_batch_queue
    return core


@dataclass
class Received:
    """What came for one request, checked as it comes.

    Attributes:
        sequence: tokens of the prompt, and after them those that came.
        num_rows: generated rows that came.
    """

    prompt_len: int
    start: int | None
    prompt_id: bytes
    sequence: Tokens
    num_rows: int = 0
    finish: FinishReason | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def tokens(self) -> list[int]:
        return self.sequence[self.prompt_len :]

    def take(self, output: EngineCoreOutput, prompts: list[Rows]) -> None:
        """Takes an output; `prompts` are the rows of its prompt, each time that they came so far."""
        assert self.finish is None, "an output after the last one"
        is_first = len(self.sequence) == self.prompt_len
        self.sequence += output.new_token_ids
        self.finish = output.finish_reason
        self.kv_transfer_params = output.kv_transfer_params
        if self.start is None:
            assert output.routed_experts is None
            return
        if is_first and output.new_token_ids and self.start < self.prompt_len:
            assert prompts, "tokens before the rows of their prompt"
            self.check_prompt(prompts)
        if output.routed_experts is not None:
            first, rows = output.routed_experts
            assert first == self.prompt_len + self.num_rows
            self.num_rows += len(rows)
            self.check(rows, first, first + len(rows))
        assert self.num_rows == max(len(self.tokens) - 1, 0)

    def check_prompt(self, prompts: list[Rows]) -> None:
        """That they are right each time, and whole at least once: another engine may be sending them."""
        assert self.start is not None
        for rows in prompts:
            self.check(rows, self.start, self.start + len(rows))
        assert max(map(len, prompts)) == self.prompt_len - self.start

    def check(self, rows: Rows, first: int, end: int) -> None:
        """That `rows` are those of positions `first` to `end`."""
        assert np.array_equal(rows, self.sequence.rows(first, end))


class Client:
    """Takes the place of an API process: adds and aborts requests, and keeps what the engines send, in order.

    Attributes:
        received: by request id.
        prompts: the rows of prompts, by `prompt_id`; each time that they came.
        sent_with: the same, by the request that they were sent with.
        messages: the ids of the outputs in each message, but for that with the engine's numbers.
        stats: the numbers.
    """

    def __init__(self, *engines: Core, index: int = 0) -> None:
        self.engines = engines
        self.received: dict[str, Received] = {}
        self.prompts: dict[bytes, list[Rows]] = defaultdict(list)
        self.sent_with: dict[str, Rows] = {}
        self._parts: dict[str, int] = {}  # by the request that they are sent with, which of the times it is
        self.messages: list[list[str]] = []
        self.stats: list[EngineStats] = []
        self.index = index
        self._unpackers = [Unpacker() for _ in engines]

    def add(
        self,
        name: str,
        prompt: list[int],
        start: int | None = 0,
        n: int = 1,
        max_tokens: int = 4,
        kv_transfer_params: dict[str, Any] | None = None,
        **params: Any,
    ) -> list[str]:
        """Adds a request, as vLLM does one for each of `n` choices, spread over the engines; gives their ids.

        Args:
            start: the first prompt row to send; None for no opt-in.
        """
        opt_in = OptIn(start or 0, os.urandom(16), shared=n > 1)
        extra_args: dict[str, Any] = {} if start is None else {OPT_IN_ARG: opt_in.encode()}
        if kv_transfer_params is not None:
            extra_args["kv_transfer_params"] = kv_transfer_params
        sampling = SamplingParams(
            n=n,
            max_tokens=max_tokens,
            detokenize=False,
            extra_args=extra_args or None,
            **params,
        )
        request = EngineCoreRequest(name, prompt, None, sampling, None, time.time(), None, None, None)
        request.client_index, request.external_req_id = self.index, name
        parent = ParentRequest(request)
        ids = [name] if n == 1 else [parent.get_child_info(index)[0] for index in range(n)]
        for index, request_id in enumerate(ids):
            child = copy(request)
            child.request_id = request_id
            child.sampling_params = sampling if n == 1 else parent.get_child_info(index)[1]
            self.received[request_id] = self.expect(request_id, len(prompt), start, opt_in.prompt_id, Tokens(prompt))
            self.engines[index % len(self.engines)].take(sent(child))
        return ids

    def expect(self, request_id: str, *about: Any) -> Received:
        """What checks the outputs of a request."""
        return Received(*about)

    def abort(self, *request_ids: str) -> None:
        for core in self.engines:
            core.abort_requests(list(request_ids))

    def pause(self, mode: str, clear_cache: bool) -> None:
        """What the API process does for `/pause`: returns when the engines have nothing left to do."""
        pending = [core.pause_scheduler(mode, clear_cache) for core in self.engines]
        while any(pause is not None and not pause.done() for pause in pending):
            self.step()
        for pause in pending:
            assert pause is None or pause.result() is None
        self.step()  # takes what the engines said without a step

    def step(self, *others: "Client") -> None:
        """One turn of each engine's loop, and its messages, through vLLM's own encoding, to this and other clients."""
        for index, core in enumerate(self.engines):
            core.turn()
            for to, message in core.messages():
                (client,) = [client for client in (self, *others) if client.index == to]
                client.receive(message, index)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def run(self, *others: "Client", steps: int = 10_000) -> None:
        """Steps until nothing is left to do, for this and other clients of the same engines."""
        while any(core.scheduler.has_requests() or core.batch_queue for core in self.engines):
            assert steps > 0, "the engine does not come to an end"
            steps -= 1
            self.step(*others)

    def finish(self, but: str | Iterable[str] = ()) -> None:
        """Steps until nothing is left to do. All requests `but` these must have ended by their length.

        Rows are checked as they come; here that all of them came, and that nothing is left in the engines.
        """
        self.run()
        self.check_finished(but)

    def check_finished(self, but: str | Iterable[str] = ()) -> None:
        for request_id in [but] if isinstance(but, str) else but:
            self.received.pop(request_id, None)
        for request in self.received.values():
            assert request.finish is FinishReason.LENGTH
        for core in self.engines:
            assert core.capture.num_tracked == 0
            assert len(core.capture.output_queue) == 0
            assert core.capture._steps == {}

    def times_sent(self, *request_ids: str) -> int:
        """How often the prompt of these requests was sent."""
        (prompt_id,) = {self.received[request_id].prompt_id for request_id in request_ids}
        return len(self.prompts[prompt_id])

    def receive(self, message: EngineCoreOutputs, engine_index: int = 0) -> None:
        """Takes a message of one of the engines."""
        if message.outputs and message.outputs[0].request_id == STATS_OUTPUT_ID:
            self.stats.append(EngineStats.decode(message.outputs.pop(0).kv_transfer_params))
        unpacked = list(self._unpackers[engine_index].unpack(message.outputs, message=message.timestamp))
        for output, start, rows in unpacked:
            output.routed_experts = start, rows
        self.messages.append([output.request_id for output in message.outputs])
        for output in message.outputs:
            self._take(output)

    def _take(self, output: EngineCoreOutput) -> None:
        sender = request_of_prompt(output.request_id)
        if sender is not None:
            assert not output.new_token_ids
            assert output.finish_reason is None
            request, (start, rows) = self.received[sender], output.routed_experts
            times = self.prompts[request.prompt_id]
            if start == request.start:  # the first part
                self._parts[sender] = len(times)
                times.append(rows)
            else:
                before = times[self._parts[sender]]
                assert request.start is not None
                assert start == request.start + len(before)
                times[self._parts[sender]] = np.concatenate([before, rows])
            self.sent_with[sender] = times[self._parts[sender]]
            return
        request = self.received[output.request_id]
        request.take(output, self.prompts.get(request.prompt_id, []))


def requests_at_random(
    client: Client,
    dice: random.Random,
    turns: int,
    disturb: Callable[[], object],
    ns: tuple[int, ...] = (),
    length: int = 120,
    chances: tuple[float, float] = (0.6, 0.2),
) -> set[str]:
    """Shared prefixes, with and without the opt-in, starts within prompts, aborts; gives those that were aborted.

    Args:
        disturb: what else happens in each turn.
        ns: how many choices prompts have; none where each has one.
        length: of the longest prompt.
        chances: of a request, and of an abort, in each turn.
    """
    stems = [tokens(length, seed=100 + stem) for stem in range(3)]
    gone: set[str] = set()
    for turn in range(turns):
        if dice.random() < chances[0]:
            prompt = dice.choice(stems)[: dice.randrange(1, length)] + dice.choices(range(VOCAB), k=dice.randrange(3))
            start = dice.choice((None, 0, 0, dice.randrange(len(prompt) + 1)))
            n = dice.choice(ns) if ns else 1
            client.add(f"r{turn}", prompt, start, n=n, max_tokens=dice.randrange(1, 30))
        if client.received and dice.random() < chances[1]:
            gone.add(one := dice.choice(list(client.received)))
            client.abort(one)
        disturb()
        client.steps(dice.randrange(6))
    return gone
