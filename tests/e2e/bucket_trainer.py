"""A trainer in a process of its own: fetches the rows of answers from a bucket, and compares them with
a Hugging Face forward pass. It has no keys of the bucket, and talks to no server.

    python -m tests.e2e.bucket_trainer MODEL < ANSWERS
"""

import json
import sys
from pathlib import Path

import numpy as np

from routed_experts.protocol.batch import join_turns
from routed_experts.protocol.fetch import fetch_spans
from tests.e2e.harness import Oracle


def main(model: str) -> None:
    oracle, count = Oracle(Path(model)), 0
    for line in sys.stdin:
        answer = json.loads(line)
        rows = fetch_spans(join_turns(answer["references"])).swapaxes(0, 1)
        wrong = oracle.wrong(np.asarray(rows), answer["tokens"][:-1])
        assert not wrong, f"answer {count}: {wrong[:3]}"
        count += 1
    print(count)


if __name__ == "__main__":
    main(sys.argv[1])
