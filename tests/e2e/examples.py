"""Runs example programs as they are, one after the other in this process, and keeps the answers
that they end with.

python -m tests.e2e.examples OUT.pickle MODEL OPTIONS PROGRAM...
"""

import os
import pickle
import runpy
import sys
from pathlib import Path


def main(out: str, model: str, options: str, *programs: str) -> None:
    answers = {}
    for program in programs:
        sys.argv = [program, model, options]
        sys.path.insert(0, str(Path(program).parent))  # as Python does
        answers[Path(program).stem] = runpy.run_path(program, run_name="__main__")["answers"]
    Path(f"{out}.{os.environ.get('RANK', 0)}").write_bytes(pickle.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
