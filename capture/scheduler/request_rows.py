"""The state of a request that opted in: which rows it has been sent, and which come next."""

from dataclasses import dataclass, field

from routed_experts.capture.scheduler.pending_rows import PendingRows
from routed_experts.capture.wire.message import OptIn
from routed_experts.protocol.codec import Rows


@dataclass(slots=True, eq=False)
class RequestRows:
    request_id: str
    client: int  # index of its API process
    opt_in: OptIn
    num_prompt: int  # tokens of the prompt
    weights_epoch: int  # when it came
    is_last_only: bool  # whether generated rows stay in the host cache until it ends
    next_row: int  # rows before it were sent or are held, but for the prompt's
    is_prompt_due: bool = True  # until the first token
    # the last rows before `next_row`, if they are sent at its end only
    held: list[Rows] = field(default_factory=list)
    # once it has ended: what is to be sent with its last output
    last_rows: PendingRows | None = None

    @property
    def first_held(self) -> int:
        return self.next_row - sum(len(rows) for rows in self.held)

    @property
    def first_needed(self) -> int:
        """Position of the first row that is still to be computed or read for it."""
        return (
            min(self.opt_in.prompt_start, self.num_prompt) if self.is_prompt_due else self.next_row
        )
