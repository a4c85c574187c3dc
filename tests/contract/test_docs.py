"""Links in Markdown lead somewhere, the index has every page, and names of the code exist."""

import re
from pathlib import Path

import pytest

from tests.documentation import PAGES, ROOT, spans
from tests.sources import PATHS

pytestmark = pytest.mark.release


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_index_has_every_page() -> None:
    docs = ROOT / "docs"
    index = (docs / "index.md").read_text(encoding="utf-8")
    pages = [*docs.glob("*.md"), *docs.glob("lab/*.md"), docs / "grafana.json", docs / "alerts.yaml"]
    assert [page for page in pages if page.name != "index.md" and f"({page.relative_to(docs)}" not in index] == []
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "docs/index.md" in readme
    assert len(readme.split()) <= 900


def test_names_of_the_code_exist() -> None:
    """Fields of requests and responses anywhere, and every name in `docs/structure.md`. Metrics have another test."""
    code = "".join(path.read_text(encoding="utf-8") for path in (*PATHS, ROOT / "docs/metrics.md"))
    words = set(re.findall(r"\w+", code))
    missing = []
    for where, text in spans():
        is_field = re.fullmatch(r"(return_routed|routed_experts|prompt_routed)_\w+", text)
        if is_field or (where.startswith("docs/structure.md") and re.fullmatch(r"[A-Za-z_]+(\.[A-Za-z_]+)*", text)):
            missing += [f"{where}: {name}" for name in text.removesuffix(".py").split(".") if name not in words]
    assert missing == []
