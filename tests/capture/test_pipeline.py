"""From the device cache to the host, with tensors on the CPU."""

import random
import time

import numpy as np
import pytest
import torch

from routed_experts.capture.worker.device_cache import DeviceCache
from routed_experts.capture.worker.pipeline import Pipeline
from routed_experts.capture.worker.profile import ExpertProfile

L, K, MAX_TOKENS = 3, 2, 8


@pytest.fixture
def cache() -> DeviceCache:
    return DeviceCache(num_layers=L, max_tokens=MAX_TOKENS, top_k=K, device=torch.device("cpu"))


def forward(cache: DeviceCache, seed: int) -> np.ndarray:
    """Fills the whole cache, as a padded forward pass does; returns what it wrote as [tokens, L,
    K]."""
    ids = torch.randint(
        0, 512, cache.ids.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32
    )
    cache.ids.copy_(ids)
    return ids.transpose(0, 1).numpy().astype(np.int16)


def slots_of(seed: int) -> torch.Tensor:
    """[8] slots, one of them beyond 32 bits; padded steps have padded slots."""
    return torch.tensor(
        [seed * 100 + (i if i != 3 else 1 << 40) for i in range(MAX_TOKENS)], dtype=torch.int64
    )


def offsets_of(*counts: int) -> np.ndarray:
    return np.cumsum([0, *counts], dtype=np.int64)


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_steps_in_flight_keep_their_own_rows(cache: DeviceCache, in_flight: int) -> None:
    rng, pipeline = random.Random(in_flight), Pipeline(cache, in_flight)
    for first in range(0, 60, in_flight):
        pending = []
        for seed in range(first, first + in_flight):
            rows, offsets = (
                forward(cache, seed),
                offsets_of(*rng.choice([(), (1,), (2, 1, 2), (8,), (0, 3), (1,) * 8])),
            )
            pending.append((seed, rows, offsets, pipeline.submit(slots_of(seed), offsets)))
        forward(cache, seed=999)
        rng.shuffle(pending)
        for seed, rows, offsets, waiting in pending[rng.randrange(2) :]:
            step, count = waiting(), offsets[-1]
            assert (step.rows.dtype, step.slots.dtype) == (np.int16, np.int64)
            assert np.array_equal(step.rows, rows[:count])
            assert step.slots.tolist() == slots_of(seed).tolist()[:count]
            assert step.offsets.tolist() == offsets.tolist()


def test_a_step_larger_than_the_cache(cache: DeviceCache) -> None:
    with pytest.raises(ValueError, match="a step of 9 tokens does not fit the device cache of 8"):
        Pipeline(cache, 1).submit(torch.zeros(MAX_TOKENS + 1, dtype=torch.int64), offsets_of(4, 5))


def test_the_time_that_a_step_waits(cache: DeviceCache) -> None:
    pending = Pipeline(cache, 1).submit(slots_of(1)[:2], offsets_of(2))
    began = time.perf_counter()  # clock: around the one that is tested
    waited_s = pending().waited_s
    assert 0 < waited_s <= time.perf_counter() - began  # clock: it lies inside, however long


def test_one_token_with_an_odd_number_of_ids_is_counted_with_its_weights() -> None:
    device = torch.device("cpu")
    cache = DeviceCache(num_layers=3, max_tokens=1, top_k=1, device=device, with_weights=True)
    profile = ExpertProfile(3, 4, with_weights=True, device=device)
    assert cache.weights is not None
    cache.ids[:, 0, 0] = torch.tensor([2, 0, 3])
    cache.weights[:, 0, 0] = torch.tensor([0.5, 0.25, 0.75])
    Pipeline(cache, 1, profile=profile).submit(slots_of(1), offsets_of(1))()
    sums = np.frombuffer(profile.read()["weights"]).reshape(3, 4)
    assert [sums[0, 2], sums[1, 0], sums[2, 3]] == [0.5, 0.25, 0.75]
