"""Messages between API processes and the engine, carried in fields that vLLM already sends."""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple, Protocol

from numpy.typing import NDArray

from routed_experts.protocol.codec import Rows, Steps

OPT_IN_ARG = "routed_experts.opt_in"
"""Key in `SamplingParams.extra_args` that opts a request in; its value is `OptIn.encode()`."""

# bits of the flags in an encoded `OptIn`
_SHARED = 1
_WEIGHTS = 2
_FINAL_ONLY = 4
_ALLOW_MISSING = 8
_OWN_PROMPT = 16
_STEPS = 32


@dataclass(frozen=True, slots=True)
class OptIn:
    """Opts a request in: its rows are to be sent. All requests of one prompt (`n` > 1) carry the
    same one. The prompt's rows come before the first tokens of any of them (`PROMPT_ROWS`): once,
    those of the first that has a token, or with `own_prompt` those of each."""

    prompt_start: int  # position of the first prompt row to send
    prompt_id: bytes  # 16 random bytes, which tell prompts apart
    shared: bool  # whether the prompt has several requests
    weights: bool = False  # whether rows are to have weights, where the engine captures them
    # Whether generated rows come with the request's last output, as nobody needs them before. Then
    # each request has a last output, also if it is aborted.
    final_only: bool = False
    # Whether rows that are not there may stay unknown; then nothing is computed again for them.
    allow_missing: bool = False
    # Whether the rows of its prompt are to be those of its own KV. Of several requests, each
    # computes the part of the prompt for which there is no prefix hit.
    own_prompt: bool = False
    steps: bool = False  # whether rows are to have their steps

    # the start, the id and the flags
    _FORM: ClassVar[struct.Struct] = struct.Struct("<q16sB")

    def encode(self) -> bytes:
        """As bytes, because clients can fill `extra_args` at some endpoints, with JSON, which has
        no bytes."""
        flags = self.shared * _SHARED
        flags |= self.weights * _WEIGHTS
        flags |= self.final_only * _FINAL_ONLY
        flags |= self.allow_missing * _ALLOW_MISSING
        flags |= self.own_prompt * _OWN_PROMPT
        flags |= self.steps * _STEPS
        return self._FORM.pack(self.prompt_start, self.prompt_id, flags)

    @classmethod
    def decode(cls, value: object) -> "OptIn | None":
        """The `OptIn` that `encode` made into bytes; None for anything else."""
        if not isinstance(value, bytes) or len(value) != cls._FORM.size:
            return None
        prompt_start, prompt_id, flags = cls._FORM.unpack(value)
        return cls(
            prompt_start,
            prompt_id,
            shared=bool(flags & _SHARED),
            weights=bool(flags & _WEIGHTS),
            final_only=bool(flags & _FINAL_ONLY),
            allow_missing=bool(flags & _ALLOW_MISSING),
            own_prompt=bool(flags & _OWN_PROMPT),
            steps=bool(flags & _STEPS),
        )

    @classmethod
    def of(cls, params: Any) -> "OptIn | None":
        """What a request with these `SamplingParams` opted in to; None if it did not."""
        if params is None or not params.extra_args:
            return None
        return cls.decode(params.extra_args.get(OPT_IN_ARG))


class PlacedRows(NamedTuple):
    """Rows of a sequence, and where in it they are."""

    start: int  # absolute position of the first row
    rows: Rows  # [n, L, K], with weights [n, 3L, K]
    steps: Steps | None = None  # if the request asks for them


class Output(Protocol):
    """A request's part of the engine's message for a step: what is used here of vLLM's
    `EngineCoreOutput`."""

    request_id: str
    stop_reason: int | str | None
    kv_transfer_params: dict[str, Any] | None
    # In the engine its rows, until `envelope.pack` has taken them off. In a message rows that were
    # not packed; of the envelope, what was packed.
    routed_experts: PlacedRows | NDArray[Any] | None


PROMPT_ROWS = "routed_experts.prompt"
"""Kind of outputs that bring rows of a prompt, before the first token of any of its requests."""

GENERATED_ROWS = "routed_experts.rows"
"""Kind of outputs that bring generated rows of a request, before its last output."""


class RowsOutput(NamedTuple):
    """Whose rows an output brings that has no tokens.

    Clients choose request ids, and may use one again. So the kind is in `stop_reason`, into which
    vLLM's engine puts nothing of theirs, and the output's own id begins with random bytes: no
    request has it, and vLLM ignores it.
    """

    kind: str  # PROMPT_ROWS or GENERATED_ROWS
    prompt_id: bytes  # of the request's `OptIn`; tells it from an earlier request of the same id
    request_id: str

    @property
    def output_id(self) -> str:
        return f"{self.prompt_id.hex()}-{self.request_id}"

    @classmethod
    def of(cls, output: Output) -> "RowsOutput | None":
        """Whose rows an output brings; None for an output of a request."""
        kind = output.stop_reason
        if kind != PROMPT_ROWS and kind != GENERATED_ROWS:
            return None
        prompt_id, _, request_id = output.request_id.partition("-")
        return cls(kind, bytes.fromhex(prompt_id), request_id)


class Cause(IntEnum):
    """Why a slot has no row although it has KV."""

    FAULT = 0
    KV_TRANSFER = 1
    """KV of another instance that came without rows."""


class UnknownRows(NamedTuple):
    """Why some of a request's rows are unknown."""

    prompt_id: bytes  # of the request's `OptIn`
    request_id: str  # of a prompt's rows, the request that they are sent with
    is_prompt: bool  # whether they are the prompt's
    cause: Cause  # other than `FAULT`
    num_rows: int
