"""Log-probabilities of a response on a server, under given experts and under the server's own.

Two engines, or an engine and a trainer, give a token different log-probabilities. `Score.split`
says how much of the difference is that other experts were chosen. The server needs
`--enable-routed-experts-input`. Imports numpy and the standard library only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from routed_experts.protocol import arguments
from routed_experts.protocol.codec import Rows, encode
from routed_experts.protocol.routing import RoutingError

Logprobs = NDArray[np.float64]
"""[G], of the tokens of a response."""

_REPLAY = "routed_experts_replay"


class Split(NamedTuple):
    """Differences of log-probabilities of G tokens, the server's minus those of the response:
    `whole` is `routing` + `rest`."""

    whole: Logprobs
    routing: Logprobs  # because the server's own routing chooses other experts
    rest: Logprobs  # with the same experts: other rounding, other weights


@dataclass(frozen=True, eq=False)
class Score:
    """What the server says of the tokens of a response.

    Attributes:
        forced: their log-probabilities under the given rows.
        own: their log-probabilities under the server's own routing.
    """

    forced: Logprobs
    own: Logprobs

    def split(self, logprobs: Any) -> Split:
        """How the server differs from whoever gave the response's tokens these log-probabilities.

        Args:
            logprobs: [G], such as `Routing.logprobs`.

        Raises:
            ValueError: `logprobs` has another shape.
        """
        others = arguments.array("logprobs", logprobs, "f").astype(np.float64)
        if others.shape != self.own.shape:
            raise ValueError(
                f"logprobs must be of the {len(self.own)} tokens of the response, not {others.shape}"
            )
        return Split(self.own - others, self.own - self.forced, self.forced - others)


def score(
    client: Any,
    prompt: Sequence[int],
    response: Sequence[int],
    rows: Rows,
    *,
    start: int = 0,
    model: str | None = None,
) -> Score:
    """Asks a server for the log-probabilities of the tokens of `response` behind `prompt`, twice.

    Args:
        client: OpenAI's (`openai.OpenAI`).
        prompt: [P] token ids.
        response: [G] token ids.
        rows: [n, L, K] experts, such as `Routing.rows`; -1 in a layer of a row: the router chooses
            there. A token's log-probability depends on the rows of the tokens before it, so the
            last token needs none.
        start: position of the first row.
        model: its name; by default the server's first.

    Raises:
        RoutingError: the answer has no log-probabilities.
    """
    prompt_tokens = list(prompt)
    tokens = [*prompt_tokens, *response]
    if model is None:
        model = client.models.list().data[0].id

    def ask(body: dict[str, Any]) -> Logprobs:
        answer = client.completions.create(model=model, extra_body=body, **sampling(tokens))
        return logprobs_of(answer.model_dump(), tokens)[len(prompt_tokens) :]

    return Score(forced=ask(forcing(rows, start)), own=ask({"prompt_logprobs": 0}))


def sampling(tokens: Sequence[int]) -> dict[str, Any]:
    """The fields of a request that scores `tokens`, which are all in its prompt. The server has to
    generate one, which nobody reads."""
    return {"prompt": list(tokens), "max_tokens": 1, "temperature": 0.0}


def forcing(rows: Rows, start: int) -> dict[str, Any]:
    """The fields of a request that is computed with these experts, and says what comes of it."""
    fields: dict[str, Any] = {"prompt_logprobs": 0}
    if len(rows):
        fields[_REPLAY] = encode(rows, start)
    return fields


def logprobs_of(answer: Mapping[str, Any], tokens: Sequence[int]) -> Logprobs:
    """[P + G], those of a prompt of `tokens` in the answer to a request with `prompt_logprobs`. NaN
    for the first token.

    Raises:
        RoutingError: `answer` has none.
    """
    try:
        of_prompt = answer["choices"][0]["prompt_logprobs"]
        values = [np.nan]
        for token, of_position in zip(tokens[1:], of_prompt[1:], strict=True):
            values.append(float(of_position[str(token)]["logprob"]))
    except (LookupError, TypeError, ValueError) as error:
        raise RoutingError(
            f"no log-probabilities of the prompt are in the answer: {error!r}"
        ) from None
    return np.array(values)
