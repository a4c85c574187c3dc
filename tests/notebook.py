"""Runs the cells of a notebook as Jupyter does, without it: `python -m tests.notebook
examples/study.ipynb` stores what they put out, but for files of figures."""

import ast
import base64
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import matplotlib.pyplot as plt

Cell = dict[str, Any]
Ran = tuple[dict[str, Any], list[list[Cell]]]
"""The names of a notebook after its run, and what each cell put out."""


def read(path: Path) -> tuple[dict[str, Any], list[Cell]]:
    """A notebook, and its cells of code, which are parts of it."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return notebook, [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def outputs_of(cells: Iterable[Cell], names: dict[str, Any]) -> Iterator[list[Cell]]:
    """Runs each cell with `names`, and yields what it puts out: what it prints, its last value, and
    its figures."""
    for number, cell in enumerate(cells, 1):
        source = "".join(cell["source"])
        *before, last = ast.parse(source).body
        shown = isinstance(last, ast.Expr) and not source.rstrip().endswith(";")
        with redirect_stdout(io.StringIO()) as printed:
            exec(
                compile(
                    ast.Module(before if shown else [*before, last], []), f"cell {number}", "exec"
                ),
                names,
            )
            value = (
                eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
                if shown
                else None
            )
        outputs: list[Cell] = []
        if text := printed.getvalue():
            outputs.append(
                {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
            )
        if value is not None:
            data = {"text/plain": str(value).splitlines(keepends=True)}
            outputs.append(
                {
                    "data": data,
                    "execution_count": number,
                    "metadata": {},
                    "output_type": "execute_result",
                }
            )
        for figure in map(plt.figure, plt.get_fignums()):
            file = io.BytesIO()
            figure.savefig(file, bbox_inches="tight", dpi=72, metadata={"Software": None})
            data = {"image/png": base64.b64encode(file.getvalue()).decode()}
            outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
        plt.close("all")
        yield outputs


def run_against(url: str, cells: Iterable[Cell], figures: Path) -> Ran:
    """Runs cells with the server at `url`. Files of figures go to the folder `figures`."""
    names: dict[str, Any] = {}
    plt.switch_backend("agg")
    variables = {"ROUTED_EXPERTS_URL": url, "ROUTED_EXPERTS_FIGURES": str(figures)}
    with mock.patch.dict(os.environ, variables):
        return names, list(outputs_of(cells, names))


def main(path: Path) -> None:
    notebook, cells = read(path)
    for number, (cell, outputs) in enumerate(zip(cells, outputs_of(cells, {}), strict=True), 1):
        cell |= {"execution_count": number, "outputs": outputs}
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    plt.switch_backend("agg")
    with TemporaryDirectory() as folder:
        os.environ.setdefault("ROUTED_EXPERTS_FIGURES", folder)
        main(Path(sys.argv[1]))
