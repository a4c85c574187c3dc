"""From the device cache to the host, on tensors of the CPU."""

import pickle

import numpy as np
import pytest
import torch

from routed_experts.capture.device_cache import DeviceCache
from routed_experts.capture.pipeline import Pipeline

L, K, MAX_TOKENS = 3, 2, 8


@pytest.fixture
def cache() -> DeviceCache:
    return DeviceCache(num_layers=L, max_tokens=MAX_TOKENS, top_k=K, device=torch.device("cpu"))


def forward(cache: DeviceCache, seed: int) -> np.ndarray:
    """Fills the whole cache, as a padded forward pass does; returns what it wrote as [tokens, L, K]."""
    ids = torch.randint(0, 512, cache.ids.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    cache.ids.copy_(ids)
    return ids.transpose(0, 1).numpy().astype(np.int16)


def offsets_of(*counts: int) -> np.ndarray:
    return np.cumsum([0, *counts], dtype=np.int64)


def test_rows_slots_and_offsets_of_a_step(cache: DeviceCache) -> None:
    expected = forward(cache, seed=1)
    slots = torch.tensor([40, 41, 7, 1 << 40, 9], dtype=torch.int64)
    step = Pipeline(cache, 1).submit(slots, offsets_of(2, 1, 2)).result()
    assert step.rows.dtype == np.int16
    assert np.array_equal(step.rows, expected[:5])
    assert step.slots.dtype == np.int64
    assert step.slots.tolist() == [40, 41, 7, 1 << 40, 9]
    assert step.offsets.tolist() == [0, 2, 3, 5]


def test_bytes_of_a_step_on_its_way_to_the_scheduler(cache: DeviceCache) -> None:
    """As docs/performance.md says: of what the views are of, which is larger, nothing goes along."""
    slots = torch.arange(MAX_TOKENS, dtype=torch.int64)
    one, eight = (len(pickle.dumps(Pipeline(cache, 1).submit(slots, offsets_of(n)).result(), 5)) for n in (1, 8))
    assert 7 * (L * K * 2 + 8) <= eight - one <= 7 * (L * K * 2 + 8) + 10
    assert one < 600


@pytest.mark.parametrize("real", [0, 1, 5, MAX_TOKENS])
def test_padding_never_leaks(cache: DeviceCache, real: int) -> None:
    """Graphs run on padded batches: the layers write ids for padding tokens too, and slots are padded as well."""
    expected = forward(cache, seed=2)
    slots = torch.arange(MAX_TOKENS, dtype=torch.int64) + 100
    step = Pipeline(cache, 1).submit(slots, offsets_of(real)).result()
    assert step.rows.shape == (real, L, K)
    assert np.array_equal(step.rows, expected[:real])
    assert step.slots.tolist() == [100 + i for i in range(real)]


def test_steps_in_flight_keep_their_own_rows(cache: DeviceCache) -> None:
    """The next forward pass overwrites the device cache before the last one's output is read."""
    pipeline = Pipeline(cache, 3)
    expected, pending = [], []
    for seed in range(3):
        expected.append(forward(cache, seed))
        slots = torch.full((MAX_TOKENS,), seed, dtype=torch.int64)
        pending.append(pipeline.submit(slots, offsets_of(1, seed + 1)))
    forward(cache, seed=99)
    for seed in (2, 0, 1):  # whatever the order of reading
        step = pending[seed].result()
        assert np.array_equal(step.rows, expected[seed][: seed + 2])
        assert step.slots.tolist() == [seed] * (seed + 2)


def test_a_step_can_be_left_unread(cache: DeviceCache) -> None:
    pipeline = Pipeline(cache, 1)
    slots = torch.zeros(MAX_TOKENS, dtype=torch.int64)
    for seed in range(5):
        forward(cache, seed)
        pipeline.submit(slots, offsets_of(MAX_TOKENS))
    expected = forward(cache, seed=7)
    assert np.array_equal(pipeline.submit(slots, offsets_of(2)).result().rows, expected[:2])


def test_layers_that_wrote_nothing_stay_minus_one(cache: DeviceCache) -> None:
    cache.view(0)[:] = 5
    step = Pipeline(cache, 1).submit(torch.zeros(2, dtype=torch.int64), offsets_of(2)).result()
    assert (step.rows[:, 0] == 5).all()
    assert (step.rows[:, 1:] == -1).all()


def test_a_step_too_large_for_the_cache(cache: DeviceCache) -> None:
    slots = torch.zeros(MAX_TOKENS + 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="a step of 9 tokens does not fit the device cache of 8"):
        Pipeline(cache, 1).submit(slots, offsets_of(4, 5))
