"""vLLM's whole API process, served over HTTP, with the engine core in its event loop: no process
has to be started.

Around the engine of `engine`, where everything is real but the model, or around a worker with a
real one. A test asks a server of `serving` as a client does, and `check` holds an answer against
the rows that its tokens have.
"""

import asyncio
import os
import shutil
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import uvicorn
from vllm import triton_utils
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.envs import disable_envs_cache
from vllm.model_executor.models import registry
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from routed_experts.capture.wire.rows import captures_weights, takes_input
from routed_experts.server.cli import serve
from routed_experts.server.cli.serve import cli_env_setup
from routed_experts.server.outputs.folders import default_folder
from tests.contract import engine as around
from tests.contract.engine import (
    BLOCK,
    DECODER_LAYERS,
    LAYER_IDS,
    NUM_BLOCKS,
    NUM_EXPERTS,
    Core,
    K,
    L,
    Rows,
    Tokens,
)
from tests.e2e.harness import Answer, Server, free_port
from tests.e2e.harness import serving as serving_processes
from tests.rows import check_rows

try:
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
except ImportError:  # vLLM 0.28: has both here
    from vllm.entrypoints.openai.api_server import build_app, init_app_state

SIZES = ("--block-size", str(BLOCK), "--max-model-len", str(BLOCK * (NUM_BLOCKS - 1)))
"""Of the engine; the flags that every server around it needs."""


def rows_of(tokens: Iterable[int], first: int = 0) -> Rows:
    """The rows of `tokens` from position `first` on."""
    sequence = Tokens(tokens)
    return sequence.rows(first, len(sequence))


def every_layer_of(tokens: Iterable[int], first: int = 0) -> Rows:
    """The same with every decoder layer, as vLLM's own capture has it: zeros in layers without
    experts."""
    rows = rows_of(tokens, first)
    every = np.zeros((len(rows), DECODER_LAYERS, K), dtype=rows.dtype)
    every[:, LAYER_IDS] = rows
    return every


def check(answer: Answer, tokens: int | None = None) -> None:
    """Every row of an answer, which must be of `tokens` tokens, is the one that its tokens have."""
    sequence = [*answer.prompt, *answer.tokens]
    assert tokens in (None, len(answer.tokens))
    check_rows(answer.prompt_rows, rows_of(answer.prompt, answer.start), answer.start)
    check_rows(answer.rows, rows_of(sequence[:-1], len(answer.prompt)), len(answer.prompt))


class ServedExecutor(around.ArithmeticExecutor):
    """Answers what the API process asks of workers too."""

    layer_ids = LAYER_IDS
    groups = (1, 1, 1)  # of experts, as `RoutedExpertsInfo` has them
    # tokens of the tiny model that are a character each, and not the one that ends a text
    vocab = 94

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        if method == "routed_experts_info":
            info = {
                "num_layers": L,
                "top_k": K,
                "num_experts": NUM_EXPERTS,
                "layer_ids": self.layer_ids,
            }
            has_weights = captures_weights(self.vllm_config)
            info |= {"weights": has_weights, "weights_scale": [1.0] * L, "weights_on_input": False}
            info["sorted_by_weight"] = False
            info |= {"input": takes_input(self.vllm_config), "groups": self.groups}
            return [
                info
                | {
                    "runner": "v1",
                    "device": "cpu",
                    "kv_slots": 0,
                    "device_bytes": 0,
                    "pinned_bytes": 0,
                }
            ]
        if method == "get_supported_tasks":
            return [("generate",)]
        return super().collective_rpc(method, *args, **kwargs)


class InProcessClient(EngineCoreClient):
    """What `AsyncLLM` has instead of sockets to an engine's process; messages are encoded and
    decoded all the same."""

    def __init__(
        self, vllm_config: VllmConfig, executor_class: type[Executor], log_stats: bool, **_: Any
    ) -> None:
        self.core = Core(vllm_config, executor_class, log_stats)
        self.engine_ranks_managed = [0]
        self.resources = SimpleNamespace(engine_dead=False)
        self._messages: deque[EngineCoreOutputs] = deque()
        self._work = asyncio.Event()
        self._error: Exception | None = None

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        # what cannot be encoded fails here, for its sender
        self._call(self.core.take, around.sent(request))

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self._call(self.core.abort_requests, request_ids)

    def _call(self, method: Callable[..., Any], *args: Any) -> None:
        """As the engine's loop does: what is raised is not for the one who sent the request, but
        ends the engine."""
        try:
            method(*args)
        except Exception as error:  # noqa: BLE001 raised where the engine's messages are waited for
            self._error = error
        self._work.set()

    async def get_output_async(self) -> EngineCoreOutputs:
        while not self._messages:
            if self._error is not None:
                raise EngineDeadError from self._error
            if self.core.has_work() or self.core._idle_state_callbacks:
                await self._wait_for_turn()
                self.core.turn()
                await self._let_others_run()
            elif self.core.output_queue.empty():
                self._work.clear()
                await self._work.wait()
            self._messages += [message for _, message in self.core.messages()]
        return self._messages.popleft()

    async def _wait_for_turn(self) -> None:
        """A test may hold up the engine here, before a step."""

    async def _let_others_run(self) -> None:
        """As long as an engine's step would.

        A step in each turn of the event loop would wake the reader of a stream in each, and anyio
        cancels a task only in a turn in which it waits: so the tokens of a client that has left
        would be generated to the end.
        """
        for _ in range(3):
            await asyncio.sleep(0)

    def shutdown(self, timeout: float | None = None) -> None:
        """Once: `AsyncLLM` asks again when it is collected; the process's groups may be another
        engine's by then."""
        if not self.resources.engine_dead:
            self.resources.engine_dead = True
            self.core.shutdown()


async def stay_while_alone(client: InProcessClient) -> None:
    """In the place of `InProcessClient._wait_for_turn`: a request that is alone stops after some
    tokens until there is another one, or until its client leaves."""
    requests = client.core.scheduler.requests
    while len(requests) == 1 and next(iter(requests.values())).num_output_tokens > 20:
        await asyncio.sleep(0.01)


def _utility(name: str) -> Callable[..., Any]:
    async def call(self: InProcessClient, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.core, name)(*args, **kwargs)
        self._work.set()
        return await asyncio.wrap_future(result) if isinstance(result, Future) else result

    return call


for _name in (
    *("get_supported_tasks", "collective_rpc", "set_weight_version", "get_weight_version"),
    *(
        "pause_scheduler",
        "resume_scheduler",
        "is_scheduler_paused",
        "sleep",
        "wake_up",
        "is_sleeping",
    ),
    *("reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache"),
):
    setattr(InProcessClient, f"{_name}_async", _utility(_name))


Command = Callable[[list[str]], Namespace]
"""What makes arguments of a command line."""


def ours(argv: list[str]) -> Namespace:
    """What `routed-experts serve` makes of a command line."""
    serve.allow_plugin()
    args = serve.parse(argv)
    serve.configure(args)
    return args


def vllms(argv: list[str]) -> Namespace:
    """What `vllm serve` makes of one."""
    cli_env_setup()
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    args: Namespace = parser.parse_args(["serve", *argv])
    args.model = args.model_tag
    return args


def serving(model: Path, *flags: str, command: Command = ours) -> AbstractContextManager[Server]:
    """A running API server for the tokenizer and the chat template of `model`; `flags` are those of
    `command`."""
    layers = ("--hf-overrides", f'{{"num_hidden_layers": {DECODER_LAYERS}}}')
    return served(model, ServedExecutor, *SIZES, *layers, *flags, command=command)


@contextmanager
def serving_weights(
    model: Path, *flags: str, env: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """The same with vLLM's worker and runner and the weights of `model`, all in this process.

    Only where there is no GPU, whose memory would not be given back.
    """
    with worker_in_this_process(env or {}), served(model, UniProcExecutor, *flags) as server:
        yield server


def serving_quickly(
    model: Path, log: Path, *flags: str, env: Mapping[str, str] | None = None
) -> AbstractContextManager[Server]:
    """A server with the weights of `model`: on a CPU all in this process, which saves half a
    minute; on a GPU in processes that write to `log`."""
    if torch.cuda.is_available():
        return serving_processes(model, log, *flags, env=dict(env or {}))
    return serving_weights(model, *flags, env=env)


@contextmanager
def worker_in_this_process(env: Mapping[str, str]) -> Iterator[None]:
    """Puts back what vLLM's CPU worker changes in its process, which has `env` meanwhile.

    All but its kernels for CPUs: they stay, as it looks for their places in all modules, and takes
    offence at some that an engine before may have imported.
    """
    # since vLLM 0.31
    dispatcher = getattr(triton_utils, "dispatcher", SimpleNamespace(register_kernels=None))
    register = dispatcher.register_kernels

    def register_once(overrides: Mapping[str, Callable[..., Any]]) -> None:
        if new := {
            name: kernel for name, kernel in overrides.items() if name not in dispatcher._registry
        }:
            register(new)

    try:
        with pytest.MonkeyPatch.context() as patch, mock.patch.dict(os.environ, env):
            patch.setattr(dispatcher, "register_kernels", register_once)
            # which would import all anew to look at a model's class
            patch.setattr(registry, "_run_in_subprocess", lambda function: function())
            # the worker puts another in its place
            patch.setattr(torch, "set_num_threads", torch.set_num_threads)
            yield
    finally:
        disable_envs_cache()


@contextmanager
def served(
    model: Path, executor: type[Executor], *flags: str, command: Command = ours
) -> Iterator[Server]:
    with around.no_collections(), pytest.MonkeyPatch.context() as patch:
        for variable in ("VLLM_PLUGINS", "VLLM_WORKER_MULTIPROC_METHOD"):
            patch.setenv(variable, os.environ.get(variable, ""))  # so that it is put back as it was
            if command is ours or not os.environ[variable]:
                patch.delenv(variable)
        patch.setattr(EngineCoreClient, "make_async_mp_client", InProcessClient)
        port = free_port()
        args = command([str(model), "--served-model-name", "tiny", "--port", str(port), *flags])
        args.distributed_executor_backend = executor
        ready: Future[uvicorn.Server] = Future()
        thread = Thread(target=lambda: asyncio.run(_serve(args, ready)), daemon=True)
        thread.start()
        server = ready.result(timeout=300)
        try:
            yield Server(model, f"http://127.0.0.1:{port}", None, Path())
        finally:
            server.should_exit = True
            thread.join()
            shutil.rmtree(default_folder(str(port)), ignore_errors=True)


async def _serve(args: Namespace, ready: "Future[uvicorn.Server]") -> None:
    engine: AsyncLLM | None = None
    try:
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config(
            UsageContext.OPENAI_API_SERVER
        )
        engine = AsyncLLM.from_vllm_config(config)
        app = build_app(args, ("generate",))
        await init_app_state(engine, app.state, args, ("generate",))
    except Exception as error:  # noqa: BLE001 raised where the server is waited for
        if engine is not None:
            engine.shutdown()
        ready.set_exception(error)
        return
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=args.port, log_level="warning")
    )
    app.state.server = server  # which vLLM ends with the engine
    serve = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    ready.set_result(server)
    await serve
    engine.shutdown()
