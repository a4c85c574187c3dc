"""Sends rows of prompts ahead of the first tokens of their requests, and rows that are needed at the end before it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from routed_experts.capture.message import prompt_output_id, rows_output_id
from routed_experts.capture.pending_rows import PendingRows

_PART_BYTES = 8 << 20
"""Maximum bytes of such rows in a message that also has other requests' tokens, which it delays by about 3 ms. A
prompt of 32k tokens (Qwen3-30B-A3B) takes three or four steps."""

_BACKLOG_SHARE = 16
"""If more wait, since long prefills add more than one part per step, each message takes a quarter of the backlog up to
three parts, so that prompts wait for few steps, or 1 / _BACKLOG_SHARE of it, if that is more."""


@dataclass(eq=False)
class _Entry:
    """Rows, and the outputs held back until they are sent."""

    key: object
    client: int  # index of the API process
    rows: PendingRows
    output_id: str  # of the outputs that bring the rows
    requests: list[str] = field(default_factory=list)  # of a prompt: those that have received a token
    followers: list[EngineCoreOutput] = field(default_factory=list)  # in order

    def take(self, num_bytes: int) -> list[EngineCoreOutput]:
        """The next rows, at most `num_bytes`. The last rows of a request come with its last output."""
        size = self.rows.nbytes
        part = self.rows.take(num_bytes)
        if not len(self.rows) and not self.requests:
            self.followers[0].routed_experts = part
            return []
        return [EngineCoreOutput(self.output_id, [], routed_experts=part)] if self.rows.nbytes < size else []


class OutputQueue:
    """Sends each prompt's rows once, before any token of its requests, and a request's last rows before its end. Their
    outputs wait where these do not fit a message; other requests do not."""

    def __init__(self) -> None:
        self.part_bytes = _PART_BYTES
        # Prompts by their keys, and last rows, in the order in which they came.
        self._entries: dict[object, _Entry] = {}
        self._waiting: dict[str, _Entry] = {}  # by request id, while its outputs are held back for its prompt
        self._last: dict[str, PendingRows] = {}  # last rows of requests whose last output was not seen yet
        self._ends: list[tuple[int, EngineCoreOutput]] = []

    def __len__(self) -> int:
        """Number of prompts and of requests' ends that are not sent."""
        return len(self._entries) + len(self._ends)

    def is_waiting(self, request_id: str) -> bool:
        return request_id in self._waiting

    def send_prompt(self, client: int, request_id: str, key: bytes, rows: PendingRows) -> None:
        """Sends a prompt's rows with the first token of one of its requests. `key` identifies the prompt."""
        self._entries[key] = _Entry(key, client, rows, prompt_output_id(request_id))
        self.follow(request_id, key)

    def follow(self, request_id: str, key: bytes) -> None:
        """Holds a request's outputs back until its prompt's rows are sent, if they are pending."""
        prompt = self._entries.get(key)
        if prompt is not None:
            prompt.requests.append(request_id)
            self._waiting[request_id] = prompt

    def send_last(self, request_id: str, rows: PendingRows | None) -> None:
        """Sends a request's last rows with its last output, which is in this step's message."""
        if rows is not None:
            self._last[request_id] = rows

    def end(self, client: int, request_id: str, reason: FinishReason, rows: PendingRows | None) -> None:
        """Queues the end of a request after its held outputs, with its last `rows`."""
        self._ends.append((client, EngineCoreOutput(request_id, [], finish_reason=reason)))
        self.send_last(request_id, rows)

    def fill(self, messages: dict[int, EngineCoreOutputs]) -> None:
        """Adds rows and released outputs to a step's messages to the API processes."""
        for client, output in self._ends:
            messages.setdefault(client, EngineCoreOutputs()).outputs.append(output)
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
            if (prompt := self._waiting.get(output.request_id)) is not None:
                prompt.followers.append(output)
            elif output.finish_reason is not None and (rows := self._last.pop(output.request_id, None)) is not None:
                key = object()
                self._entries[key] = _Entry(key, client, rows, rows_output_id(output.request_id), followers=[output])
            else:
                others.append(output)
        return others

    def _release(self, client: int, is_alone: bool) -> list[EngineCoreOutput]:
        """The next rows for an API process, and the outputs that waited for them. The entry that came first gets half
        of a message; shorter ones come before longer ones in the rest."""
        entries = [entry for entry in self._entries.values() if entry.client == client]
        room = sum(entry.rows.nbytes for entry in entries) + sum(rows.nbytes for rows in self._last.values())
        if not is_alone or len(entries) > 1:
            most = max(self.part_bytes, min(room // 4, 3 * self.part_bytes), room // _BACKLOG_SHARE)
            room = min(room, most)
        outputs: list[EngineCoreOutput] = []
        while entries:
            first, *others = entries
            shorter = [(entry, room) for entry in sorted(others, key=lambda entry: entry.rows.nbytes)]
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
            entries = [entry for key, entry in self._entries.items() if key not in known]  # what followed a prompt
        return outputs

    def _close(self, entry: _Entry) -> list[EngineCoreOutput]:
        """Removes an entry whose rows are sent; gives the outputs that wait for nothing else."""
        del self._entries[entry.key]
        for request_id in entry.requests:
            del self._waiting[request_id]
        return self._admit(entry.client, entry.followers) if entry.requests else entry.followers
