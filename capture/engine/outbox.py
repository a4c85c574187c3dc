"""A step's outputs on their way out of the engine, those with the rows of long prompts after all others."""

from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

from routed_experts.capture.message import is_large, pack, prompt_output_id
from routed_experts.capture.rows import Rows


@dataclass(eq=False)
class _Prompt:
    """A prompt's rows that have not been sent, and what may not be sent before them.

    Attributes:
        client: index of the API process.
        key: what its requests follow.
        rows: [n, L, K], or what will be.
        followers: outputs of its requests, in their order.
        requests: ids of its requests that have had a token; the rows were asked for with that of the first.
    """

    client: int
    key: bytes
    rows: Rows | Future[Rows]
    followers: list[EngineCoreOutput] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        return not isinstance(self.rows, Future) or self.rows.done()

    def output(self) -> EngineCoreOutput:
        rows = self.rows.result() if isinstance(self.rows, Future) else self.rows
        return EngineCoreOutput(prompt_output_id(self.requests[0]), [], routed_experts=rows)


class Messages(dict[int, EngineCoreOutputs]):
    """What a step sends: a message to each API process, and after them those with the rows of long prompts.

    An API process reads a message as a whole; in the same one, megabytes of a prompt would hold up the tokens of all
    other requests. vLLM takes messages out in three ways. The engine's process sends what `items` gives, in that order
    (`EngineCoreProc._process_engine_step`), after the version of the weights was put on what `values` gives
    (`EngineCore._attach_weight_version`). An engine without a process of its own takes one message with `get`, and asks
    for no other (`InprocClient.get_output`).
    """

    def __init__(self, messages: Mapping[int, EngineCoreOutputs], outbox: "Outbox") -> None:
        super().__init__(messages)
        self._outbox = outbox
        self._later: list[tuple[int, EngineCoreOutputs]] = []

    def send_later(self, client: int, outputs: list[EngineCoreOutput]) -> None:
        """Adds outputs behind the messages, or in the client's message if there is nothing in it."""
        message = self.setdefault(client, EngineCoreOutputs())
        if message.outputs:
            self._later.append((client, EngineCoreOutputs(outputs=outputs)))
        else:
            message.outputs = outputs

    def items(self) -> Any:
        return [*super().items(), *self._later]

    def values(self) -> Any:
        return [message for _, message in self.items()]

    def get(self, client: int, default: Any = None) -> Any:
        self._outbox.release(self, patience=None)
        outputs = [output for to, message in self.items() if to == client for output in message.outputs]
        if (message := super().get(client)) is None:
            return default
        message.outputs = outputs
        return message


class Outbox:
    """Sends each prompt's rows once, before any token of its requests.

    Rows that a thread still reads keep the outputs of their prompt's requests back, and nobody else's.
    """

    def __init__(self) -> None:
        self._prompts: dict[bytes, _Prompt] = {}  # in the order in which their rows were asked for
        self._waiting: dict[str, _Prompt] = {}  # by id of the request whose outputs are kept back

    def __len__(self) -> int:
        """Prompts whose rows have not been sent."""
        return len(self._prompts)

    def keeps(self, request_id: str) -> bool:
        """Whether the outputs of a request have to wait for rows."""
        prompt = self._waiting.get(request_id)
        return prompt is not None and not prompt.is_ready

    def send(self, client: int, request_id: str, key: bytes, rows: Rows | Future[Rows]) -> None:
        """Sends a prompt's rows with the first token of one of its requests."""
        self._prompts[key] = _Prompt(client, key, rows)
        self.follow(request_id, key)

    def follow(self, request_id: str, key: bytes) -> None:
        """A request's first token comes after its prompt's rows, if those have not been sent."""
        prompt = self._prompts.get(key)
        if prompt is not None:
            prompt.requests.append(request_id)
            self._waiting[request_id] = prompt

    def messages(self, step: Mapping[int, EngineCoreOutputs], patience: float | None) -> Messages:
        """What to send after a step.

        Args:
            step: vLLM's message to each API process.
            patience: seconds to wait for rows that a thread still reads; None to wait for all.
        """
        messages = Messages(step, self)
        if self._prompts:
            for message in step.values():
                self._keep_back(message)
            self.release(messages, patience)
        for message in messages.values():
            pack(message.outputs)
        return messages

    def release(self, messages: Messages, patience: float | None) -> None:
        """Adds to `messages` the prompts whose rows are there, and what follows them."""
        futures = [prompt.rows for prompt in self._prompts.values() if isinstance(prompt.rows, Future)]
        if futures:
            wait(futures, patience)
        later: dict[int, list[EngineCoreOutput]] = {}
        for prompt in [prompt for prompt in self._prompts.values() if prompt.is_ready]:
            del self._prompts[prompt.key]
            for request_id in prompt.requests:
                del self._waiting[request_id]
            outputs = [prompt.output(), *prompt.followers]
            if is_large(outputs[0]) or prompt.client not in messages:
                later.setdefault(prompt.client, []).extend(outputs)
            else:
                message = messages[prompt.client]
                message.outputs = [*outputs, *message.outputs]
        for client, outputs in later.items():
            messages.send_later(client, outputs)

    def _keep_back(self, message: EngineCoreOutputs) -> None:
        others: list[EngineCoreOutput] = []
        for output in message.outputs:
            prompt = self._waiting.get(output.request_id)
            (others if prompt is None else prompt.followers).append(output)
        message.outputs = others
