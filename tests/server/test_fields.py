"""Each routing field of requests is in the tables that a new one is easily left out of."""

import re
from pathlib import Path
from typing import Any

import pytest

from routed_experts.protocol.models import RoutingFields
from routed_experts.server.http.requests.defaults import (
    CHECKS,
    ModelLimits,
    check_defaults_of_model,
)
from routed_experts.server.settings import SettingsError
from routed_experts.server.tools.running import FIELDS_FOR_SAVED

FIELDS = set(RoutingFields.model_fields)
ASK = Path(__file__).parents[2] / "server/page/static/ask.js"
LIMITS = ModelLimits(num_experts=300, max_model_len=64)

LEFT_TO_REQUESTS_OF_TOOLS = {
    "routed_experts_prompt_start",  # rows have their positions
    "routed_experts_start_len",
    "routed_experts_histogram",  # stands beside the rows, and is not read
    "return_routed_expert_weights",
    "routed_experts_steps",  # stand beside the rows
    "routed_experts_stream",  # these requests are not streamed
    "routed_experts_label",
}
LEFT_OUT_BY_THE_PAGE = {
    "routed_experts_start_len",  # another name of a field that it has
    "routed_experts_histogram",
    "routed_experts_steps",  # which it does not read
    "routed_experts_label",
}


def test_every_field_says_which_defaults_fit_a_model() -> None:
    assert set(CHECKS) == FIELDS, "add the field to CHECKS in server/http/requests/defaults.py"


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"routed_experts_dtype": "uint8"}, "routed_experts_dtype: uint8 .*300 experts"),
        ({"routed_experts_prompt_start": 65}, "prompt_start is 65, .* more than 64 tokens"),
        ({"routed_experts_start_len": 65}, "start_len is 65, .* more than 64 tokens"),
    ],
)
def test_a_default_that_no_request_to_the_model_can_have(
    defaults: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=f"^routed_experts_default: .*{message}"):
        check_defaults_of_model(defaults, LIMITS)


def test_defaults_that_fit_the_model() -> None:
    check_defaults_of_model({"routed_experts_dtype": "auto"}, LIMITS)
    check_defaults_of_model({"routed_experts_prompt_start": 64}, LIMITS)
    check_defaults_of_model({"routed_experts_delivery": "reference"}, LIMITS)


def test_tools_ask_for_one_form_whatever_the_defaults_of_the_server_are() -> None:
    fixed = FIELDS & set(FIELDS_FOR_SAVED)
    assert fixed | LEFT_TO_REQUESTS_OF_TOOLS == FIELDS, (
        "add the field to FIELDS_FOR_SAVED in server/tools/running.py if it changes the form of "
        "what is returned, else to the table above"
    )
    assert not fixed & LEFT_TO_REQUESTS_OF_TOOLS


def test_the_page_asks_for_one_form_whatever_the_defaults_of_the_server_are() -> None:
    body = re.search(r"function bodyOf.*?\n}", ASK.read_text(), re.DOTALL)
    assert body is not None
    sent = FIELDS & set(re.findall(r"\w+(?=:)", body.group()))
    assert sent | LEFT_OUT_BY_THE_PAGE == FIELDS, (
        "add the field to bodyOf in server/page/static/ask.js if it changes what is returned, else "
        "to the table above"
    )
