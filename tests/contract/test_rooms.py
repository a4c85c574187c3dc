"""Which room of the house may import which, and that no two modules import each other."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MAY_IMPORT = {
    "protocol": set(),
    "protocol/package": {"protocol"},
    "capture": {"protocol"},
    "capture/engine": {"protocol", "capture", "capture/engine/kv_transfer", "capture/seams"},
    "capture/engine/kv_transfer": {"protocol", "capture"},
    "capture/seams": set(),
    "server": {"protocol"},
    "server/outputs": {"protocol", "capture", "server"},
    "server/page": {"protocol", "server"},
    "server/inprocess": {"protocol", "capture/engine", "capture/seams", "server", "server/outputs"},
    "server/http": {
        *("protocol", "capture", "capture/engine", "capture/engine/kv_transfer", "capture/seams"),
        *("server", "server/outputs", "server/page"),
    },
    "server/openapi": {"capture", "server/http"},
    "server/cli": {
        *("protocol", "capture/engine", "capture/engine/kv_transfer", "capture/seams"),
        *("server", "server/http", "server/page"),
    },
}

MODULES = {
    "routed_experts." + ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for top in ("protocol", "capture", "server")
    for path in sorted((ROOT / top).rglob("*.py"))
}


def imported_by(path: Path) -> Iterator[str]:
    """The modules of ours that a file imports, at its top or later."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.startswith("routed_experts."):
                yield name if name in MODULES else name.rpartition(".")[0]


IMPORTS = {name: sorted(set(imported_by(path))) for name, path in MODULES.items()}


def room_of(module: str) -> str:
    return str(MODULES[module].parent.relative_to(ROOT))


def test_every_room_is_in_the_table() -> None:
    assert {room_of(module) for module in MODULES} == set(MAY_IMPORT)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_what_the_table_allows_and_uses_all_of_it(room: str) -> None:
    found = {
        room_of(imported)
        for module, names in IMPORTS.items()
        if room_of(module) == room
        for imported in names
        if room_of(imported) != room
    }
    assert found <= MAY_IMPORT[room]
    if room not in ("server", "server/page"):
        assert found == MAY_IMPORT[room], "an arrow that nothing needs"


def test_no_modules_import_each_other() -> None:
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(error.args[1]))


def test_a_room_says_what_lives_there() -> None:
    for room in MAY_IMPORT:
        text = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text()))
        assert text, room
        assert len(text.splitlines()) <= 5, room
