"""Requests with any values in any fields: no 500, no answer that is not JSON, nothing that hangs or ends the engine.

The same in every run; `BAD_INPUT_REQUESTS=10000` sends others, and more, to each kind of server.
"""

import base64
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings

from tests.contract.connectors import KINDS, flags_of
from tests.contract.engine import BLOCK, NUM_BLOCKS, K, L, Tokens, _digest
from tests.contract.hostile import PULL, VALID, Hostile, check_response
from tests.contract.served import DECODER_LAYERS, ServedExecutor, served
from tests.e2e.harness import prompt_of

COUNT = int(os.environ.get("BAD_INPUT_REQUESTS", "0"))
pytestmark = pytest.mark.timeout(max(600, COUNT))
SETTINGS = settings(
    max_examples=COUNT or 150,
    deadline=None,
    database=None,
    derandomize=not COUNT,
    # An engine that has ended fails every other request too: there is nothing to shrink.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
LIMIT_S = 30
COMPLETIONS = "/v1/completions"
# The model that does arithmetic gives no log probabilities, which beam search takes too. Grammars are compiled by other
# projects, for as long as they like.
LEFT_OUT = ("logprobs", "top_logprobs", "prompt_logprobs", "use_beam_search", "structured_outputs", "response_format")
LEFT_OUT += ("prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids", "flat_logprobs")


@pytest.fixture(scope="module", params=["none", "offloading", "both"])
def client(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    flags = ("--enable-scale-out", "--block-size", str(BLOCK), "--max-model-len", str(BLOCK * (NUM_BLOCKS - 1)))
    layers = json.dumps({"num_hidden_layers": DECODER_LAYERS})
    flags = (*flags, "--hf-overrides", layers, *flags_of(request.param))
    with served(tiny_model, KINDS[request.param][0], *flags) as server, server.client() as opened:
        before = server.state_left()  # of other tests' servers in this process
        yield opened
        deadline = time.monotonic() + LIMIT_S
        # Counted once a second, so that some of what `before` has may be gone since.
        while any(left > before[name] for name, left in server.state_left().items()):
            assert time.monotonic() < deadline, server.state_left()
            time.sleep(0.1)


_seeds = itertools.count()


def check_alive(client: httpx.Client) -> None:
    """That a plain request of a new prompt gets its exact answer."""
    sequence = Tokens(prompt_of(40, next(_seeds)))
    body = {"model": "tiny", "prompt": list(sequence), "max_tokens": 3, "return_token_ids": True, "ignore_eos": True}
    response = client.post("/v1/completions", json=body, timeout=LIMIT_S)
    assert response.status_code == 200, response.text
    tokens = response.json()["choices"][0]["token_ids"]
    assert len(tokens) == 3
    for token in tokens:
        assert token == int.from_bytes(_digest(sequence.prefixes()[-1], 0), "little") % ServedExecutor.vocab
        sequence.append(token)


def body_of(**params: Any) -> tuple[str, dict[str, Any]]:
    """A request that pulls KV, with rows."""
    rows = {"data": base64.b64encode(bytes(2 * L * K)).decode(), "dtype": "int16", "shape": [1, L, K], "until": 1 << 39}
    pull = {**PULL, "routed_experts": rows, **params}
    return COMPLETIONS, {"model": "tiny", **VALID[COMPLETIONS], "kv_transfer_params": pull}


@SETTINGS
@given(Hostile((L, K), LEFT_OUT).requests())
@example(body_of(remote_engine_id=[]))
@example(body_of(remote_request_id={}))
@example(body_of(remote_block_ids=None))
@example(body_of(do_remote_prefill=False, do_remote_decode=True, remote_num_tokens="1"))
def test_no_request_is_the_servers_fault(client: httpx.Client, asked: tuple[str, dict[str, Any]]) -> None:
    """And nothing that it holds ends the engine."""
    path, body = asked
    content = json.dumps(body)  # with NaN, integers of any size and lone surrogates
    response = client.post(path, content=content, headers={"Content-Type": "application/json"}, timeout=LIMIT_S)
    try:
        check_response(response)
        check_alive(client)
    except (AssertionError, httpx.HTTPError) as error:
        raise AssertionError(f"after {path} {content}: {error}") from error
