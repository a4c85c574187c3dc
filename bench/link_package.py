"""Makes this tree importable as `routed_experts`, entry points included, from a folder on
`PYTHONPATH`.

For a machine without a package index or a build backend: `python3 bench/link_package.py FOLDER`
writes links to the tree, and the few lines of metadata that vLLM finds plugins by, as
pyproject.toml says. It may be run again.
"""

import argparse
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def link(site: Path) -> None:
    """Writes the links and the metadata to `site`."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = config["project"]
    for package, folder in config["tool"]["setuptools"]["package-dir"].items():
        link_path, source = site.joinpath(*package.split(".")), ROOT / folder
        # Of the package itself, which the others are linked into, what it holds.
        links = (
            [(link_path, source)]
            if "." in package
            else [
                (link_path / item.name, item)
                for item in source.iterdir()
                if item.name != "__pycache__"
            ]
        )
        for link_here, target in links:
            link_here.parent.mkdir(parents=True, exist_ok=True)
            link_here.unlink(missing_ok=True)
            link_here.symlink_to(target)
    metadata = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    lines = [
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items())
        for group, points in groups.items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    link(parser.parse_args().folder)


if __name__ == "__main__":
    main()
