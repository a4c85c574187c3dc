"""The phases of a request that opted in."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routed_experts.capture.scheduler import request_rows
from routed_experts.capture.scheduler.request_rows import (
    TRANSITIONS,
    Phase,
    RequestIndexes,
    RequestRows,
)
from routed_experts.capture.wire.message import OptIn
from tests.documentation import transitions_in


def request(request_id: str = "r") -> RequestRows:
    return RequestRows(
        request_id,
        client=0,
        opt_in=OptIn(0, bytes(16), shared=False),
        num_prompt_tokens=5,
        weights_epoch=0,
        rows_at_end=False,
        next_row=4,
    )


def indexes_of(requests: RequestIndexes, state: RequestRows) -> set[str]:
    return {
        name
        for name in ("running", "prefilling", "alone", "streams", "ended")
        if getattr(requests, name).get(state.request_id) is state
    }


def test_the_table_in_the_docstring_is_the_table_that_is_checked() -> None:
    checked = {
        (before.name, after.name) for before, afters in TRANSITIONS.items() for after in afters
    }
    assert transitions_in(request_rows) == checked


INDEXES = {
    Phase.NEW: set(),
    Phase.PREFILL: {"running", "prefilling", "alone"},
    Phase.ALONE: {"running", "alone"},
    Phase.STREAM: {"running", "streams"},
    Phase.PARKED: {"running"},
    Phase.ENDED_ALONE: {"ended", "alone"},
    Phase.ENDED_STREAM: {"ended", "streams"},
    Phase.ENDED_PARKED: {"ended"},
    Phase.GONE: set(),
}


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(st.data())
def test_a_request_is_in_the_indexes_of_its_phase_and_in_no_other(data: st.DataObject) -> None:
    requests = RequestIndexes()
    states = [request("a"), request("b")]
    for state in data.draw(st.lists(st.sampled_from(states), max_size=12)):
        if state.phase is Phase.GONE:
            continue
        requests.move(state, data.draw(st.sampled_from(TRANSITIONS[state.phase])))
        assert indexes_of(requests, states[0]) == INDEXES[states[0].phase]
        assert indexes_of(requests, states[1]) == INDEXES[states[1].phase]


def test_a_move_that_is_not_in_the_table_says_what_was_expected() -> None:
    requests, state = RequestIndexes(), request("asks")
    requests.move(state, Phase.PREFILL)
    with pytest.raises(AssertionError) as error:
        requests.move(state, Phase.STREAM)
    assert str(error.value) == (
        "request 'asks' goes from PREFILL: expected to ALONE or ENDED_ALONE, actually to STREAM"
    )
    assert indexes_of(requests, state) == INDEXES[Phase.PREFILL]


def test_two_requests_of_one_id_are_an_error() -> None:
    requests = RequestIndexes()
    requests.move(request("same"), Phase.PREFILL)
    with pytest.raises(AssertionError, match=r"'same'.*expected to be the only one"):
        requests.move(request("same"), Phase.PREFILL)


def test_a_request_ends_once() -> None:
    requests, state = RequestIndexes(), request("ends")
    requests.move(state, Phase.PREFILL)
    requests.end(state)
    with pytest.raises(AssertionError, match=r"'ends' ends: expected .* actually in ENDED_ALONE"):
        requests.end(state)
