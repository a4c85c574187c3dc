"""Several choices of one prompt, by a router that chooses otherwise each time: each computes what it
does not find in the prefix cache, so their KV differs in it."""

from pathlib import Path

import numpy as np
import pytest

from tests.contract.engine import BLOCK, Client, Rows, Sequence, Tokens, tokens
from tests.contract.passes import PassesExecutor
from tests.contract.served import DECODER_LAYERS, SIZES, ServedExecutor, served
from tests.contract.test_recompute import counting
from tests.e2e.harness import decode

PROMPT = [token % ServedExecutor.vocab for token in tokens(2 * BLOCK + 9)]


def prompts_of(client: Client, names: list[str]) -> list[np.ndarray]:
    """The passes that the KV before the first token of each choice is of."""
    sampled = client.engines[0].model_executor.sampled
    return [sampled[name][len(PROMPT)] for name in names]


@pytest.mark.parametrize("at_end", [False, True], ids=["with tokens", "at the end"])
@pytest.mark.parametrize("hits", [False, True], ids=["no hits", "hits"])
def test_each_has_the_rows_of_its_own_kv_if_it_asks(
    is_async: bool, hits: bool, at_end: bool
) -> None:
    """All rows are checked as they come (`ReceivedOfPasses`)."""
    client = counting(is_async=is_async, hits=hits, chunk=16)
    names = client.add("g", PROMPT, start=3, n=3, max_tokens=5, own_prompt=True, at_end=at_end)
    client.finish()
    assert client.times_sent(*names) == 3
    first, *others = prompts_of(client, names)
    for other in others:
        assert (first[: 2 * BLOCK] == other[: 2 * BLOCK]).all() == hits
        assert (first[2 * BLOCK :] != other[2 * BLOCK :]).any()


def test_choices_of_an_aborted_one_have_their_own(is_async: bool) -> None:
    client = counting(is_async=is_async, chunk=16)
    names = client.add("g", PROMPT, n=3, max_tokens=9, own_prompt=True)
    while not client.received[names[0]].tokens:
        client.step()
    client.abort(names[0])
    client.finish(but=names[0])


class ServedPassesExecutor(ServedExecutor, PassesExecutor):
    """Of other prompts, as those of the server's self-test, its router chooses the same each
    time."""

    def compute(
        self, request_id: str, sequence: Sequence, tokens: Tokens, start: int, end: int
    ) -> Rows:
        if tokens[: len(PROMPT)] != PROMPT:
            self.num_passes = 0
        return super().compute(request_id, sequence, tokens, start, end)


@pytest.mark.parametrize("delivery", ["whole", "streamed"])
def test_a_joined_array_has_the_prompt_as_its_choice_computed_it(
    tiny_model: Path, delivery: str
) -> None:
    sizes = (*SIZES, "--hf-overrides", f'{{"num_hidden_layers": {DECODER_LAYERS}}}')
    body = {
        "model": "tiny",
        "prompt": PROMPT,
        "n": 3,
        "temperature": 1.0,
        "max_tokens": 4,
        "return_routed_experts": True,
        "routed_experts_layout": "joined",
    }
    with served(
        tiny_model, ServedPassesExecutor, *sizes, "--max-num-batched-tokens", "16"
    ) as server:
        if delivery == "whole":
            choices = server.post("/v1/completions", body)["choices"]
        else:
            choices = [
                choice
                for chunk in server.stream("/v1/completions", **body)
                for choice in chunk.get("choices", ())
                if "routed_experts" in choice
            ]
    prompts = []
    for index in range(3):
        rows = np.concatenate(
            [decode(choice["routed_experts"]) for choice in choices if choice["index"] == index]
        )
        assert len(rows) == len(PROMPT) + 3
        prompts.append(rows[: len(PROMPT)])
    first, *others = prompts
    for other in others:
        is_same = (first == other).all(axis=(1, 2))
        assert is_same[: 2 * BLOCK].all()
        assert not is_same[2 * BLOCK :].all()
