"""Links and paths in Markdown exist, and the index has every page."""

import re
from pathlib import Path

import pytest

from tests.documentation import PAGES, ROOT, spans

pytestmark = pytest.mark.release

MOST_WORDS_OF_README = 900


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> list[str]:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not re.match(r"https?:", link):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                dead.append(f"{page.relative_to(ROOT)}: {link}")
    return dead


def test_links_lead_somewhere() -> None:
    assert [link for page in PAGES for link in dead_links(page)] == []


def test_the_index_has_every_page() -> None:
    docs = ROOT / "docs"
    index = (docs / "index.md").read_text(encoding="utf-8")
    pages = [*docs.glob("*.md"), *docs.glob("lab/*.md"), docs / "grafana.json"]
    assert [page for page in pages if page.name != "index.md" and f"({page.relative_to(docs)}" not in index] == []
    assert "docs/index.md" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_names_of_the_code_exist() -> None:
    """Fields of requests and responses anywhere, and every name in `docs/structure.md`. Metrics have another test."""
    metrics = ROOT / "docs/metrics.md"
    paths = [metrics, *(path for folder in ("capture", "protocol", "server") for path in (ROOT / folder).rglob("*.py"))]
    words = set(re.findall(r"\w+", "".join(path.read_text(encoding="utf-8") for path in paths)))
    missing = []
    for where, text in spans():
        is_field = re.fullmatch(r"(return_routed|routed_experts|prompt_routed)_\w+", text)
        if is_field or (where.startswith("docs/structure.md") and re.fullmatch(r"[A-Za-z_]+(\.[A-Za-z_]+)*", text)):
            missing += [f"{where}: {name}" for name in text.removesuffix(".py").split(".") if name not in words]
    assert missing == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= MOST_WORDS_OF_README
