"""Sends rows of prompts ahead of the first tokens of their requests, and rows that are needed at
the end before it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from routed_experts.capture.scheduler.pending_rows import PendingRows
from routed_experts.capture.scheduler.request_rows import RequestRows
from routed_experts.capture.wire.message import GENERATED_ROWS, PROMPT_ROWS, RowsOutput

PART_BYTES = 8 << 20
"""Bytes of such rows in a message, which delay the tokens of other requests in it by about 3 ms. A
prompt of 32k tokens (Qwen3-30B-A3B) takes three or four steps."""

BACKLOG_SHARE = 8
"""If more than this many parts wait, since long prefills add more than one per step, each message
takes 1 / BACKLOG_SHARE of what waits, so that prompts wait for few steps."""


@dataclass(eq=False)
class _Entry:
    """Rows that wait to be sent, and the outputs that wait for them."""

    key: object
    client: int  # index of the API process
    rows: PendingRows
    header: RowsOutput  # whose rows they are
    outputs: list[EngineCoreOutput] = field(default_factory=list)  # that wait, in order
    # of a prompt: those that have received a token
    requests: list[RequestRows] = field(default_factory=list)

    @property
    def is_prompt(self) -> bool:
        return self.header.kind == PROMPT_ROWS

    def take(self, num_bytes: int) -> list[EngineCoreOutput]:
        """The next rows, at most `num_bytes`, on an output of their own. The last rows of a request
        are put on its last output, which waits for them."""
        part = self.rows.take(num_bytes)
        if not self.is_prompt and not len(self.rows):
            self.outputs[0].routed_experts = part
            return []
        return [
            EngineCoreOutput(
                self.header.output_id, [], stop_reason=self.header.kind, routed_experts=part
            )
        ]


class _Waiting(NamedTuple):
    """A request whose outputs wait for the rows of its prompt."""

    request: RequestRows
    prompt: _Entry


class _LastRows(NamedTuple):
    """Rows that a request gets with its last output."""

    request: RequestRows
    rows: PendingRows


class _End(NamedTuple):
    """A last output that vLLM does not make."""

    request: RequestRows
    output: EngineCoreOutput


class OutputQueue:
    """Sends each prompt's rows once, before any token of its requests, and a request's last rows
    before its end. Their outputs wait where these do not fit a message; other requests do not."""

    def __init__(self) -> None:
        self.part_bytes = PART_BYTES
        # Prompts by their keys, and last rows, in the order in which they came.
        self._entries: dict[object, _Entry] = {}
        # By request id, which is all that an output says of its request. An id may come again: so
        # what is here of a request goes as soon as nobody waits for its outputs (`leave`).
        self._waiting: dict[str, _Waiting] = {}
        # of requests whose last output was not seen yet, or waits for the rows of their prompt
        self._last_rows: dict[str, _LastRows] = {}
        self._ends: list[_End] = []
        # the API process and the only output of requests that were refused
        self._refused: list[tuple[int, EngineCoreOutput]] = []

    def __len__(self) -> int:
        """Number of prompts and of requests' ends that are not sent."""
        return len(self._entries) + len(self._ends) + len(self._refused)

    def is_waiting(self, request: RequestRows) -> bool:
        """Whether outputs of a request wait for the rows of its prompt."""
        waiting = self._waiting.get(request.request_id)
        return waiting is not None and waiting.request is request

    # ---- what is to be sent ----

    def send_prompt(self, request: RequestRows, key: object, rows: PendingRows) -> None:
        """Sends a prompt's rows with the first token of one of its requests. `key` identifies the
        prompt."""
        header = RowsOutput(PROMPT_ROWS, request.opt_in.prompt_id, request.request_id)
        self._entries[key] = _Entry(key, request.client, rows, header)
        self.follow(request, key)

    def follow(self, request: RequestRows, key: object) -> None:
        """Lets a request's outputs wait until its prompt's rows are sent, if they are pending."""
        prompt = self._entries.get(key)
        if prompt is not None:
            prompt.requests.append(request)
            self._waiting[request.request_id] = _Waiting(request, prompt)

    def send_last(self, request: RequestRows, rows: PendingRows | None) -> None:
        """Sends a request's last rows with its last output, which is in this step's message."""
        if rows is not None:
            self._last_rows[request.request_id] = _LastRows(request, rows)

    def send_end(
        self, request: RequestRows, reason: FinishReason, rows: PendingRows | None
    ) -> None:
        """Queues the end of a request behind its outputs that wait, with its last `rows`."""
        output = EngineCoreOutput(request.request_id, [], finish_reason=reason)
        self._ends.append(_End(request, output))
        self.send_last(request, rows)

    def refuse(self, request_id: str, client: int) -> None:
        """Queues an error for a request that cannot run. It waits for nothing: what waits here by
        its id may be another request's, which runs."""
        output = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR)
        self._refused.append((client, output))

    def leave(self, request_id: str) -> object | None:
        """Called when an API process has aborted a request, perhaps one that has ended: drops its
        outputs, and the rows of its prompt if no other request waits for them. Returns the prompt's
        key then.

        Requests whose rows come at the end stay, as their API process waits for that.
        """
        waiting = self._waiting.get(request_id)
        if waiting is None or waiting.request.opt_in.final_only:
            return None
        del self._waiting[request_id]
        self._ends = [end for end in self._ends if end.request is not waiting.request]
        prompt = waiting.prompt
        prompt.requests.remove(waiting.request)
        prompt.outputs = [output for output in prompt.outputs if output.request_id != request_id]
        if prompt.requests:
            return None
        del self._entries[prompt.key]
        return prompt.key

    # ---- messages ----

    def fill(self, messages: dict[int, EngineCoreOutputs]) -> None:
        """Adds rows, and the outputs that have waited for them, to a step's messages, which are by
        API process; takes off the outputs that have to wait."""
        self._fill_with_rows(messages)
        for client, output in self._refused:
            messages.setdefault(client, EngineCoreOutputs()).outputs.append(output)
        self._refused.clear()

    def _fill_with_rows(self, messages: dict[int, EngineCoreOutputs]) -> None:
        for end in self._ends:
            message = messages.setdefault(end.request.client, EngineCoreOutputs())
            message.outputs.append(end.output)
        self._ends.clear()
        if not self._entries and not self._last_rows:
            return
        for client, message in messages.items():
            message.outputs = self._admit(client, message.outputs)
        clients = dict.fromkeys(entry.client for entry in self._entries.values())
        for client in clients:
            message = messages.setdefault(client, EngineCoreOutputs())
            message.outputs = self._release(client) + message.outputs

    def _admit(self, client: int, outputs: Sequence[EngineCoreOutput]) -> list[EngineCoreOutput]:
        """The outputs that wait for nothing. Last outputs make entries of their last rows."""
        admitted = []
        for output in outputs:
            waiting = self._waiting.get(output.request_id)
            if waiting is not None:
                waiting.prompt.outputs.append(output)
                continue
            last = None
            if output.finish_reason is not None:
                last = self._last_rows.pop(output.request_id, None)
            if last is None:
                admitted.append(output)
            else:
                header = RowsOutput(
                    GENERATED_ROWS, last.request.opt_in.prompt_id, output.request_id
                )
                key = object()
                self._entries[key] = _Entry(key, client, last.rows, header, [output])
        return admitted

    def _release(self, client: int) -> list[EngineCoreOutput]:
        """The next rows for an API process, those that came first before others, and the outputs
        that have waited for them."""
        entries = [entry for entry in self._entries.values() if entry.client == client]
        backlog = sum(entry.rows.nbytes for entry in entries)
        room = max(self.part_bytes, backlog // BACKLOG_SHARE)
        outputs: list[EngineCoreOutput] = []
        for entry in entries:
            if room < entry.rows.row_bytes:
                break
            num_bytes = entry.rows.nbytes
            outputs += entry.take(room)
            room -= num_bytes - entry.rows.nbytes
            if not len(entry.rows):
                outputs += self._close(entry)
        return outputs

    def _close(self, entry: _Entry) -> list[EngineCoreOutput]:
        """Removes an entry whose rows are sent; gives the outputs that wait for nothing else. Last
        outputs that have waited for the rows of their prompt now wait for their own."""
        del self._entries[entry.key]
        for request in entry.requests:
            if self.is_waiting(request):
                del self._waiting[request.request_id]
        return self._admit(entry.client, entry.outputs) if entry.is_prompt else entry.outputs
