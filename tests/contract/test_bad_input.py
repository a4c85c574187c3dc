"""Requests with any values in any fields: no 500, no answer that is not JSON, nothing that hangs or
ends the engine.

The same in every run; the long run sends others, and more, to each kind of server.
"""

import base64
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.v1.outputs import KVConnectorOutput

from routed_experts.capture.engine.versions import INSTALLED_VLLM
from routed_experts.server.vllm_api import VLLM_VERSION
from tests.conftest import Cases
from tests.contract.engine import K, L, Tokens, _digest
from tests.contract.hostile import PULL, SPEC, VALID, Hostile, check_response
from tests.contract.loads import TracingExecutor, take_out
from tests.contract.offloading import NAME, OffloadingExecutor
from tests.contract.served import DECODER_LAYERS, SIZES, ServedExecutor, served
from tests.e2e.harness import prompt_of, wait_until
from tests.long_runs import times

SETTINGS = settings(
    max_examples=20,
    deadline=None,
    database=None,
    derandomize=True,
    # An engine that has ended fails every other request too: there is nothing to shrink.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
MANY = settings(SETTINGS, max_examples=times(1500), derandomize=False)
LIMIT_S = 120
IS_DESCRIBED = VLLM_VERSION.split("+")[0] == INSTALLED_VLLM
"""Whether `openapi.yaml` is made with this vLLM."""
COMPLETIONS = "/v1/completions"
# The model that does arithmetic gives no log probabilities, which beam search takes too. Grammars
# are compiled by other projects, for as long as they like.
LEFT_OUT = (
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "use_beam_search",
    "structured_outputs",
    "response_format",
)
LEFT_OUT += (
    "prompt_logprob_token_ids",
    "prompt_logprob_start",
    "logprob_token_ids",
    "flat_logprobs",
)


class UnreachableNixl(TracingExecutor):
    """The worker's side of NIXL where no other instance can be reached: every pull fails, and
    nobody comes for KV."""

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        nixl = take_out(scheduler_output, NixlConnectorMetadata)
        result = super().execute_model(scheduler_output, non_block)
        assert self._output is not None
        report = self._output.kv_connector_output or KVConnectorOutput()
        pulls = {name for name, request in nixl.reqs_to_recv.items() if request.awaiting_kvs}
        report.finished_recving = (report.finished_recving or set()) | pulls
        report.failed_recving |= pulls
        report.finished_sending = (report.finished_sending or set()) | set(nixl.reqs_to_send)
        if not report.is_empty():
            self._output.kv_connector_output = report
        return result


class Offloads(OffloadingExecutor, ServedExecutor):
    pass


class NixlAndOffloads(UnreachableNixl, OffloadingExecutor, ServedExecutor):
    pass


BOTH: dict[str, Any] = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
CHILD = {
    "kv_connector": NAME,
    "kv_connector_extra_config": {"cpu_bytes_to_use": 40 * 4096, "blocks_per_chunk": 1},
}
CHILDREN = [
    {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
    {**CHILD, "kv_role": "kv_both"},
]
SEVERAL = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": CHILDREN}}
KINDS: dict[str, tuple[type[ServedExecutor], dict[str, Any]]] = {
    "none": (ServedExecutor, {}),
    "offloading": (Offloads, {**CHILD, **BOTH}),
    "both": (NixlAndOffloads, {**SEVERAL, **BOTH}),
}


ONE_KIND_ALONE = [pytest.param(name, marks=pytest.mark.long) for name in KINDS if name != "both"]


@pytest.fixture(scope="module", params=["both", *ONE_KIND_ALONE])
def client(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    executor, transfer = KINDS[request.param]
    flags = (
        "--enable-scale-out",
        *SIZES,
        "--hf-overrides",
        json.dumps({"num_hidden_layers": DECODER_LAYERS}),
    )
    flags += ("--kv-transfer-config", json.dumps(transfer)) if transfer else ()
    with served(tiny_model, executor, *flags) as server, server.client() as opened:
        before = server.state_left()  # of other tests' servers in this process
        yield opened

        # Counted once a second, so that some of what `before` has may be gone since.
        def is_gone() -> bool:
            return all(left <= before[name] for name, left in server.state_left().items())

        wait_until(is_gone, lambda: server.state_left(), LIMIT_S)


_seeds = itertools.count()


def check_alive(client: httpx.Client) -> None:
    """That a plain request of a new prompt gets its exact answer."""
    sequence = Tokens(prompt_of(40, next(_seeds)))
    body = {
        "model": "tiny",
        "prompt": list(sequence),
        "max_tokens": 3,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    response = client.post("/v1/completions", json=body, timeout=LIMIT_S)
    assert response.status_code == 200, response.text
    tokens = response.json()["choices"][0]["token_ids"]
    assert len(tokens) == 3
    for token in tokens:
        assert (
            token
            == int.from_bytes(_digest(sequence.prefixes()[-1], 0), "little") % ServedExecutor.vocab
        )
        sequence.append(token)


def check_described(response: httpx.Response) -> None:
    """The description has the status of an answer, and the form of JSON."""
    described = SPEC["paths"][response.request.url.path]["post"]["responses"][
        str(response.status_code)
    ]
    if response.headers["content-type"].startswith("application/json"):
        schema = {
            **described["content"]["application/json"]["schema"],
            "components": SPEC["components"],
        }
        jsonschema.Draft202012Validator(schema).validate(response.json())


def body_of(**params: Any) -> tuple[str, dict[str, Any]]:
    """A request that pulls KV, with rows."""
    rows = {
        "data": base64.b64encode(bytes(2 * L * K)).decode(),
        "dtype": "int16",
        "shape": [1, L, K],
        "until": 1 << 39,
    }
    pull = {**PULL, "routed_experts": rows, **params}
    return COMPLETIONS, {"model": "tiny", **VALID[COMPLETIONS], "kv_transfer_params": pull}


@SETTINGS
@given(Hostile((L, K), LEFT_OUT).requests())
@example(body_of(remote_engine_id=[]))
@example(body_of(remote_request_id={}))
@example(body_of(remote_block_ids=None))
@example(body_of(do_remote_prefill=False, do_remote_decode=True, remote_num_tokens="1"))
def test_no_request_is_the_servers_fault(
    client: httpx.Client, path_and_body: tuple[str, dict[str, Any]]
) -> None:
    """And nothing that it holds ends the engine."""
    check_request(client, *path_and_body)


@pytest.mark.long
@MANY
@given(Hostile((L, K), LEFT_OUT).requests())
def test_many_hostile_requests(
    client: httpx.Client, cases: Cases, path_and_body: tuple[str, dict[str, Any]]
) -> None:
    cases.add()
    check_request(client, *path_and_body)


def check_request(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    content = json.dumps(body)  # with NaN, integers of any size and lone surrogates
    response = client.post(
        path, content=content, headers={"Content-Type": "application/json"}, timeout=LIMIT_S
    )
    try:
        check_response(response)
        if IS_DESCRIBED:
            check_described(response)
        check_alive(client)
    except (AssertionError, KeyError, jsonschema.ValidationError, httpx.HTTPError) as error:
        raise AssertionError(f"after {path} {content}: {error}") from error
