"""Sends the rows of prompts to the API process, ahead of the first tokens of their requests."""

from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from routed_experts.capture.message import ROWS_OUTPUT_ID, PlacedRows, pack, prompt_output_id
from routed_experts.protocol.codec import Rows

_PART_BYTES = 8 << 20
"""Maximum bytes of prompt rows in a message that also has other requests' tokens, which it delays by about 3 ms. A
prompt of 32k tokens (Qwen3-30B-A3B) takes three or four steps."""

_BACKLOG_SHARE = 4
"""If more than this many parts wait, each message takes 1 / _BACKLOG_SHARE of the backlog, since long prefills add more
than one part per step."""


@dataclass(eq=False)
class _Prompt:
    """Pending prompt rows, and the outputs held back until they are sent.

    Attributes:
        client: index of the API process.
        key: identifies the prompt.
        start: absolute position of the first row.
        rows: [n, L, K], or a future of them.
        num_sent: number of rows sent.
        followers: held outputs of its requests, in order.
        requests: ids of its requests that have received a token, the first being the one that requested the rows.
    """

    client: int
    key: bytes
    start: int
    rows: Rows | Future[Rows]
    num_sent: int = 0
    followers: list[EngineCoreOutput] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        return not isinstance(self.rows, Future) or self.rows.done()

    @property
    def bytes_left(self) -> int:
        """Bytes that are not sent yet. Needs `is_ready`."""
        rows = self.rows = self.rows.result() if isinstance(self.rows, Future) else self.rows
        return rows[self.num_sent :].nbytes

    def take(self, num_bytes: int) -> list[EngineCoreOutput]:
        """The next outputs, with at most `num_bytes` of rows; after the last row, the followers. Needs `is_ready`."""
        rows = self.rows
        assert not isinstance(rows, Future)
        start, outputs = self.num_sent, []
        self.num_sent = min(start + num_bytes // rows[:1].nbytes, len(rows))
        if self.num_sent > start:
            part = PlacedRows(self.start + start, rows[start : self.num_sent])
            outputs.append(EngineCoreOutput(prompt_output_id(self.requests[0]), [], routed_experts=part))
        return outputs if self.bytes_left else outputs + self.followers


class OutputQueue:
    """Sends each prompt's rows once, before any token of its requests.

    Outputs of a prompt's requests wait for its rows, while a thread reads them or they do not fit a message. Other
    requests do not wait.
    """

    def __init__(self) -> None:
        self.part_bytes = _PART_BYTES
        self._prompts: dict[bytes, _Prompt] = {}  # in the order of `send`
        self._waiting: dict[str, _Prompt] = {}  # by request id, while its outputs are held back
        self._ends: list[tuple[int, EngineCoreOutput]] = []

    def __len__(self) -> int:
        """Number of prompts with unsent rows, and of unsent ends of requests."""
        return len(self._prompts) + len(self._ends)

    def keeps(self, request_id: str) -> bool:
        """Whether a request's outputs must wait for rows that are being read."""
        prompt = self._waiting.get(request_id)
        return prompt is not None and not prompt.is_ready

    def send(self, client: int, request_id: str, key: bytes, start: int, rows: Rows | Future[Rows]) -> None:
        """Sends a prompt's rows, from position `start` on, with the first token of one of its requests."""
        self._prompts[key] = _Prompt(client, key, start, rows)
        self.follow(request_id, key)

    def follow(self, request_id: str, key: bytes) -> None:
        """Holds a request's outputs back until its prompt's rows are sent, if they are pending."""
        prompt = self._prompts.get(key)
        if prompt is not None:
            prompt.requests.append(request_id)
            self._waiting[request_id] = prompt

    def end(self, client: int, request_id: str, reason: FinishReason, rows: PlacedRows | None) -> bool:
        """Queues the end of a request after its held outputs, with its last `rows`. Returns False if it has neither."""
        prompt = self._waiting.get(request_id)
        output = EngineCoreOutput(request_id, [], finish_reason=reason, routed_experts=rows)
        if prompt is not None:
            prompt.followers.append(output)
        elif rows is not None:
            self._ends.append((client, output))
        return prompt is not None or rows is not None

    def fill(self, messages: dict[int, EngineCoreOutputs], patience: float | None) -> None:
        """Adds rows and released outputs to a step's messages to the API processes.

        Args:
            patience: seconds to wait for rows that a thread is reading; None waits for all.
        """
        if self._prompts:
            for message in messages.values():
                self._keep_back(message)
            self._release(messages, patience)
        for client, output in self._ends:
            messages.setdefault(client, EngineCoreOutputs()).outputs.append(output)
        self._ends.clear()
        for message in messages.values():
            packed = pack(message.outputs)
            if packed is not None:
                message.outputs.insert(0, EngineCoreOutput(ROWS_OUTPUT_ID, [], routed_experts=packed))

    def _release(self, messages: dict[int, EngineCoreOutputs], patience: float | None) -> None:
        """Adds ready prompts and their followers, ahead of other requests' tokens."""
        futures = [prompt.rows for prompt in self._prompts.values() if isinstance(prompt.rows, Future)]
        if futures:
            wait(futures, patience)
        ready = [prompt for prompt in self._prompts.values() if prompt.is_ready]
        for client in {prompt.client for prompt in ready}:
            message = messages.setdefault(client, EngineCoreOutputs())
            ours = sorted((prompt for prompt in ready if prompt.client == client), key=lambda each: each.bytes_left)
            room = sum(prompt.bytes_left for prompt in ours)
            if message.outputs:
                room = min(room, max(self.part_bytes, room // _BACKLOG_SHARE))
            outputs: list[EngineCoreOutput] = []
            for index, prompt in enumerate(ours):  # each gets an equal share, plus what shorter prompts left over
                left = prompt.bytes_left
                outputs += prompt.take(room // (len(ours) - index))
                room -= left - prompt.bytes_left
            message.outputs = outputs + message.outputs
        for prompt in [prompt for prompt in ready if not prompt.bytes_left]:
            del self._prompts[prompt.key]
            for request_id in prompt.requests:
                del self._waiting[request_id]

    def _keep_back(self, message: EngineCoreOutputs) -> None:
        others: list[EngineCoreOutput] = []
        for output in message.outputs:
            prompt = self._waiting.get(output.request_id)
            (others if prompt is None else prompt.followers).append(output)
        message.outputs = others
