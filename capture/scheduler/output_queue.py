"""Sends rows of prompts ahead of the first tokens of their requests, and rows that are needed at
the end before it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from routed_experts.capture.scheduler.pending_rows import PendingRows
from routed_experts.capture.scheduler.request_rows import RequestRows
from routed_experts.capture.wire.message import GENERATED_ROWS, PROMPT_ROWS, RowsOutput

_PART_BYTES = 8 << 20
"""Maximum bytes of such rows in a message that also has other requests' tokens, which it delays by
about 3 ms. A prompt of 32k tokens (Qwen3-30B-A3B) takes three or four steps."""

_BACKLOG_SHARE = 16
"""If more wait, since long prefills add more than one part per step, each message takes a quarter
of the backlog up to three parts, so that prompts wait for few steps, or 1 / _BACKLOG_SHARE of it,
if that is more."""


@dataclass(eq=False)
class _Entry:
    """Rows, and the outputs held back until they are sent."""

    key: object
    client: int  # index of the API process
    rows: PendingRows
    brings: RowsOutput  # whose rows its outputs bring
    # of a prompt: those that have received a token
    requests: list[RequestRows] = field(default_factory=list)
    followers: list[EngineCoreOutput] = field(default_factory=list)  # in order

    @property
    def is_prompt(self) -> bool:
        return self.brings.kind == PROMPT_ROWS

    def take(self, num_bytes: int) -> list[EngineCoreOutput]:
        """The next rows, at most `num_bytes`. The last rows of a request come with its last
        output."""
        size = self.rows.nbytes
        part = self.rows.take(num_bytes)
        if not len(self.rows) and not self.is_prompt:
            self.followers[0].routed_experts = part
            return []
        if self.rows.nbytes == size:
            return []
        return [
            EngineCoreOutput(
                self.brings.output_id, [], stop_reason=self.brings.kind, routed_experts=part
            )
        ]


class _Waiting(NamedTuple):
    """A request whose outputs are held back for the rows of its prompt."""

    request: RequestRows
    prompt: _Entry


class _Last(NamedTuple):
    """Rows that a request gets with its last output."""

    request: RequestRows
    rows: PendingRows


class OutputQueue:
    """Sends each prompt's rows once, before any token of its requests, and a request's last rows
    before its end. Their outputs wait where these do not fit a message; other requests do not."""

    def __init__(self) -> None:
        self.part_bytes = _PART_BYTES
        # Prompts by their keys, and last rows, in the order in which they came.
        self._entries: dict[object, _Entry] = {}
        # By request id, which is all that an output says of its request. An id may come again: so
        # what is here of a request goes as soon as nobody waits for its outputs (`leave`).
        self._waiting: dict[str, _Waiting] = {}
        self._last: dict[str, _Last] = {}  # of requests whose last output was not seen yet
        self._ends: list[tuple[RequestRows, EngineCoreOutput]] = []

    def __len__(self) -> int:
        """Number of prompts and of requests' ends that are not sent."""
        return len(self._entries) + len(self._ends)

    def is_waiting(self, request: RequestRows) -> bool:
        waiting = self._waiting.get(request.request_id)
        return waiting is not None and waiting.request is request

    def send_prompt(self, request: RequestRows, key: object, rows: PendingRows) -> None:
        """Sends a prompt's rows with the first token of one of its requests. `key` identifies the
        prompt."""
        brings = RowsOutput(PROMPT_ROWS, request.opt_in.prompt_id, request.request_id)
        self._entries[key] = _Entry(key, request.client, rows, brings)
        self.follow(request, key)

    def follow(self, request: RequestRows, key: object) -> None:
        """Holds a request's outputs back until its prompt's rows are sent, if they are pending."""
        prompt = self._entries.get(key)
        if prompt is not None:
            prompt.requests.append(request)
            self._waiting[request.request_id] = _Waiting(request, prompt)

    def leave(self, request_id: str) -> object | None:
        """Called when an API process has aborted a request, perhaps one that has ended: drops its
        outputs, and the rows of its prompt if no other request waits for them. Returns the prompt's
        key then.

        Requests whose rows come at the end stay, as their API process waits for that.
        """
        waiting = self._waiting.get(request_id)
        if waiting is None or waiting.request.opt_in.final_only:
            return None
        request, prompt = waiting
        del self._waiting[request_id]
        self._ends = [(ended, output) for ended, output in self._ends if ended is not request]
        prompt.requests.remove(request)
        prompt.followers = [
            output for output in prompt.followers if output.request_id != request_id
        ]
        if prompt.requests:
            return None
        del self._entries[prompt.key]
        return prompt.key

    def send_last(self, request: RequestRows, rows: PendingRows | None) -> None:
        """Sends a request's last rows with its last output, which is in this step's message."""
        if rows is not None:
            self._last[request.request_id] = _Last(request, rows)

    def end(self, request: RequestRows, reason: FinishReason, rows: PendingRows | None) -> None:
        """Queues the end of a request after its held outputs, with its last `rows`."""
        self._ends.append((request, EngineCoreOutput(request.request_id, [], finish_reason=reason)))
        self.send_last(request, rows)

    def fill(self, messages: dict[int, EngineCoreOutputs]) -> None:
        """Adds rows and released outputs to a step's messages to the API processes."""
        for request, output in self._ends:
            messages.setdefault(request.client, EngineCoreOutputs()).outputs.append(output)
        self._ends.clear()
        if not self._entries and not self._last:
            return
        for client, message in messages.items():
            message.outputs = self._admit(client, message.outputs)
        for client in dict.fromkeys(entry.client for entry in self._entries.values()):
            message = messages.setdefault(client, EngineCoreOutputs())
            message.outputs = self._release(client, is_alone=not message.outputs) + message.outputs

    def _admit(self, client: int, outputs: Sequence[EngineCoreOutput]) -> list[EngineCoreOutput]:
        """The outputs that wait for nothing."""
        others = []
        for output in outputs:
            if (waiting := self._waiting.get(output.request_id)) is not None:
                waiting.prompt.followers.append(output)
            elif (
                output.finish_reason is not None
                and (last := self._last.pop(output.request_id, None)) is not None
            ):
                key = object()
                brings = RowsOutput(
                    GENERATED_ROWS, last.request.opt_in.prompt_id, output.request_id
                )
                self._entries[key] = _Entry(key, client, last.rows, brings, followers=[output])
            else:
                others.append(output)
        return others

    def _release(self, client: int, is_alone: bool) -> list[EngineCoreOutput]:
        """The next rows for an API process, and the outputs that waited for them. The entry that
        came first gets half of a message; shorter ones come before longer ones in the rest."""
        entries = [entry for entry in self._entries.values() if entry.client == client]
        room = sum(entry.rows.nbytes for entry in entries) + sum(
            last.rows.nbytes for last in self._last.values()
        )
        if not is_alone or len(entries) > 1:
            most = max(self.part_bytes, min(room // 4, 3 * self.part_bytes), room // _BACKLOG_SHARE)
            room = min(room, most)
        outputs: list[EngineCoreOutput] = []
        while entries:
            first, *others = entries
            shorter = [
                (entry, room) for entry in sorted(others, key=lambda entry: entry.rows.nbytes)
            ]
            for entry, share in [(first, room // 2 if others else room), *shorter, (first, room)]:
                if room < entry.rows.row_bytes:
                    break
                if size := entry.rows.nbytes:
                    outputs += entry.take(min(share, room))
                    room -= size - entry.rows.nbytes
            known = set(self._entries)
            for entry in entries:
                if not len(entry.rows):
                    outputs += self._close(entry)
            # what followed a prompt
            entries = [entry for key, entry in self._entries.items() if key not in known]
        return outputs

    def _close(self, entry: _Entry) -> list[EngineCoreOutput]:
        """Removes an entry whose rows are sent; gives the outputs that wait for nothing else."""
        del self._entries[entry.key]
        for request in entry.requests:
            if self.is_waiting(request):
                del self._waiting[request.request_id]
        return self._admit(entry.client, entry.followers) if entry.is_prompt else entry.followers
