"""The code in the documentation's pages.

Above each block of commands or of Python stands a comment that readers do not see: `<!-- run by TEST -->`, whose
fixture `documented` then has the block's text, or `<!-- not run: REASON -->`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docker").glob("*.md"))]
_BLOCK = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")


@dataclass(frozen=True)
class Block:
    """Fenced code.

    Attributes:
        language: as the page says: `sh` and `python` are for readers to run, `json` and `text` are not.
        mark: the comment above it, empty if there is none.
    """

    where: str
    language: str
    mark: str
    text: str

    @property
    def run_by(self) -> str:
        return self.mark.removeprefix("run by ") if self.mark.startswith("run by ") else ""

    @property
    def not_run(self) -> str:
        return self.mark.removeprefix("not run: ") if self.mark.startswith("not run: ") else ""


def _name(page: Path, text: str, at: int) -> str:
    return f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, at) + 1}"


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in _BLOCK.finditer(text):
            yield Block(_name(page, text, found.start(3) - 1), found[2], found[1] or "", found[3])


def spans() -> Iterator[tuple[str, str]]:
    """Where code stands within a sentence, and the code, on one line."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        prose = _BLOCK.sub(lambda found: "\n" * found[0].count("\n"), text)
        for paragraph in re.finditer(r"(?:[^\n]+\n?)+", prose):
            for found in _SPAN.finditer(paragraph[0]):
                yield _name(page, prose, paragraph.start() + found.start()), " ".join(found[1].split())


def run_by(test: str) -> list[str]:
    """The text of the blocks that say that `test` runs them."""
    return [block.text for block in blocks() if block.run_by == test]
