"""Which room of the house may import which, and what of others; no two modules import each
other."""

import subprocess
import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.sources import MODULES, PATHS, ROOT, imports, packages

MAY_IMPORT = {
    "protocol": set(),
    "protocol/package": {"protocol"},
    "protocol/package/replay": {"protocol"},
    "capture": set(),
    "capture/wire": {"protocol"},
    "capture/seams": set(),
    "capture/engine": {
        *("capture", "capture/wire", "capture/seams", "capture/scheduler", "capture/worker"),
    },
    "capture/worker": {
        *("protocol", "capture/wire", "capture/engine", "capture/seams"),
        "capture/worker/router_input",
    },
    "capture/worker/router_input": {
        *("protocol", "capture/wire", "capture/engine", "capture/worker"),
    },
    "capture/scheduler": {
        *("protocol", "capture/wire", "capture/engine", "capture/seams", "capture/scheduler/kv"),
    },
    "capture/scheduler/kv": {"protocol", "capture/wire", "capture/engine", "capture/scheduler"},
    "server": {"protocol"},
    "server/outputs": {"protocol", "capture/wire", "server"},
    "server/page": set(),
    "server/inprocess": {
        *("protocol", "capture/wire", "capture/engine", "capture/seams"),
        *("server", "server/outputs"),
    },
    "server/http": {
        *("protocol", "capture/wire", "server", "server/outputs", "server/http/encoding"),
    },
    "server/http/encoding": {"protocol", "capture/wire", "server/outputs"},
    "server/http/arrays": {
        *("protocol", "server", "server/outputs", "server/http", "server/http/encoding"),
    },
    "server/http/requests": {
        *("protocol", "capture/wire", "server", "server/outputs"),
        *("server/http", "server/http/arrays"),
    },
    "server/http/answers": {
        *("protocol", "capture/wire", "capture/engine", "server", "server/outputs"),
        *("server/http", "server/http/encoding", "server/http/arrays", "server/http/requests"),
    },
    "server/http/recording": {
        *("protocol", "capture/wire", "server", "server/outputs"),
        *("server/http", "server/http/encoding", "server/http/answers"),
    },
    "server/http/routes": {
        *("protocol", "server", "server/http"),
        *("server/http/arrays", "server/http/requests", "server/http/answers"),
    },
    "server/http/process": {
        *("protocol", "capture/wire", "capture/engine", "capture/seams"),
        *("server", "server/outputs", "server/page", "server/http", "server/http/encoding"),
        *("server/http/requests", "server/http/answers"),
        *("server/http/recording", "server/http/routes"),
    },
    "server/cli": {
        *("protocol", "capture/wire", "capture/engine", "server", "server/http"),
        *("server/http/process", "server/inprocess", "server/outputs"),
    },
    "server/tools": {"protocol", "server/cli", "server/page"},
}
MAY_IMPORT_VLLM = (
    *("capture/engine", "capture/seams", "capture/wire/transport.py"),
    *(
        f"capture/worker/{name}.py"
        for name in (
            *(
                "moe_layers",
                "refusals",
                "weights",
                "binding",
                "token_slices",
                "reloading",
            ),
            *("profile_kernel", "stage", "v1", "v2", "worker"),
            *("router_input/rewriting", "router_input/refusals", "router_input/kernel"),
        )
    ),
    *(
        f"capture/scheduler/{name}.py"
        for name in ("bare_rows", "distributor", "output_queue", "scheduler")
    ),
    *(
        f"capture/scheduler/{name}.py"
        for name in ("input_decoder", "prefill_exchange", "row_source", "step")
    ),
    "capture/scheduler/kv",
    *("server/vllm_api.py", "server/http/vllm_http.py", "server/http/seams.py"),
    *("server/cli/serve.py", "server/inprocess/plugin.py"),
)

NEEDED_BY_CLIENTS = {
    "protocol/answers.py": {"msgspec", "numpy"},
    "protocol/fetch.py": {"msgspec", "numpy"},
    "protocol/saved.py": {"msgspec", "numpy"},
    "protocol/buckets.py": {"obstore"},
    "protocol/input_fields.py": {"pydantic"},
    "protocol/models.py": {"pydantic"},
    "protocol/package/replay": {"torch", "numpy"},
}

IMPORTS = {
    module: {
        name if name in MODULES else name.rpartition(".")[0]
        for name in imports(path)
        if name.startswith("routed_experts.")
    }
    for module, path in MODULES.items()
}


def room_of(module: str) -> str:
    return room_of_path(MODULES[module])


def room_of_path(path: Path) -> str:
    return str(path.parent.relative_to(ROOT))


def test_each_room_imports_what_the_table_allows_and_uses_all_of_it() -> None:
    imports: dict[str, set[str]] = defaultdict(set)
    for module, imported in IMPORTS.items():
        imports[room_of(module)] |= set(map(room_of, imported)) - {room_of(module)}
    assert imports == MAY_IMPORT


def test_the_worker_and_the_scheduler_share_nothing_but_messages() -> None:
    """They are processes of their own, often on other machines."""
    for one, other in (
        ("capture/worker", "capture/scheduler"),
        ("capture/scheduler", "capture/worker"),
    ):
        rooms = [room for room in MAY_IMPORT if room.startswith(one)]
        assert rooms
        for room in rooms:
            assert not [name for name in MAY_IMPORT[room] if name.startswith(other)], room


def test_no_modules_import_each_other() -> None:
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(error.args[1]))


def test_only_the_named_files_import_vllm_and_the_clients_modules_need_little_else() -> None:
    for path in PATHS:
        of_others = packages(path) - sys.stdlib_module_names - {"routed_experts"}
        name = str(path.relative_to(ROOT))
        assert "vllm" not in of_others or name.startswith(MAY_IMPORT_VLLM), name
        if name.startswith("protocol/"):
            room = NEEDED_BY_CLIENTS.get(room_of_path(path), {"numpy"})
            assert of_others <= NEEDED_BY_CLIENTS.get(name, room), name


def test_what_all_tests_share_imports_neither_vllm_nor_torch() -> None:
    """Tests of modules that need neither start in a second."""
    program = "import sys, tests.conftest; print({'torch', 'vllm'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", program], cwd=ROOT) == b"set()\n"
