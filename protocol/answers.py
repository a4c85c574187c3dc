"""Reads the JSON of a response, or of a chunk of a stream: each field is checked where it is read.

A response is a dict or an object of the OpenAI client. `collect` puts chunks together. Imports
numpy and the standard library only.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as shown  # a short one
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from routed_experts.protocol.codec import count_missing, decode, decode_weights
from routed_experts.protocol.expert_load import Histogram
from routed_experts.protocol.routing import RoutingError

_LARGEST = (1 << 31) - 1
"""Of indices, token ids and positions, none of which are larger in a real response."""
_LARGEST_COUNT = (1 << 53) - 1
_LARGEST_NUMBER = float(np.finfo(np.float32).max)

_PLAIN = (str, bytes, bytearray, memoryview, int, float, list, tuple)
"""Values of JSON in place of an object. Python's have attributes that are not fields."""


class ArrayJson(NamedTuple):
    """The JSON of an array of rows, and of the one of their weights; None without weights."""

    rows: Any
    weights: Any


@dataclass(frozen=True)
class ChoiceChunk:
    """What a chunk has of one choice."""

    index: int
    prompt_token_ids: tuple[int, ...] | None
    token_ids: tuple[int, ...] | None
    finish_reason: str | None
    histogram: Histogram | None
    logprobs: list[float | None]
    texts: list[str | None]
    array: ArrayJson | None


@dataclass(frozen=True)
class AnswerChunk:
    """What a chunk has; a response that is not streamed is one chunk.

    Attributes:
        prompt_arrays: one for each prompt, in their order; None if the chunk has none.
        prompt_histograms: likewise.
    """

    choices: list[ChoiceChunk]
    prompt_token_ids: tuple[int, ...] | None
    prompt_arrays: list[ArrayJson] | None
    prompt_histograms: list[Histogram] | None


def read_chunk(json: Any) -> AnswerChunk:
    """The fields of a response, of a chunk, or of a line of a batch's output file.

    Raises:
        RoutingError: it is an error of the server, or a field has another form than the server's.
    """
    body = without_envelope(json)
    _check_is_no_error(body)
    choices = _list_field(body, "choices")
    return AnswerChunk(
        choices=[_choice(choice) for choice in choices],
        prompt_token_ids=_token_ids(_field(body, "prompt_token_ids")),
        prompt_arrays=_prompt_arrays(body),
        prompt_histograms=_prompt_histograms(body),
    )


def without_envelope(json: Any) -> Any:
    """The response in a line of a batch's output file, `{"custom_id", "response": {"body"},
    "error"}`; else `json`. It has no envelope itself, so that all callers read the same."""
    while (body := _body_in(json)) is not None:
        json = body
    return json


def _body_in(json: Any) -> Any:
    """The response in an envelope; None without an envelope."""
    if isinstance(json, _PLAIN) or _field(json, "custom_id") is None:
        return None
    response = _field(json, "response")
    return None if response is None else _field(response, "body")


def _check_is_no_error(body: Any) -> None:
    error = _field(body, "error")
    if error is None:
        return
    if isinstance(error, str):
        message = error
    elif isinstance(error, _PLAIN):
        message = shown(error)
    else:
        message = _field(error, "message")
    raise RoutingError(f"the server answered with an error: {message}")


def _choice(choice: Any) -> ChoiceChunk:
    index = _index(choice)
    token_ids = _token_ids(_field(choice, "token_ids"))
    histogram = _field(choice, "routed_experts_histogram")
    rows = _field(choice, "routed_experts")
    logprobs, texts = _logprobs_and_texts(_field(choice, "logprobs"))
    if not texts:
        # The text of the chunk itself would not do: with stop strings and within characters of
        # several tokens, a chunk has the text of other tokens.
        texts = [None] * len(token_ids or ())
    return ChoiceChunk(
        index=index,
        prompt_token_ids=_token_ids(_field(choice, "prompt_token_ids")),
        token_ids=token_ids,
        finish_reason=_finish_reason(index, choice),
        histogram=None if histogram is None else _histogram(histogram),
        logprobs=logprobs,
        texts=texts,
        array=None if rows is None else ArrayJson(rows, _field(choice, "routed_expert_weights")),
    )


def _index(choice: Any) -> int:
    index = _field(choice, "index")
    if index is None:
        return 0
    if type(index) is not int or not 0 <= index <= _LARGEST:
        raise RoutingError(f"not the index of a choice: {shown(index)}")
    return index


def _finish_reason(index: int, choice: Any) -> str | None:
    finish_reason = _field(choice, "finish_reason")
    if finish_reason is None or isinstance(finish_reason, str):
        return finish_reason
    raise RoutingError(f"choice {index}: not a finish reason: {shown(finish_reason)}")


def _token_ids(json: Any) -> tuple[int, ...] | None:
    """Token ids, which may be absent."""
    if json is None:
        return None
    try:
        ids = tuple(map(operator.index, json))
    except TypeError as error:
        raise RoutingError(f"not token ids: {shown(json)}") from error
    if ids and not 0 <= min(ids) <= max(ids) <= _LARGEST:
        raise RoutingError(f"not token ids: from {min(ids)} to {max(ids)}")
    return ids


def _logprobs_and_texts(json: Any) -> tuple[list[float | None], list[str | None]]:
    """Numbers and texts of tokens, in one of two forms: `{"token_logprobs", "tokens"}` of a
    completion, or `{"content": [{"logprob", "token"}]}` of a chat or `/inference/v1/generate`."""
    if json is None:
        return [], []
    content = _field(json, "content")
    if content is None:
        numbers = _list_field(json, "token_logprobs")
        texts = _list_field(json, "tokens")
    else:
        tokens = _checked_list(content, "log-probabilities")
        numbers = [_field(token, "logprob") for token in tokens]
        texts = [_field(token, "token") for token in tokens]
    if not all(number is None or is_number(number) for number in numbers):
        raise RoutingError("not log-probabilities")
    return list(numbers), [text if isinstance(text, str) else None for text in texts]


# ---- arrays ----


def _prompt_arrays(body: Any) -> list[ArrayJson] | None:
    rows = _field(body, "prompt_routed_experts")
    if rows is None:
        return None
    of_rows = _one_for_each_prompt(rows)
    weights = _field(body, "prompt_routed_expert_weights")
    if weights is None:
        return [ArrayJson(array, None) for array in of_rows]
    of_weights = _one_for_each_prompt(weights)
    if len(of_weights) != len(of_rows):
        raise RoutingError(f"rows of {len(of_rows)} prompts, but weights of {len(of_weights)}")
    return list(map(ArrayJson, of_rows, of_weights))


def _one_for_each_prompt(json: Any) -> list[Any]:
    """One array for each prompt: the field is an array, or a list of them for a list of prompts."""
    depth = 0
    inner = json
    while isinstance(inner, list) and inner:
        depth += 1
        inner = inner[0]
    is_one_array = depth in (0, 3)  # an array as nested lists has three levels
    return [json] if is_one_array else json


@dataclass(frozen=True)
class RowsArray:
    """An array of rows, decoded.

    Attributes:
        rows: [n, L, K] ids, in their type on the wire.
        weights: [n, L, K], if there are any.
        start: position of the first row; None in the forms without positions.
    """

    rows: NDArray[np.integer[Any]]
    weights: NDArray[np.float32] | None
    start: int | None


def read_array(json: ArrayJson, dtype: str, shape: Mapping[str, int]) -> RowsArray:
    """The array in `json`, with its weights.

    Args:
        dtype: of an array in the form `raw`.
        shape: `num_layers` and `top_k` of an array in the form `raw`, if they are known.

    Raises:
        ValueError: it is not an array of expert ids, or its weights are not of these ids.
    """
    rows = decode(json.rows, dtype=dtype, **shape)
    start = None
    if isinstance(json.rows, Mapping):
        start = _start(json.rows, len(rows))
        missing = count_missing(rows)
        stated = json.rows.get("missing")
        if stated != missing:
            raise RoutingError(f"{missing} rows are not known, said to be {shown(stated)}")
    weights = None
    if json.weights is not None:
        weights = decode_weights(json.weights, **shape)
        _check_weights(weights, json.weights, rows, start)
    return RowsArray(rows, weights, start)


def _start(json: Mapping[str, Any], num_rows: int) -> int:
    start = json.get("start")
    if type(start) is not int or not 0 <= start <= _LARGEST - num_rows:
        raise RoutingError(f"its first row is at {shown(start)}")
    return start


def _check_weights(
    weights: NDArray[np.float32], json: Any, rows: NDArray[np.integer[Any]], start: int | None
) -> None:
    are_both_empty = len(weights) + len(rows) == 0  # an empty list has no shape
    if weights.shape != rows.shape and not are_both_empty:
        raise RoutingError(f"weights of shape {weights.shape} beside ids of {rows.shape}")
    if not isinstance(json, Mapping):
        return
    if json.get("start") != start or json.get("missing") != count_missing(weights):
        raise RoutingError("weights that are not of the ids beside them")


# ---- histograms ----


def _prompt_histograms(body: Any) -> list[Histogram] | None:
    json = _field(body, "prompt_routed_experts_histogram")
    if json is None:
        return None
    return list(map(_histogram, json if isinstance(json, list) else [json]))


def _histogram(json: Any) -> Histogram:
    if not isinstance(json, Mapping):
        raise RoutingError(f"not a histogram: {shown(json)}")
    if not (_is_count(json.get("rows")) and _is_count(json.get("missing"))):
        raise RoutingError(f"not a histogram: {shown(json)}")
    counts = json.get("counts")
    if not _is_table(counts, _is_count):
        raise RoutingError(
            "not a histogram: its counts are not lists of counts, one for each layer"
        )
    if "weights" in json:
        weights = json["weights"]
        if not _is_table(weights, is_number) or _shape(weights) != _shape(counts):
            raise RoutingError(
                "not a histogram: its weights are not lists of numbers beside its counts"
            )
    histogram: Histogram = json  # type: ignore[assignment]
    return histogram


def _is_table(json: Any, is_cell: Callable[[Any], bool]) -> bool:
    """Whether `json` is a list of lists of one length, which hold cells."""
    if not isinstance(json, list) or not json:
        return False
    return all(
        isinstance(row, list) and 0 < len(row) == len(json[0]) and all(map(is_cell, row))
        for row in json
    )


def _shape(table: Any) -> tuple[int, int]:
    return len(table), len(table[0])


# ---- values ----


def _is_count(json: Any) -> bool:
    return type(json) is int and 0 <= json <= _LARGEST_COUNT


def is_number(json: Any) -> bool:
    """Whether a JSON value is a number that float32 can hold."""
    return type(json) in (int, float) and abs(json) <= _LARGEST_NUMBER


def _field(json: Any, name: str) -> Any:
    """A field of a JSON object or of an object of the OpenAI client; also one that LiteLLM put
    aside."""
    # the usual case, and much faster
    if type(json) is dict and "provider_specific_fields" not in json:
        return json.get(name)
    if isinstance(json, _PLAIN):
        raise RoutingError(f"{shown(json)} in place of an object")
    value = _own_field(json, name)
    put_aside = _own_field(json, "provider_specific_fields")
    if value is None and isinstance(put_aside, Mapping):
        return put_aside.get(name)
    return value


def _own_field(json: Any, name: str) -> Any:
    return json.get(name) if isinstance(json, Mapping) else getattr(json, name, None)


def _list_field(json: Any, name: str) -> Sequence[Any]:
    return _checked_list(_field(json, name), name)


def _checked_list(json: Any, name: str) -> Sequence[Any]:
    """A list that may be absent."""
    if json is None:
        return ()
    if not isinstance(json, Sequence) or isinstance(json, str | bytes):
        raise RoutingError(f"not an answer: its {name} are {type(json).__name__}")
    return json
