"""What an engine counts, and when it reports it."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from routed_experts.capture.wire.message import PlacedRows
from routed_experts.capture.wire.stats import INTERVAL_S, EngineStats, ExpertLoad, StatsRecorder


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stats(clock: Clock) -> StatsRecorder:
    return StatsRecorder(3, clock)


def rows(count: int, layers: int = 2, top_k: int = 3) -> np.ndarray:
    return np.zeros((count, layers, top_k), dtype=np.int16)


def report(recorder: StatsRecorder, is_idle: bool = False, tracked: int = 0) -> EngineStats | None:
    return recorder.report(is_idle, tracked, lambda: 1000)


def test_totals_since_the_start(stats: StatsRecorder, clock: Clock) -> None:
    stats.count_step(rows(5), 0.25)
    stats.count_step(rows(2), 0.5)
    first = report(stats, tracked=2)
    assert first is not None
    assert (first.engine, first.rows_captured, first.copy_wait_s) == (3, 7, 0.75)
    assert (first.requests_tracked, first.host_cache_bytes, first.rows_forgotten) == (2, 1000, 0)
    assert first.busiest == [15.0, 15.0]
    assert EngineStats(**json.loads(json.dumps(asdict(first)))) == first
    clock.now += INTERVAL_S
    stats.count_step(rows(1), 0.0)
    stats.totals.rows_forgotten += 5
    second = report(stats)
    assert second is not None
    assert (
        second.rows_captured,
        second.copy_wait_s,
        second.requests_tracked,
        second.rows_forgotten,
    ) == (8, 0.75, 0, 5)


def test_of_an_unknown_row_no_expert_is_given_again(stats: StatsRecorder) -> None:
    some_are_unknown = rows(5)
    some_are_unknown[1:3] = -1
    some_are_unknown[4, 0] = -1  # of one layer
    stats.count_recomputed({"a": PlacedRows(7, some_are_unknown), "b": PlacedRows(0, rows(0))}, 9)
    counted = report(stats, is_idle=True)
    assert counted is not None
    assert (counted.rows_recomputed, counted.rows_rerouted) == (3, 6)


def test_a_busy_engine_reports_and_samples_once_in_an_interval(
    stats: StatsRecorder, clock: Clock
) -> None:
    reports = {}
    for step in range(101):
        clock.now = 100 + step * INTERVAL_S / 20
        stats.count_step(rows(1, layers=1, top_k=1), 0.0)
        if (made := report(stats)) is not None:
            reports[step] = made.routed
    assert list(reports) == [0, 20, 40, 60, 80, 100]
    assert reports[40] == pytest.approx([1 + 0.9 + 0.81])


def test_reports_of_the_first_request_and_of_an_idle_engine(
    stats: StatsRecorder, clock: Clock
) -> None:
    assert report(stats, tracked=1) is not None
    clock.now += INTERVAL_S / 100
    # an idle step follows the last request's end
    steps = [(False, 1), (True, 0), (True, 0), (False, 1), (False, 2)]
    reports = [report(stats, is_idle, tracked) for is_idle, tracked in steps]
    assert [made and made.requests_tracked for made in reports] == [None, 0, 0, 1, None]


def test_load_of_experts() -> None:
    load = ExpertLoad()
    load.sample(np.full((4, 2, 3), -1, dtype=np.int16))
    assert (load.busiest(), load.routed()) == ([], [])
    load.sample(np.array([[[0, 1], [2, 3]], [[0, 2], [3, 1]], [[1, 0], [3, 0]]], dtype=np.int16))
    assert load.busiest() == [3, 3]
    assert load.routed() == [6, 6]
    # more experts than before, and a row that is not known
    load.sample(np.array([[[7, 0], [-1, -1]]], dtype=np.int16))
    assert load.busiest() == pytest.approx([0.9 * 3 + 1, 0.9 * 3])
    assert load.routed() == pytest.approx([0.9 * 6 + 2, 0.9 * 6])


@pytest.mark.parametrize("count", [1, 511, 512, 513, 5000])
def test_a_sample_is_spread_over_the_step_and_bounded(count: int) -> None:
    step = np.zeros((count, 1, 1), dtype=np.int16)
    step[count // 2 :] = 1
    load = ExpertLoad()
    load.sample(step)
    assert load.routed()[0] <= 512
    assert load.routed()[0] >= min(count, 256)
    assert load.busiest()[0] / load.routed()[0] == pytest.approx(0.5 if count > 1 else 1, abs=0.01)
