"""The losses and the optimizer of `examples/train_small_moe.py`, against transformers and plain
AdamW."""

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from examples import train_small_moe as example

L, E, K = 3, 8, 2
VOCABULARY = 64


def model_of(dtype: str) -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    args = Namespace(num_layers=L, num_experts=E, top_k=K, hidden_size=32, expert_size=16)
    args.vocabulary, args.device, args.dtype = VOCABULARY, "cpu", dtype
    return example.make_model(SimpleNamespace(eos_token_id=0, pad_token_id=0), args)


@pytest.fixture
def batch() -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(1))


def test_the_loss_is_transformers_own(batch: torch.Tensor) -> None:
    model = model_of("float32")
    loss, balance = example.loss_of(model, batch, "model")
    usual = model(input_ids=batch, labels=batch, output_router_logits=True)
    torch.testing.assert_close(loss + example.BALANCE * balance, usual.loss)
    torch.testing.assert_close(balance, usual.aux_loss)


def test_balance_of_each_layer(batch: torch.Tensor) -> None:
    logits = model_of("float32")(input_ids=batch, output_router_logits=True).router_logits
    each = [load_balancing_loss_func((of_layer,), E, K) for of_layer in logits]
    torch.testing.assert_close(example.imbalance(logits, K, "layer"), torch.stack(each).mean())


def test_small_steps_add_up() -> None:
    """Of AdamW in float32 with the same gradients: bfloat16 alone would lose them."""
    model, num_steps = model_of("bfloat16"), 40
    optimizer = example.Optimizer(model, 1e-5, num_steps)
    parameter = model.model.layers[0].mlp.experts.down_proj
    copy = torch.nn.Parameter(parameter.detach().float().clone())
    usual = torch.optim.AdamW([copy], lr=1e-5, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        usual, 1e-5, total_steps=num_steps, pct_start=example.WARMUP
    )
    for step in range(num_steps - 1):
        for each in model.parameters():
            each.grad = torch.zeros_like(each)
        parameter.grad = torch.full_like(parameter, 1e-4)
        copy.grad = parameter.grad.float()
        optimizer.step(step + 1)
        usual.step()
        schedule.step()
    torch.testing.assert_close(parameter.float(), copy.detach().to(parameter.dtype).float())


def test_code_and_prose_of_a_module(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        '"""Says what it is."""\n\ndef f():\n    """Does it."""\n    # now\n    return 1\n'
    )
    assert example.code_and_prose(file) == (
        "def f():\n    return 1",
        "Says what it is.\n\nDoes it.",
    )
    file.write_text("def f(:\n")
    assert example.code_and_prose(file) == ("", "")
