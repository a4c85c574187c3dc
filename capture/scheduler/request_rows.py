"""What is known of a request that opted in, and which phase it is in.

Each request is in one phase, which says how its next output gets its rows. `RequestIndexes.move` is
the only way from one to another, and these are all the moves:

    from                    to            when
    ----------------------  ------------  ---------------------------------------------------------
    NEW                     PREFILL       vLLM has accepted the request
    PREFILL                 ALONE         a step is scheduled that computes its last known token
    ALONE                   STREAM        an output was taken that waits for no prompt; rows are
                                          sent with their tokens
    ALONE                   PARKED        an output was taken; rows are sent at the end
    ALONE, STREAM, PARKED   PREFILL       it is preempted; rows that were parked were rescued
    PREFILL, ALONE          ENDED_ALONE   it ends
    STREAM                  ENDED_STREAM  it ends
    PARKED                  ENDED_PARKED  it ends
    ENDED_ALONE             GONE          its last output was taken, or none comes
    ENDED_STREAM            GONE          the same
    ENDED_PARKED            GONE          the same

A generated row is *parked* while it stays in the host cache until its request ends. It is *rescued*
if it is read before, because its block may be overwritten. It is *unsent* until its request ends if
it is not in the host cache for that long.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from routed_experts.capture.scheduler.pending_rows import PendingRows
from routed_experts.capture.wire.message import OptIn
from routed_experts.protocol.codec import Rows, Steps


class Phase(Enum):
    NEW = auto()
    """Not looked at yet."""
    PREFILL = auto()
    """Some tokens before the next one that is sampled are not scheduled yet. Outputs of steps that
    were scheduled before may still come, and are taken one by one."""
    ALONE = auto()
    """Its next output is taken alone: it may bring the first token, or come after a prefill, or
    after rows were rescued; or it waits in the output queue for the rows of its prompt."""
    STREAM = auto()
    """Its steps bring one row each, as a rule. The rows of all streams are taken at once."""
    PARKED = auto()
    """Its generated rows stay in the host cache until it ends. Its outputs are not looked at."""
    ENDED_ALONE = auto()
    """Its last output is taken alone, if it comes."""
    ENDED_STREAM = auto()
    """Its last output is taken with those of streams, if it comes."""
    ENDED_PARKED = auto()
    """Its last output gets all generated rows, if it comes."""
    GONE = auto()
    """Nothing more comes of it, but for what waits in the output queue. Its id may be another
    request's."""


_AFTER_END = {
    Phase.PREFILL: Phase.ENDED_ALONE,
    Phase.ALONE: Phase.ENDED_ALONE,
    Phase.STREAM: Phase.ENDED_STREAM,
    Phase.PARKED: Phase.ENDED_PARKED,
}

TRANSITIONS: dict[Phase, tuple[Phase, ...]] = {
    Phase.NEW: (Phase.PREFILL,),
    Phase.PREFILL: (Phase.ALONE, Phase.ENDED_ALONE),
    Phase.ALONE: (Phase.PREFILL, Phase.STREAM, Phase.PARKED, Phase.ENDED_ALONE),
    Phase.STREAM: (Phase.PREFILL, Phase.ENDED_STREAM),
    Phase.PARKED: (Phase.PREFILL, Phase.ENDED_PARKED),
    Phase.ENDED_ALONE: (Phase.GONE,),
    Phase.ENDED_STREAM: (Phase.GONE,),
    Phase.ENDED_PARKED: (Phase.GONE,),
    Phase.GONE: (),
}
"""Where a request may go from each phase: the table above."""


@dataclass(slots=True, eq=False)
class RequestRows:
    """A request that opted in, and which of its rows come next."""

    request_id: str
    client: int  # index of its API process
    opt_in: OptIn
    num_prompt_tokens: int
    weights_epoch: int  # when it came
    rows_at_end: bool  # whether its generated rows are sent when it ends
    # Position. Generated rows before it were sent or are unsent; those from it on are still to come
    # with outputs or, of a request that is parked, are in the host cache.
    next_row: int
    phase: Phase = Phase.NEW  # set by `RequestIndexes.move` only
    is_prompt_due: bool = True  # until the first token
    # The last rows before `next_row`, in order; empty if rows are sent with their tokens.
    unsent: list[Rows] = field(default_factory=list)
    unsent_steps: list[Steps] = field(default_factory=list)  # of each, if it asks for them
    # Set when it ends, if it was parked: what is to be sent with its last output.
    last_rows: PendingRows | None = None

    @property
    def first_unsent(self) -> int:
        """Position of the first unsent row; `next_row` if there is none."""
        return self.next_row - sum(len(rows) for rows in self.unsent)

    @property
    def first_needed(self) -> int:
        """Position of the first row that is still to be computed or read for it."""
        if self.is_prompt_due:
            return min(self.opt_in.prompt_start, self.num_prompt_tokens)
        return self.next_row


class Index(dict[str, RequestRows]):
    """Some of the requests, by their ids. Of requests that vLLM has, no two have the same id."""


class RequestIndexes:
    """All requests that opted in, as a step looks for them. Only `move` writes into the indexes."""

    def __init__(self) -> None:
        self.running = Index()  # those that have not ended
        self.prefilling = Index()
        self.alone = Index()  # whose outputs are taken one by one
        self.streams = Index()  # whose outputs are taken at once
        self.ended = Index()  # in this step, or since
        self._of_phase: dict[Phase, tuple[Index, ...]] = {
            Phase.NEW: (),
            Phase.PREFILL: (self.running, self.prefilling, self.alone),
            Phase.ALONE: (self.running, self.alone),
            Phase.STREAM: (self.running, self.streams),
            Phase.PARKED: (self.running,),
            Phase.ENDED_ALONE: (self.ended, self.alone),
            Phase.ENDED_STREAM: (self.ended, self.streams),
            Phase.ENDED_PARKED: (self.ended,),
            Phase.GONE: (),
        }

    def move(self, request: RequestRows, to: Phase) -> None:
        """Moves a request into another phase. Asserts that `TRANSITIONS` has the move, and that no
        other request has its id."""
        assert to in TRANSITIONS[request.phase], (
            f"request {request.request_id!r} goes from {request.phase.name}: expected to "
            f"{_names(TRANSITIONS[request.phase])}, actually to {to.name}"
        )
        for index in self._of_phase[request.phase]:
            removed = index.pop(request.request_id, None)
            assert removed is request, (
                f"request {request.request_id!r} leaves {request.phase.name}: expected in its "
                f"index, actually there: {removed}"
            )
        for index in self._of_phase[to]:
            other = index.setdefault(request.request_id, request)
            assert other is request, (
                f"request {request.request_id!r} goes to {to.name}: expected to be the only one "
                f"of this id, actually there: {other}"
            )
        request.phase = to

    def end(self, request: RequestRows) -> None:
        """Moves a running request into the phase in which it waits for its last output."""
        assert request.phase in _AFTER_END, (
            f"request {request.request_id!r} ends: expected in {_names(_AFTER_END)}, "
            f"actually in {request.phase.name}"
        )
        self.move(request, _AFTER_END[request.phase])

    def forget_ended(self) -> None:
        """Called when the last outputs of all requests that have ended were taken, or none comes."""
        for request in list(self.ended.values()):
            self.move(request, Phase.GONE)


def _names(phases: Iterable[Phase]) -> str:
    return " or ".join(phase.name for phase in phases) or "nothing"
