"""What `compare --force` counts of a response."""

import numpy as np

from routed_experts.protocol.routing import Routing
from routed_experts.protocol.score import Score
from routed_experts.server.tools.forced import Differences

PROMPT = tuple(range(10))
ANSWER = tuple(range(4))
LOGPROBS = np.full(len(ANSWER), -1.0)
NUM_ROWS = len(PROMPT) + len(ANSWER) - 1
ROWS = np.tile(np.arange(2, dtype=np.int16), (NUM_ROWS, 3, 1))


def missing_of(rows: np.ndarray, start: int) -> int:
    """Rows that are said to be unknown of a response with these rows."""
    routing = Routing(
        rows, start=start, prompt_token_ids=PROMPT, token_ids=ANSWER, logprobs=LOGPROBS
    )
    differences = Differences()
    own_rows = np.zeros((len(PROMPT) + len(ANSWER), *rows.shape[1:]), np.int16)
    differences.add(routing, Score(forced=LOGPROBS, own=LOGPROBS), own_rows)
    missing: int = differences.report()["missing_rows"]
    return missing


def test_tokens_whose_row_a_response_does_not_have_are_not_forced() -> None:
    unknown = ROWS.copy()
    unknown[2, 1] = -1
    assert missing_of(ROWS, 0) == 0
    assert missing_of(unknown, 0) == 1
    assert missing_of(ROWS[4:], 4) == 4  # of a prompt: `routed_experts_prompt_start`
    assert missing_of(unknown[1:-2], 1) == 4  # of a response that was cut off
    assert missing_of(ROWS[:0], 0) == NUM_ROWS
