"""Requests that schemathesis makes from `openapi.yaml`: no error of the server's, no answer that is not described."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import checks

from tests.contract.served import serving
from tests.contract.test_bad_input import LEFT_OUT
from tests.documentation import ROOT
from tests.e2e.harness import Server

pytestmark = [pytest.mark.release, pytest.mark.timeout(900)]
SCHEMA = schemathesis.openapi.from_path(ROOT / "openapi.yaml")
LIMIT_S = 120
VLLMS_OWN = b'{"detail":"There was an error parsing the body"}'
"""What vLLM answers to bytes that are no text, on all its routes."""
CHECKS = (
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
)


@pytest.fixture(scope="module")
def api(tiny_model: Path) -> Iterator[Server]:
    with serving(tiny_model, "--enable-scale-out") as server:
        yield server


@SCHEMA.parametrize()
@settings(
    max_examples=100,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_what_the_description_allows(case: schemathesis.Case, api: Server) -> None:
    if isinstance(case.body, dict):
        for name in LEFT_OUT:  # which the model of these tests does not have
            case.body.pop(name, None)
        for name in ("max_tokens", "max_completion_tokens", "min_tokens", "n"):
            if isinstance(case.body.get(name), int):
                case.body[name] = min(case.body[name], 4)
        case.body["model"] = "tiny"
    response = case.call(base_url=api.url, timeout=LIMIT_S)
    if response.content != VLLMS_OWN:
        case.validate_response(response, checks=list(CHECKS))
