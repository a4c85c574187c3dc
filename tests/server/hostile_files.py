"""What a process of `test_hostile_files.py` runs, with 1 GiB of memory beside its libraries."""

import contextlib
import io
import json
import resource
import traceback
from pathlib import Path

import numpy as np
import pyarrow.parquet  # noqa: F401 what the commands import lazily, before the limit

from routed_experts.server.cli.main import main
from routed_experts.server.tools import compare, export, view  # noqa: F401

GIB = 1 << 30


def commands(file: str, folder: str) -> list[list[str]]:
    outputs = (f"{folder}/out.{each}" for each in ("parquet", "csv", "npz"))
    return [
        *(["export", file, "-o", output] for output in outputs),
        ["export", file, "--weights", "-o", f"{folder}/weights.npz"],
        ["compare", file, "--answers", file],
        ["compare", file, "--answers", file, "--weights", "--logprobs"],
        ["view", file, "--no-browser"],
    ]


def ask_for_all(server: view.ViewServer) -> None:
    """What a browser asks for."""
    for file in server.viewed:
        for line in file.lines(server.given):
            json.loads(line.encode())


def begin() -> None:
    view.ViewServer.serve_forever = ask_for_all  # type: ignore[assignment,method-assign]
    np.zeros(1) @ np.zeros(1)  # BLAS takes its memory
    (size,) = (line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmSize" in line)
    limit = int(size) * 1024 + GIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def run(command: list[str]) -> dict[str, object]:
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status: object = main(command)
    except BaseException:  # noqa: BLE001 what a user would see
        status = traceback.format_exc()
    return {"command": command, "status": status, "err": err.getvalue()}
