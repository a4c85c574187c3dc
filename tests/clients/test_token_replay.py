"""`TokenReplay`: rows found by the tokens of each forward pass of a trainer that is not ours.

The oracle is what each layer's experts were called with.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from routed_experts.protocol.routing import Routing
from routed_experts.replay import ReplayError, TokenReplay, replayed
from tests.clients.conftest import QWEN3, Load
from tests.clients.experts import ExpertsThatRan, OtherCheckpoint, seeing_experts
from tests.clients.test_replay import CHECKPOINTING, plain_load_balancing
from tests.e2e.harness import free_port
from tests.protocol.answers import rows_of

PROMPT, PAD = 3, 0
LENGTHS = (9, 6, 12, 7)
L, K = len(QWEN3.layer_ids), QWEN3.top_k
Place = tuple[int, int, int, int]
"""Of a sequence in a batch: its line, its first column, its number, and how many of its tokens."""


def rollouts(seed: int = 0, lengths: Sequence[int] = LENGTHS, **more: Any) -> list[Routing]:
    """Sequences that begin alike, with rows that no router chose."""
    generator = np.random.default_rng(seed)
    prompt = tuple(generator.integers(5, 60, PROMPT).tolist())
    return [
        Routing(
            rows_of(length - 1, 100 * seed + index, QWEN3.num_experts, L, K),
            prompt_len=PROMPT,
            prompt_token_ids=prompt,
            token_ids=tuple(generator.integers(5, 60, length - PROMPT).tolist()),
            **more,
        )
        for index, length in enumerate(lengths)
    ]


def tokens_of(routing: Routing) -> list[int]:
    assert routing.prompt_token_ids is not None
    assert routing.token_ids is not None
    return [*routing.prompt_token_ids, *routing.token_ids]


def padded(routings: Sequence[Routing], side: str = "right") -> tuple[dict[str, Any], list[Place]]:
    """Arguments of a forward pass, and where its sequences are."""
    width = max(len(tokens_of(routing)) for routing in routings) + 2
    tokens = torch.full((len(routings), width), PAD)
    mask = torch.zeros_like(tokens)
    places = []
    for line, routing in enumerate(routings):
        sequence = torch.tensor(tokens_of(routing))
        first = 0 if side == "right" else width - len(sequence)
        tokens[line, first : first + len(sequence)] = sequence
        mask[line, first : first + len(sequence)] = 1
        places.append((line, first, line, len(sequence)))
    return {"input_ids": tokens, "attention_mask": mask}, places


def packed(routings: Sequence[Routing]) -> tuple[torch.Tensor, torch.Tensor, list[Place]]:
    """Tokens and positions [1, T] of all sequences, with padding in the end."""
    tokens: list[int] = []
    positions: list[int] = []
    places = []
    for index, routing in enumerate(routings):
        sequence = tokens_of(routing)
        places.append((0, len(tokens), index, len(sequence)))
        tokens += sequence
        positions += range(len(sequence))
    return torch.tensor([tokens + [PAD] * 3]), torch.tensor([[*positions, 0, 1, 2]]), places


def check_pass(
    ids: torch.Tensor, shape: Any, routings: Sequence[Routing], places: list[Place]
) -> None:
    """The experts `ids` [T, L, K] of a forward pass are those of the rows."""
    by_place = ids.reshape(*shape, L, K).numpy()
    for line, first, index, length in places:
        rows = routings[index].rows[:length]
        ran = by_place[line, first : first + len(rows)]
        assert (np.where(rows < 0, ran, rows) == ran).all()


def run(model: Any, inputs: dict[str, Any]) -> Any:
    return model(**inputs, use_cache=False)


def check_replayed(model: Any, inputs: dict[str, Any], routings: Any, places: Any) -> None:
    with seeing_experts(model) as ran, TokenReplay(model) as replay:
        replay.put(routings)
        run(model, inputs)
    (ids,) = ran.forward_passes()
    check_pass(ids, inputs["input_ids"].shape, routings, places)
    assert replay.passes == 1
    assert replay.replayed == L * sum(
        min(length, len(routings[i].rows)) for *_, i, length in places
    )


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("has_positions", [False, True])
def test_padded_sequences(side: str, has_positions: bool, load: Load) -> None:
    routings = rollouts()
    inputs, places = padded(routings, side)
    if has_positions:
        mask = inputs["attention_mask"]
        inputs["position_ids"] = (mask.cumsum(dim=1) - 1).masked_fill(mask == 0, 1)
    check_replayed(load(), inputs, routings, places)


@pytest.mark.parametrize("by", ["position_ids", "position_ids and mask", "cu_seq_lens_q", "mask"])
def test_packed_sequences(by: str, load: Load) -> None:
    routings = rollouts()
    tokens, positions, places = packed(routings)
    inputs = {"input_ids": tokens}
    if "position_ids" in by:
        inputs["position_ids"] = positions
    if "mask" in by:
        numbers = [number for number, length in enumerate(LENGTHS, 1) for _ in range(length)]
        inputs["attention_mask"] = torch.tensor([[*numbers, 0, 0, 0]])
    if by == "position_ids and mask":
        inputs["attention_mask"] = (inputs["attention_mask"] > 0).long()
    if by == "cu_seq_lens_q":
        inputs["cu_seq_lens_q"] = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32)
    check_replayed(load(), inputs, routings, places)


def test_the_beginning_of_a_sequence(load: Load) -> None:
    """Trainers truncate sequences, and mask what was not finished."""
    routings, length = rollouts(), PROMPT + 2
    inputs, _ = padded(routings[-1:])
    inputs["attention_mask"][:, length:] = 0
    check_replayed(load(), inputs, routings, [(0, 0, len(routings) - 1, length)])


def test_equal_sequences_have_the_newest_rows(load: Load) -> None:
    first, second = rollouts()[0], rollouts(seed=1)[0]
    newer = Routing(second.rows, prompt_token_ids=first.prompt_token_ids, token_ids=first.token_ids)
    inputs, places = padded([newer, newer])
    check_replayed(load(), inputs, [first, newer], [(line, at, 1, n) for line, at, _, n in places])


def test_of_several_the_newest_has_the_rows(load: Load) -> None:
    """Also where an older one was used last, or has these tokens alone. One whose rows begin later
    has less of them."""
    model = load()
    older, newer = rollouts()[:2]
    prompt = older.prompt_token_ids
    assert prompt is not None
    whole = Routing(
        rollouts(2)[0].rows[: PROMPT - 1], prompt_token_ids=prompt[:-1], token_ids=prompt[-1:]
    )
    later = replace(newer, rows=rollouts(3)[0].rows[PROMPT:], start=PROMPT, token_ids=(7,) * 6)
    inputs = {"input_ids": torch.tensor([prompt])}
    with seeing_experts(model) as ran, TokenReplay(model) as replay:
        replay.put([whole, older])
        replay.put([newer])
        run(model, {"input_ids": torch.tensor([tokens_of(older)])})
        replay.put([later])
        run(model, inputs)
    check_pass(ran.forward_passes()[1], (1, PROMPT), [newer], [(0, 0, 0, PROMPT)])


def test_unknown_rows_and_prompts_without_rows(load: Load) -> None:
    routing = rollouts()[0]
    rows = routing.rows.copy()
    rows[4] = -1
    inputs, _ = padded([routing])
    late = Routing(rows[2:], 2, PROMPT, 0, routing.prompt_token_ids, routing.token_ids)
    model = load()
    with seeing_experts(model) as ran, TokenReplay(model) as replay:
        replay.put([late])
        run(model, inputs)
    (ids,) = ran.forward_passes()
    known = [2, 3, *range(5, len(rows))]
    assert (ids.numpy()[known] == rows[known]).all()
    assert replay.replayed == L * len(known)


def test_weights(load: Load) -> None:
    """Times what vLLM multiplies a layer's output by."""
    model, routings = load(), rollouts()
    inputs, places = padded(routings)
    shape = (*inputs["input_ids"].shape, L, K)
    rows, weights = np.full(shape, -1), np.full(shape, np.nan, np.float32)
    weighted = []
    for (line, first, *_), routing in zip(places, routings, strict=True):
        of_routing = np.random.default_rng(line).random(routing.rows.shape, np.float32)
        weighted.append(replace(routing, weights=of_routing))
        rows[line, first : first + len(routing.rows)] = routing.rows
        weights[line, first : first + len(routing.rows)] = of_routing * 2
    with replayed(model, rows, weights):
        expected = run(model, inputs).logits
    info = {"layer_ids": QWEN3.layer_ids, "weights_scale": [2.0] * L}
    with TokenReplay(model, info=info, weights=True) as replay:
        replay.put(weighted)
        assert torch.equal(run(model, inputs).logits, expected)
        with pytest.raises(ReplayError, match="no weights: ask with return_routed_expert_weights"):
            replay.put(routings)


def loss_of(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output.logits.logsumexp(dim=-1).sum()
    return loss


def check_steps(
    model: Any, replay: TokenReplay, ran: ExpertsThatRan, recomputed: bool, seed: int = 0
) -> None:
    """A pass without gradients, two passes with one backward pass for both, and one alone."""
    batches = [rollouts(seed + index) for index in range(3)]
    for routings in batches:
        replay.put(routings)
    inputs = [padded(routings) for routings in batches]
    with torch.no_grad():
        run(model, inputs[0][0])
    (loss_of(run(model, inputs[0][0])) + loss_of(run(model, inputs[1][0]))).backward()
    loss_of(run(model, inputs[2][0])).backward()
    passes = ran.forward_passes()
    assert len(passes) == replay.passes == 4
    for ids, number in zip(passes, (0, 0, 1, 2), strict=True):
        arguments, places = inputs[number]
        check_pass(ids, arguments["input_ids"].shape, batches[number], places)
    if recomputed:
        ran.check_recomputed(3)


@pytest.mark.parametrize("kind", ["none", *CHECKPOINTING])
def test_checkpointing(kind: str, load: Load) -> None:
    model = load().train()
    if kind != "none":
        model.gradient_checkpointing_enable(CHECKPOINTING[kind])
        model.enable_input_require_grads()
    with seeing_experts(model) as ran, TokenReplay(model) as replay:
        check_steps(model, replay, ran, recomputed=kind != "none")


def test_a_live_pass_is_recomputed(load: Load) -> None:
    model = load().train()
    model.gradient_checkpointing_enable(CHECKPOINTING["not reentrant"])
    with seeing_experts(model) as ran, TokenReplay(model, missing="live"):
        loss_of(run(model, padded(rollouts())[0])).backward()
    ran.check_recomputed(1)


@pytest.mark.release
@pytest.mark.parametrize("how", ["wrapped", "in place", "layers"])
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_a_compiled_model(how: str, is_recomputed: bool, load: Load) -> None:
    model = load().train()
    if is_recomputed:
        model.gradient_checkpointing_enable(CHECKPOINTING["not reentrant"])
        model.enable_input_require_grads()
    called = model
    if how == "wrapped":
        called = torch.compile(model, backend="eager")
    elif how == "in place":
        model.compile(backend="eager")
    else:
        for layer in model.model.layers:
            layer.compile(backend="eager")
    with seeing_experts(model) as ran, TokenReplay(model) as replay:
        check_steps(called, replay, ran, recomputed=is_recomputed)


def test_a_model_without_its_head(load: Load) -> None:
    """Trainers that compute log-probabilities by themselves call it."""
    model, routings = load(), rollouts()
    inputs, places = padded(routings)
    with seeing_experts(model) as ran, TokenReplay(model) as replay:
        replay.put(routings)
        run(model.model, inputs)
    check_pass(ran.forward_passes()[0], inputs["input_ids"].shape, routings, places)


def test_a_reference_and_its_policy(load: Load) -> None:
    policy, reference, routings = load(), load(), rollouts()
    inputs, places = padded(routings)
    with (
        seeing_experts(policy) as of_policy,
        seeing_experts(reference) as of_reference,
        TokenReplay(policy, reference) as replay,
    ):
        replay.put(routings)
        logits = run(policy, inputs).logits
        assert torch.equal(run(reference, inputs).logits, logits)
    for ran in (of_policy, of_reference):
        check_pass(ran.forward_passes()[0], inputs["input_ids"].shape, routings, places)


def test_the_auxiliary_loss(load: Load) -> None:
    """Only where a pass computes it."""
    model, routings = load(), rollouts(lengths=(9, 9))
    tokens = torch.tensor([tokens_of(routing) for routing in routings])
    with TokenReplay(model, aux_loss=True) as replay, seeing_experts(model) as ran:
        replay.put(routings)
        model(input_ids=tokens, use_cache=False)
        output = model(input_ids=tokens, use_cache=False, output_router_logits=True)
    ids = ran.forward_passes()[1].unflatten(0, tokens.shape)
    expected = plain_load_balancing(output.router_logits, ids, torch.ones_like(tokens))
    assert torch.allclose(output.aux_loss, expected, rtol=1e-4)


def no_rows(model: Any, replay: TokenReplay) -> None:
    model(input_ids=torch.tensor([[7, 8, 9]]), use_cache=False)


def generates(model: Any, replay: TokenReplay) -> None:
    model.generate(torch.tensor([tokens_of(rollouts()[0])]), max_new_tokens=3, min_new_tokens=3)


def embeds(model: Any, replay: TokenReplay) -> None:
    model(inputs_embeds=torch.zeros(1, 4, model.config.hidden_size), use_cache=False)


def masks(model: Any, replay: TokenReplay) -> None:
    tokens = torch.tensor([tokens_of(rollouts()[0])])
    model(input_ids=tokens, attention_mask=torch.ones(1, *tokens.shape, tokens.shape[1]))


def slices(model: Any, replay: TokenReplay) -> None:
    tokens = torch.tensor([tokens_of(rollouts()[0])])
    model(input_ids=tokens[:, 4:], position_ids=torch.arange(4, tokens.shape[1])[None])


def tree(model: Any, replay: TokenReplay) -> None:
    model(input_ids=torch.tensor([[5, 6, 7, 8]]), position_ids=torch.tensor([[0, 1, 2, 1]]))


def not_packed(model: Any, replay: TokenReplay) -> None:
    model(input_ids=packed(rollouts())[0], use_cache=False)


def whole(model: Any, replay: TokenReplay) -> None:
    inputs, _ = padded(rollouts())
    needs_gradient = torch.ones((), requires_grad=True)
    checkpoint(
        lambda factor: factor * loss_of(run(model, inputs)), needs_gradient, use_reentrant=True
    ).backward()


def other_checkpoint(model: Any, replay: TokenReplay) -> None:
    model.enable_input_require_grads()
    for layer in model.model.layers:
        own = layer.mlp.forward
        layer.mlp.forward = lambda hidden, own=own: OtherCheckpoint.apply(own, hidden)
    try:
        loss_of(run(model, padded(rollouts())[0])).backward()
    finally:
        for layer in model.model.layers:
            del layer.mlp.forward


def late_rows(model: Any, replay: TokenReplay) -> None:
    routing = rollouts(1)[0]
    replay.put([replace(routing, rows=routing.rows[PROMPT:], start=PROMPT)])
    run(model, {"input_ids": torch.tensor([routing.prompt_token_ids])})


def too_many_rows(model: Any, replay: TokenReplay) -> None:
    replay.put([replace(rollouts()[0], token_ids=(5,) * 4)])


def twice(model: Any, replay: TokenReplay) -> None:
    with TokenReplay(model) as other:
        other.put(rollouts())
        run(model, padded(rollouts())[0])


def without_tokens(model: Any, replay: TokenReplay) -> None:
    replay.put([Routing(rollouts()[0].rows)])


def with_pictures(model: Any, replay: TokenReplay) -> None:
    replay.put(rollouts(media=("a picture",)))


def of_another_model(model: Any, replay: TokenReplay) -> None:
    routing = rollouts()[0]
    replay.put(
        [Routing(routing.rows[:, 1:], prompt_token_ids=(1, 1, 1), token_ids=routing.token_ids)]
    )


def nothing(model: Any, replay: TokenReplay) -> None:
    pass


@pytest.mark.parametrize(
    ("do", "message"),
    [
        (no_rows, r"no rows for a sequence of 3 tokens that begins with \[7, 8, 9\]"),
        (generates, "continues a KV cache"),
        (embeds, "the model gets inputs_embeds"),
        (masks, r"attention mask .* for tokens .* not for trees"),
        (slices, "a token at position 4, where 0 comes next: .*context parallelism"),
        (tree, "a token at position 1, where 3 comes next: .* trees"),
        (not_packed, "no rows for a sequence of 37 tokens .* packed without position_ids"),
        (whole, "recomputes the whole model"),
        (other_checkpoint, "its checkpointing is not torch's"),
        (late_rows, "no rows for a sequence of 3 tokens"),
        (too_many_rows, "8 rows from position 0 on, of a response of 7 tokens"),
        (twice, "being replayed already"),
        (without_tokens, "no token ids, .* ask with return_token_ids"),
        (with_pictures, "the prompt has pictures or sounds"),
        (of_another_model, "rows of several models"),
        (nothing, "no forward pass of the models was seen"),
    ],
)
def test_what_is_refused(do: Callable[..., None], message: str, load: Load) -> None:
    """And the model is as before."""
    model = load()
    inputs, _ = padded(rollouts())
    live = run(model, inputs).logits

    def within() -> None:
        with TokenReplay(model) as replay:
            replay.put(rollouts())
            do(model, replay)

    with pytest.raises(ReplayError, match=message):
        within()
    assert torch.equal(run(model, inputs).logits, live)


def test_a_part_of_a_model(load: Load) -> None:
    """A layer alone gets no tokens."""
    with pytest.raises(ReplayError, match="DecoderLayer takes no input_ids"):
        TokenReplay(load().model.layers[0])


def test_after_an_exception_the_next_pass_is_replayed(load: Load) -> None:
    model, routings = load(), rollouts()
    inputs, places = padded(routings)
    with TokenReplay(model) as replay:
        replay.put(routings)
        with pytest.raises(ReplayError, match="no rows"):
            no_rows(model, replay)
        failing = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(model, inputs)
        failing.remove()
        with seeing_experts(model) as ran:
            run(model, inputs)
    check_pass(ran.forward_passes()[0], inputs["input_ids"].shape, routings, places)
    assert replay.passes == 1


def test_sequences_without_rows_may_be_live(load: Load) -> None:
    model, routings = load(), rollouts()
    inputs, places = padded(routings)
    live = run(model, inputs).logits
    with TokenReplay(model, missing="live") as replay:
        assert torch.equal(run(model, inputs).logits, live)
        assert (replay.without_rows, replay.passes) == (4, 0)
        replay.put(routings[:2])
        with seeing_experts(model) as ran:
            run(model, inputs)
        assert (replay.without_rows, replay.passes) == (6, 1)
    check_pass(ran.forward_passes()[0], inputs["input_ids"].shape, routings, places[:2])


def test_what_was_used_goes_first(load: Load) -> None:
    model = load()
    first, second, third = (rollouts(seed, [9, 9]) for seed in range(3))
    size = sum(routing.rows.nbytes + 4 * len(tokens_of(routing)) for routing in first)
    with TokenReplay(model, max_bytes=2 * size) as replay:
        replay.put(first)
        replay.put(second)
        run(model, padded(second)[0])
        replay.put(third)
        for routings in (first, third):
            run(model, padded(routings)[0])
        with pytest.raises(ReplayError, match="no rows for a sequence of 9 tokens"):
            run(model, padded(second)[0])
        with pytest.raises(ReplayError, match=f"of {3 * size} bytes, and room for {2 * size}"):
            replay.put([*first, *second, *third])
        without_rows = [
            replace(routing, rows=routing.rows[:0]) for routing in rollouts(5, [99] * 9)
        ]
        with pytest.raises(ReplayError, match=f"rows and tokens of {9 * 99 * 4} bytes"):
            replay.put(without_rows)
        replay.put(second)
        replay.put(second)  # takes the place of what was there
        run(model, padded(third)[0])
        replay.put(rollouts(3, [9, 9]))
        replay.put(rollouts(4, [9, 9]))
        with pytest.raises(ReplayError, match="rows of 2 sequences went unused, as max_bytes"):
            run(model, padded(second)[0])


def in_each_process(rank: int, folder: str, port: int) -> None:
    """Two processes with other sequences, whose model DDP wraps, and then FSDP2 shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for kind in ("not reentrant", "reentrant"):
        for wrapper in ("ddp", "fsdp2"):
            model = AutoModelForCausalLM.from_pretrained(folder).train()
            model.gradient_checkpointing_enable(CHECKPOINTING[kind])
            model.enable_input_require_grads()
            called: Any = model
            if wrapper == "ddp":
                # one backward pass for two forward passes of a reentrant model is refused by DDP
                called = DistributedDataParallel(model, static_graph=kind == "reentrant")
            else:
                mesh = init_device_mesh("cpu", (2,))
                for layer in model.model.layers:
                    fully_shard(layer, mesh=mesh)
                fully_shard(model, mesh=mesh)
            with seeing_experts(model) as ran, TokenReplay(called) as replay:
                for step in range(2):
                    routings = rollouts(10 * step + rank)
                    replay.put(routings)
                    inputs, places = padded(routings)
                    loss_of(run(called, inputs)).backward()
                    ids = ran.forward_passes()[step]
                    check_pass(ids, inputs["input_ids"].shape, routings, places)
            ran.check_recomputed(2)
            assert replay.passes == 2
    dist.destroy_process_group()


@pytest.mark.e2e
@pytest.mark.release
def test_two_processes(load: Load, tmp_path: Any) -> None:
    load().save_pretrained(tmp_path)
    torch.multiprocessing.spawn(in_each_process, (str(tmp_path), free_port()), nprocs=2)
