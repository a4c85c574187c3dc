"""Requests that schemathesis makes of `openapi.yaml`, by its own idea of what is valid: answers are
as described."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.conftest import Cases
from tests.contract.hostile import COUNTS, SPEC
from tests.contract.served import serving
from tests.documentation import ROOT
from tests.e2e.harness import Server
from tests.long_runs import times

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
checks = pytest.importorskip("schemathesis.specs.openapi.checks")
pytestmark = pytest.mark.long

LIMIT_S = 120
CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
MANY = settings(
    max_examples=times(150),
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
VALID, INVALID = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
OPERATIONS = [
    (method, path, VALID) for path, methods in SPEC["paths"].items() for method in methods
]
OPERATIONS += [
    ("post", path, INVALID) for path, methods in SPEC["paths"].items() if "post" in methods
]
# vLLM's, which the model that does arithmetic has not, or which take as long as they like.
LEFT_OUT = (
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "use_beam_search",
    "structured_outputs",
    "response_format",
)


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    with serving(tiny_model, "--enable-scale-out") as running:
        yield running


def bounded(body: Any) -> Any:
    """A body that asks for little work: how much there may be is tested elsewhere."""
    if not isinstance(body, dict):
        return body
    fields = {name: value for name, value in body.items() if name not in LEFT_OUT}
    for name in COUNTS & fields.keys():
        if isinstance(fields[name], int | float):
            fields[name] = min(fields[name], 4)
    if isinstance(fields.get("sampling_params"), dict):
        fields["sampling_params"] = bounded(fields["sampling_params"])
    return fields


@pytest.mark.parametrize(("method", "path", "mode"), OPERATIONS)
def test_answers_are_as_described(
    server: Server, cases: Cases, method: str, path: str, mode: Any
) -> None:
    """To valid requests, and to others: no status, type or form of an answer that the description
    lacks."""
    operation = schemathesis.openapi.from_path(ROOT / "openapi.yaml")[path][method]

    @MANY
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        cases.add()
        case.body = bounded(case.body)
        case.call_and_validate(base_url=server.url, timeout=LIMIT_S, checks=CHECKS)

    ask()
