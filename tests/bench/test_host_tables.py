"""The benchmarks of the host's part of a step run, and every row is sent that they say is."""

import pytest

from bench.host_step import host_step_table
from bench.offloading import VARIANTS, play, reload_table
from bench.scheduler import BLOCK, Steps, long_prompt_table, queue_table

pytestmark = pytest.mark.release


def rows_of(table: str) -> list[list[str]]:
    """The cells of a Markdown table, the first two lines left out."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_parts_of_a_step() -> None:
    rows = rows_of(host_step_table("cpu", num_layers=2, top_k=2, repeats=2))
    assert [row[0] for row in rows] == ["1", "64", "256", "8192"]
    assert all(cell.endswith(" µs") for row in rows for cell in row[1:])


def test_tables_of_the_scheduler() -> None:
    rows = rows_of(queue_table(waiting=(0, 30), steps=2))
    assert [len(row) for row in rows] == [3, 3, 3, 3]
    *_, returned = rows_of(long_prompt_table(length=1024, repeats=2, forward_s=0, num_running=3))
    assert returned[0] == "returned"
    assert "steps, at most" in returned[4]


def test_a_step_schedules_what_runs_and_the_rest_waits() -> None:
    steps = Steps(num_layers=2, top_k=2)
    for _ in range(300):
        steps.add([1, 2, 3], 100, asks=True)
    step = steps.step()
    assert len(step.sent) == len(steps.scheduler.running) == 256
    assert 0 < step.ours < step.seconds
    assert len(steps.scheduler.waiting) == 44


def test_a_long_prompt_is_all_in_the_prefix_cache() -> None:
    steps = Steps(num_layers=2, top_k=2)
    prompt = list(range(20 * BLOCK))
    steps.add(prompt, 1, asks=False)
    steps.step()
    steps.add(prompt, 1, asks=True)
    assert sum(steps.scheduler.schedule().num_scheduled_tokens.values()) <= BLOCK


def test_the_mix_of_reloads() -> None:
    """The capture changes no schedule, whether rows are asked for or not."""
    plays = [play(*variant, prompts=60, length=1700, rounds=1) for variant in VARIANTS.values()]
    assert {(each.steps, each.num_loaded, each.num_stored) for each in plays} == {(plays[0].steps, 60 * 1696, 0)}
    off, *_ = rows_of(reload_table(repeats=1, prompts=60, length=1700, rounds=1))
    assert off[:3] == ["off", f"{plays[0].steps:,}", "101,760"]
