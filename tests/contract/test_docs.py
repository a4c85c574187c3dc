"""Links within the documentation lead somewhere, and the index leads to all of it."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.release

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docker").glob("*.md")]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as they are made where Markdown is shown."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page if not path else (page.parent / path).resolve()
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_index_leads_to_every_page() -> None:
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    for page in (*(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("gr*.json")):
        assert page.name == "index.md" or f"({page.name}" in index, page.name
    assert "docs/index.md" in (ROOT / "README.md").read_text(encoding="utf-8")
