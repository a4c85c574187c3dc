"""What running requests say about their experts: keeps it out of others' prefix cache, and checks
that it was done in each step."""

from collections.abc import Mapping
from typing import Any

from routed_experts.capture.scheduler.expected_routing import ExpectedRouting
from routed_experts.capture.scheduler.step import Step
from routed_experts.capture.wire.message import PlacedRows
from routed_experts.capture.wire.rows import INPUT_FLAG
from routed_experts.protocol.codec import Rows
from routed_experts.protocol.routing_input import EncodedInput, RoutingInput

_SALT_MARK = "/routed_experts:"
"""In the salt of a request's prefix cache, before what we say."""


_SAYS_NOTHING = ExpectedRouting(None)


class NamedInput(EncodedInput):
    """Of a request whose KV has the name that `name_of_kv` says."""

    __slots__ = ()


def name_of_kv(own_salt: str | None, encoded: EncodedInput | None) -> str:
    """What a request's prefix cache is salted with, which has `own_salt` of its own. With no input:
    so that it is no name of one that has."""
    said = "none" if encoded is None else encoded.digest.hex()
    return f"{own_salt or ''}{_SALT_MARK}{said}"


class RouterInputs:
    """What is expected of running requests that have an input, by their ids."""

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on
        self._running: dict[str, ExpectedRouting] = {}

    def refusal(self, request: Any) -> str | None:
        """Why a new request cannot run; None if it can. API processes say so earlier, and better."""
        encoded = EncodedInput.of(request.sampling_params)
        if encoded is None:
            return None
        if not self._is_on:
            return f"the engine runs without {INPUT_FLAG}"
        if request.resumable:
            return "its prompt is streamed in"
        try:
            routing_input = RoutingInput.decode(encoded)
        except ValueError as error:
            return str(error)
        if routing_input.end > request.num_prompt_tokens:
            # Drafts may move the positions of generated tokens, so theirs cannot be given.
            return "its rows end behind its prompt"
        return None

    def salt(self, request: Any) -> None:
        """Gives a new request's KV a name of its own: that of these tokens under this routing is
        not that of the same tokens under another.

        Here, because every request comes here, whoever made it; those of messages have theirs from
        the thread that read them. No two of them can have one name: a name ends in the digest of an
        input, or in `none`, or it has no mark, and what is before the last mark is the client's.
        """
        encoded = EncodedInput.of(request.sampling_params)
        if isinstance(encoded, NamedInput):
            return
        if encoded is not None or _SALT_MARK in (request.cache_salt or ""):
            self._rename(request, name_of_kv(request.cache_salt, encoded))

    def _rename(self, request: Any, name: str) -> None:
        request.cache_salt = name
        # A request hashes its blocks when it is made. Each block's hash contains the one before,
        # so the first block's salt is enough.
        request.block_hashes.clear()
        request.update_block_hashes()

    def add(self, request: Any) -> None:
        """Called when vLLM has accepted a request."""
        encoded = EncodedInput.of(request.sampling_params)
        if encoded is not None:
            self._running[request.request_id] = ExpectedRouting(RoutingInput.decode(encoded))

    def forget(self, request_id: str) -> None:
        """Called when a request has ended."""
        self._running.pop(request_id, None)

    def complete(self, recomputed: dict[str, PlacedRows]) -> None:
        """Puts what requests give where rows that they had are not known."""
        for request_id in recomputed.keys() & self._running.keys():
            expected = self._running[request_id]
            recomputed[request_id] = expected.completed(recomputed[request_id])

    def of_requests(
        self, request_ids: Mapping[str, int], recomputed: Mapping[str, PlacedRows]
    ) -> dict[str, ExpectedRouting]:
        """Of the requests of a step, those that have an input, or compute tokens again under rows
        that they had."""
        expected = {}
        if self._running:
            expected = {
                request_id: self._running[request_id]
                for request_id in request_ids
                if request_id in self._running
            }
        for request_id, rows in recomputed.items():
            own = expected.get(request_id, _SAYS_NOTHING)
            expected[request_id] = own.recomputed(rows)
        return expected


def check_told(step: Step, ids: Rows) -> None:
    """Raises `RuntimeError` unless a step that has arrived did what its requests say. `ids`
    ([n, L, K]) are those of its rows.

    Else a name that vLLM has changed would make the worker follow nothing, or give a request's
    experts to another one, and nobody would know. So the engine ends, and not the request alone:
    its neighbours, and the KV of all, may be wrong.
    """
    told = step.captured.told
    num_rows = 0
    num_steered = 0
    wrong: list[str] = []
    for request_id, expected in step.inputs.items():
        if request_id in told.unfit:
            continue
        start = step.starts[request_id]
        captured = step.part_of(request_id, ids)
        num_rows += expected.num_given(start, len(captured))
        num_steered += expected.has_bias
        if not expected.is_followed(start, captured):
            wrong.append(request_id)
    if wrong or (told.num_rows, told.num_steered) != (num_rows, num_steered):
        raise RuntimeError(
            f"a step of requests {list(step.scheduled.num_scheduled_tokens)}: expected that the "
            f"routers are told the experts of {num_rows} tokens and the biases of {num_steered} "
            f"requests, actually of {told.num_rows} and {told.num_steered}; requests that got "
            f"other experts: {wrong}. Please report this message, and start without {INPUT_FLAG}"
        )
