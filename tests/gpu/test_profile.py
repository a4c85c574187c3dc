"""The profile's kernel on a GPU, against plain torch. Run by hand, as `tests/gpu/test_engines.py`."""

import pytest
import torch

from routed_experts.capture.worker.profile import count_with_torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("with_weights", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 33, 4000])
@pytest.mark.parametrize("shape", [(3, 60, 1), (48, 128, 8), (2, 512, 10)])
def test_the_kernel_counts_what_torch_counts(
    shape: tuple[int, int, int], num_tokens: int, with_weights: bool
) -> None:
    from routed_experts.capture.worker import profile_kernel

    num_layers, num_experts, top_k = shape
    gpu = torch.device("cuda")
    torch.manual_seed(1)
    packed = torch.randint(
        -1, num_experts, (num_tokens, 3 * num_layers, top_k), dtype=torch.int16, device=gpu
    )
    ids = packed[:, :num_layers]  # as in a step with weights
    weights = torch.rand(ids.shape, device=gpu) if with_weights else None
    shape_of_counts = num_layers, num_experts + 1
    of_torch = torch.zeros(shape_of_counts, dtype=torch.int64, device=gpu)
    of_kernel = of_torch.clone()
    sums_of_torch = torch.zeros(shape_of_counts, dtype=torch.float64, device=gpu)
    sums_of_kernel = sums_of_torch.clone()
    for _ in range(2):  # what is there is added to
        count_with_torch(of_torch, sums_of_torch, ids, weights)
        profile_kernel.count(of_kernel, sums_of_kernel, ids, weights)
    assert torch.equal(of_kernel[:, :-1], of_torch[:, :-1])
    assert torch.allclose(sums_of_kernel[:, :-1], sums_of_torch[:, :-1], rtol=1e-12)
