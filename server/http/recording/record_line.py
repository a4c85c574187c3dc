"""A line of a recorded file: a response, with all rows of its choices and what a reader needs."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar

from pydantic import BaseModel

from routed_experts.capture.wire.message import OptIn
from routed_experts.protocol.codec import resolve_dtype
from routed_experts.protocol.models import LABEL, RoutingOptions
from routed_experts.server.http.answers.response import CollectedRows, RoutedResponse
from routed_experts.server.http.encoding.encoding import Encoder
from routed_experts.server.http.encoding.wire_form import LostRowsError, WireForm
from routed_experts.server.http.engine import CapturedEngine
from routed_experts.server.vllm_api import CompletionOutput, RequestOutput


@dataclass(eq=False)
class Record:
    """What is known of one prompt and its choices."""

    request_id: str
    created: int  # Unix time, in seconds
    opt_in: OptIn  # the client's, or the recorder's own
    label: str
    num_running: int  # number of choices that have not finished
    is_dropped: bool = False  # not recorded: it holds no rows
    nbytes: int = 0  # size of the rows so far
    # choices with tokens, and their rows in a buffer
    finished: list[CompletionOutput] = field(default_factory=list)
    model: str | None = None  # of an adapter (LoRA)
    prompt_token_ids: list[int] | None = None  # None if the prompt came as embeddings
    prompt_len: int = 0


class RecordedResponse(BaseModel, extra="allow"):
    """The fields of a line besides rows."""

    choices: list[dict[str, Any]]
    kv_transfer_params: ClassVar[None] = None


def line_of(record: Record, captured: CapturedEngine, keeps_tokens: bool) -> Iterator[bytes]:
    """The line in parts, with the narrowest type that holds its rows. Takes them off the record."""
    choices = sorted(record.finished, key=lambda choice: choice.index)
    response = _response(record, choices, captured, keeps_tokens)
    rows = _rows(record, choices, captured)
    try:
        parts = _encoded(response, rows, captured, resolve_dtype("auto", captured.num_experts))
    except LostRowsError:  # there are unknown rows, and unsigned integers have no -1
        parts = _encoded(response, rows, captured, "int16")
    return chain(parts, [b"\n"])


def _response(
    record: Record, choices: list[CompletionOutput], captured: CapturedEngine, keeps_tokens: bool
) -> RecordedResponse:
    fields: dict[str, Any] = {
        "id": record.request_id,
        "object": "text_completion",
        "created": record.created,
        "model": record.model or captured.info.model,
        "routed_experts_info": captured.info.model_dump(),
    }
    if record.label:
        fields[LABEL] = record.label
    if keeps_tokens and record.prompt_token_ids is not None:
        fields["prompt_token_ids"] = record.prompt_token_ids
    fields["choices"] = [_choice(choice, keeps_tokens) for choice in choices]
    return RecordedResponse(**fields)


def _choice(choice: CompletionOutput, keeps_tokens: bool) -> dict[str, Any]:
    fields = {"index": choice.index, "finish_reason": choice.finish_reason}
    if keeps_tokens:
        fields["token_ids"] = choice.token_ids
    return fields


def _rows(
    record: Record, choices: list[CompletionOutput], captured: CapturedEngine
) -> CollectedRows:
    opt_in = record.opt_in
    options = RoutingOptions(
        prompt_start=opt_in.prompt_start, weights=opt_in.weights, steps=opt_in.steps
    )
    rows = CollectedRows(options, captured.row_shape(options.weights, options.steps))
    # of a prompt that came as embeddings, only the length counts
    prompt = record.prompt_token_ids or [0] * record.prompt_len
    rows.collect(RequestOutput(record.request_id, None, prompt, None, choices, finished=True))
    return rows


def _encoded(
    response: RecordedResponse, rows: CollectedRows, captured: CapturedEngine, dtype: str
) -> Iterator[bytes]:
    form = WireForm(
        dtype=dtype,
        ids_shape=captured.shape,
        num_experts=captured.num_experts,
        has_weights=rows.options.weights,
        has_steps=rows.options.steps,
    )
    body = RoutedResponse(response, rows, Encoder(form), is_list=False).encode(packed=False)
    return iter([body]) if isinstance(body, bytes) else body
