"""With an address, the page on a package index is the README, whose links lead into the
repository."""

import re
import sys
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.packaging.conftest import PIP, ROOT, copy_sources, run
from tests.packaging.test_dependencies import PROJECT

pytestmark = pytest.mark.release

URL = "https://example.org/them/routed-experts"
TAG = f"v{PROJECT['version']}"


def metadata(folder: Path) -> Message:
    """Of a wheel that is built after `index_page.py` has run."""
    sources = copy_sources(folder / "sources", "README.md")
    run([sys.executable, str(ROOT / "tests/packaging/index_page.py"), str(sources), f"{URL}/"])
    offline = ("--no-deps", "--no-build-isolation", "--no-index")
    run([*PIP, "wheel", *offline, "--wheel-dir", str(folder), str(sources)])
    (wheel,) = folder.glob("*.whl")
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_links_lead_into_the_repository(tmp_path: Path) -> None:
    of_wheel = metadata(tmp_path)
    assert of_wheel["Description-Content-Type"] == "text/markdown"
    page = of_wheel.get_payload()
    assert isinstance(page, str)
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", page)
    before = re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(links) == len(before) > 20
    for (is_image, link), original in zip(links, before, strict=True):
        if original.startswith("https://"):
            assert link == original
            continue
        assert link == f"{URL}/{'raw' if is_image else 'blob'}/{TAG}/{original}"
        assert (ROOT / original.partition("#")[0]).exists()
    assert [link for is_image, link in links if is_image], "the picture"
    addresses = dict(line.split(", ") for line in of_wheel.get_all("Project-URL"))
    assert addresses.keys() == {"Homepage", "Documentation", "Issues", "Changelog"}
    assert all(address.startswith(URL) for address in addresses.values())
