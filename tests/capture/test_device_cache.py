"""The buffer that the MoE layers write into."""

import torch

from routed_experts.capture.device_cache import DeviceCache
from routed_experts.protocol.codec import UNKNOWN

CPU = torch.device("cpu")


def test_sizes() -> None:
    cache = DeviceCache(num_layers=3, max_tokens=8, top_k=2, device=CPU)
    assert (cache.num_layers, cache.max_tokens, cache.top_k) == (3, 8, 2)
    assert cache.ids.dtype == torch.int32  # what vLLM's top-k kernels write


def test_nothing_is_an_id_before_it_is_written() -> None:
    """A layer that is bound but never writes must not look like expert 0."""
    cache = DeviceCache(num_layers=2, max_tokens=4, top_k=2, device=CPU)
    cache.view(1)[:] = 7
    assert (cache.view(0) == UNKNOWN).all()


def test_views_are_contiguous_and_write_through() -> None:
    cache = DeviceCache(num_layers=3, max_tokens=4, top_k=2, device=CPU)
    for layer in range(3):
        view = cache.view(layer)
        assert view.is_contiguous()
        assert view.shape == (4, 2)
        view[:2] = layer
    assert cache.ids[:, :2, :].unique(dim=1).squeeze(1).tolist() == [[0, 0], [1, 1], [2, 2]]
    assert (cache.ids[:, 2:] == UNKNOWN).all()


def test_addresses_stay() -> None:
    """A CUDA graph writes to the address that it was captured with."""
    cache = DeviceCache(num_layers=2, max_tokens=4, top_k=2, device=CPU)
    addresses = [cache.view(layer).data_ptr() for layer in range(2)]
    cache.view(0)[:] = 1
    assert [cache.view(layer).data_ptr() for layer in range(2)] == addresses


def test_forgotten_rows_are_no_ids() -> None:
    """A layer that does not write in a step must not hand out the ids of the step before."""
    cache = DeviceCache(num_layers=3, max_tokens=8, top_k=2, device=CPU)
    addresses = [cache.view(layer).data_ptr() for layer in range(3)]
    cache.ids[:] = 5
    cache.reset_rows(6)
    assert (cache.ids[:, :6] == UNKNOWN).all()
    assert (cache.ids[:, 6:] == 5).all()
    cache.reset_rows(8)
    assert (cache.ids == UNKNOWN).all()
    assert [cache.view(layer).data_ptr() for layer in range(3)] == addresses
