"""Which of the server's defaults of request fields no request to its model could have."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from routed_experts.protocol.codec import CodecError, resolve_dtype
from routed_experts.protocol.input_fields import FieldsOfInput
from routed_experts.protocol.models import FieldError
from routed_experts.protocol.routing_input import EncodedInput
from routed_experts.server.http.requests.routing_input import InputReader
from routed_experts.server.settings import SettingsError


class ModelLimits(NamedTuple):
    """What a default has to fit."""

    num_experts: int
    max_model_len: int


def _problem_of_start(name: str, start: int, limits: ModelLimits) -> str | None:
    """Requests that do not ask for routing would silently get answers without rows."""
    longest = limits.max_model_len
    if start <= longest:
        return None
    return f"{name} is {start}, but no prompt has more than {longest} tokens (--max-model-len)."


def _problem_of_dtype(name: str, dtype: Any, limits: ModelLimits) -> str | None:
    try:
        resolve_dtype(dtype, limits.num_experts)
    except CodecError as error:
        return f"{name}: {error}."
    return None


Check = Callable[[str, Any, ModelLimits], str | None]
"""What is wrong with a field's value, by the field's name and the value; None if nothing is."""

CHECKS: dict[str, Check | None] = {
    "return_routed_experts": None,
    "routed_experts_prompt_start": _problem_of_start,
    "routed_experts_start_len": _problem_of_start,
    "routed_experts_format": None,
    "routed_experts_dtype": _problem_of_dtype,
    "routed_experts_layout": None,
    "routed_experts_layers": None,
    "routed_experts_histogram": None,
    "return_routed_expert_weights": None,
    "routed_experts_steps": None,
    "routed_experts_delivery": None,
    "routed_experts_stream": None,
    "routed_experts_label": None,
}
"""Of every field of what is returned. None: each value that `Settings` accepts fits each model."""


def check_defaults_of_model(defaults: Mapping[str, Any], limits: ModelLimits) -> None:
    """Raises `SettingsError` for defaults of requests that no request to this model could have.
    What the model does not decide, `Settings` has checked."""
    for name, check in CHECKS.items():
        if name not in defaults or check is None:
            continue
        problem = check(name, defaults[name], limits)
        if problem is not None:
            raise SettingsError(f"routed_experts_default: {problem}")


def encoded_default(fields: FieldsOfInput, reader: InputReader) -> EncodedInput | None:
    """What the engine is told for requests that do not say which experts their tokens take; None if
    nothing. Raises `SettingsError` as above."""
    if fields.says_nothing:
        return None
    try:
        return reader.encode_default(fields)
    except FieldError as error:
        raise SettingsError(f"routed_experts_default: {error}.") from None
