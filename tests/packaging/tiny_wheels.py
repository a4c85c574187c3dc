"""An index of tiny packages, on which installations can be tried within seconds.

They have the names, the versions and, for PyTorch, the dependencies of the real ones. Nothing is in them but in
setuptools, which is packed anew from this interpreter's, as installing this project takes it.
"""

import zipfile
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What PyTorch's CUDA build needs, one thing by way of the other.
LIBRARIES = {"nvidia-cudnn-cu13": ("nvidia-cublas",), "nvidia-cublas": ()}


def write_wheel(folder: Path, name: str, version: str, requires: Sequence[str] = ()) -> None:
    """A package without contents."""
    stem = f"{name.replace('-', '_')}-{version}"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    wheel = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {"METADATA": metadata, "WHEEL": wheel}
    files["RECORD"] = "".join(f"{stem}.dist-info/{file},,\n" for file in (*files, "RECORD"))
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        for file, text in files.items():
            archive.writestr(f"{stem}.dist-info/{file}", text)


def pack_installed(folder: Path, name: str) -> None:
    """The wheel that an installed package came from."""
    package = distribution(name)
    with zipfile.ZipFile(folder / f"{name}-{package.version}-py3-none-any.whl", "w") as archive:
        for file in package.files or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                archive.write(file.locate(), str(file))


def write_wheels(folder: Path, lists: Sequence[str]) -> Path:
    """Every package of the repository's lists, with PyTorch's CUDA build."""
    for line in [line for name in lists for line in (ROOT / name).read_text().splitlines() if "==" in line]:
        name, _, version = line.partition(";")[0].strip().partition("==")
        if name == "setuptools":
            pack_installed(folder, name)
        else:
            write_wheel(folder, name, version, list(LIBRARIES)[:1] if name == "torch" else ())
    for name, requires in LIBRARIES.items():
        write_wheel(folder, name, "13.0", requires)
    return folder
