"""Makes the README the project's page on a package index: `python tests/packaging/index_page.py
FOLDER URL`.

FOLDER has the sources of a release, which are changed in place. URL is the repository's address, on
a host with GitHub's paths (`/blob/TAG/`, `/raw/TAG/`). Relative links of the README become
absolute, to the release's tag. pyproject.toml gets the README as its page, and the addresses.
Without this script, the page is the short text there.
"""

import re
import sys
import tomllib
from pathlib import Path

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*)\]\((?!https?:|#)([^)\s]+)\)")


def absolute(text: str, url: str, tag: str) -> str:
    """`text` in Markdown, with absolute links: to files as they are shown, to images as they
    are."""
    return _LINK.sub(
        lambda link: f"{link[1]}[{link[2]}]({url}/{'raw' if link[1] else 'blob'}/{tag}/{link[3]})",
        text,
    )


def main() -> None:
    folder, url = Path(sys.argv[1]), sys.argv[2].rstrip("/")
    if not url.startswith("https://"):
        sys.exit(f"URL must begin with https://, but is {url!r}.")
    project, readme = folder / "pyproject.toml", folder / "README.md"
    text = project.read_text(encoding="utf-8")
    tag = f"v{tomllib.loads(text)['project']['version']}"
    urls = {
        "Homepage": url,
        "Documentation": f"{url}/blob/{tag}/README.md#where-to-go",
        "Issues": f"{url}/issues",
    }
    urls["Changelog"] = f"{url}/blob/{tag}/CHANGELOG.md"
    table = "".join(f'{name} = "{address}"\n' for name, address in urls.items())
    text, count = re.subn(
        r'\[project\.readme\]\n.*?"""\n.*?"""\n', f"[project.urls]\n{table}", text, flags=re.DOTALL
    )
    assert count == 1
    text = text.replace("[project]\n", '[project]\nreadme = "README.md"\n', 1)
    project.write_text(text, encoding="utf-8")
    readme.write_text(absolute(readme.read_text(encoding="utf-8"), url, tag), encoding="utf-8")


if __name__ == "__main__":
    main()
