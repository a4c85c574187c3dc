"""Reads the code in the documentation.

Each block of shell, Python or JavaScript has a comment above it: `<!-- run by TEST -->`, and TEST gets the
block's text from its fixture `documented`, or `<!-- not run: REASON -->`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    page
    for folder in ("", "docs", "docs/lab", "docker")
    for page in sorted((ROOT / folder).glob("*.md"))
]
_BLOCK = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")


@dataclass(frozen=True)
class Block:
    """Fenced code: its page and line, and the comment above it or an empty string.

    `sh`, `python` and `javascript` are for readers to run, `json` and `text` are not.
    """

    where: str
    language: str
    mark: str
    text: str

    @property
    def run_by(self) -> str:
        return self.mark.removeprefix("run by ") if self.mark.startswith("run by ") else ""


def _name(page: Path, text: str, at: int) -> str:
    return f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, at) + 1}"


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in _BLOCK.finditer(text):
            yield Block(_name(page, text, match.start(3) - 1), match[2], match[1] or "", match[3])


def spans() -> Iterator[tuple[str, str]]:
    """Page and line of each piece of inline code, and the code on one line."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        prose = _BLOCK.sub(lambda match: "\n" * match[0].count("\n"), text)
        for paragraph in re.finditer(r"(?:[^\n]+\n?)+", prose):
            for match in _SPAN.finditer(paragraph[0]):
                yield (
                    _name(page, prose, paragraph.start() + match.start()),
                    " ".join(match[1].split()),
                )


def run_by(test: str) -> list[str]:
    """The text of the blocks that `test` runs."""
    return [block.text for block in blocks() if block.run_by == test]


def transitions_in(module: ModuleType) -> set[tuple[str, str]]:
    """The states before and after each move that the table in a module's docstring allows."""
    assert module.__doc__ is not None
    rows = re.findall(r"^    ((?:[A-Z_]+, )*[A-Z_]+)  +([A-Z_]+)  ", module.__doc__, re.MULTILINE)
    return {(before, after) for sources, after in rows for before in sources.split(", ")}


def exists(name: str, beside: Path = ROOT) -> bool:
    """Whether there is such a file, below the repository, its tests or `beside`, and in it the test
    after `::`."""
    path, _, test = name.partition("::")
    test = test.partition("[")[0].rpartition("::")[2]
    file = next(
        (folder / path for folder in (ROOT, ROOT / "tests", beside) if (folder / path).exists()),
        None,
    )
    if file is None:
        return False
    return not test or bool(re.search(rf"(?:def|class) {test}\b", file.read_text(encoding="utf-8")))
