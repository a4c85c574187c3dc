"""The benchmarks' played engine says and sends what a real one does."""

import ast
import inspect
import textwrap

from bench.played_executor import PlayedExecutor
from bench.scheduler import BLOCK, Steps, engine_config, prompt_of
from routed_experts.capture.wire.vllm_rows import BARE_ROWS_KEY
from routed_experts.capture.worker.worker import WorkerCapture


def keys_of_workers_info() -> set[str]:
    source = textwrap.dedent(inspect.getsource(WorkerCapture.routed_experts_info))
    (returned,) = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Dict))
    return {key.value for key in returned.keys if isinstance(key, ast.Constant)}


def test_it_says_of_its_rows_what_a_worker_says() -> None:
    executor = PlayedExecutor.__new__(PlayedExecutor)
    executor._num_layers = 48
    executor._top_k = 8
    executor._num_experts = 128
    executor._takes_input = False
    assert set(executor._info()) == keys_of_workers_info()


def test_it_sends_rows_to_a_front_end_that_is_not_ours() -> None:
    config = engine_config(additional_config={BARE_ROWS_KEY: True}, max_num_seqs=2)
    played = Steps(config=config, num_blocks=20)
    played.add(prompt_of(BLOCK, 0), 3, asks=False)
    for _ in range(3):
        step = played.scheduler.schedule()
        messages = played.scheduler.update_from_output(step, played._run(step))
    (output,) = messages[0].outputs
    assert output.routed_experts is not None
    assert output.routed_experts.shape == (2, 48, 8)  # the prompt's came with the first token
