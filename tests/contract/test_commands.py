"""Every command in the documentation is run by a test or says why not, and its flags, names and paths exist."""

import ast
import importlib
import os
import re
import subprocess
from argparse import ArgumentParser
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from routed_experts.server.cli import main, serve
from tests.command_lines import flags_of, module_parser, parser_of, program_parser, shell_words
from tests.contract.served import vllms
from tests.documentation import ROOT, Block, blocks, exists, spans

BLOCKS = list(blocks())
SPANS = list(spans())
COMMANDS = ("routed-experts", "make", "python", "python3", "pytest", "torchrun", "vllm")
IMAGES = ("routed-experts", "routed-experts:cpu")
_NOT_OURS = """
--build --build-arg --wait --gpus --ipc --time --tmpfs --read-only --shm-size --stop-timeout --foreground --head
--address --extra-index-url --no-deps --require-hashes --decoder-ports --prefiller-ports --isolated --no-sync --with
--network --no-healthcheck --router_replay_mode --use-rollout-routing-replay --init-expert-location --moe-cache-profile
"""
NOT_OURS = set(_NOT_OURS.split())
"""Flags of docker, timeout, pip, uv, Ray, trainers and other engines."""

pytestmark = pytest.mark.filterwarnings("ignore:.* found in sys.modules:RuntimeWarning")


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.where)
def test_every_block_says_who_runs_it(block: Block) -> None:
    assert block.language in ("sh", "python", "json", "text"), "name the language after the fence"
    if block.language in ("sh", "python"):
        is_excused = block.mark.startswith("not run: ") and len(block.mark) > 29
        assert bool(block.run_by) != is_excused, "above it, write <!-- run by TEST --> or <!-- not run: WHY -->"
    elif block.language == "json":
        assert block.run_by
    for named in re.findall(r"tests/[\w/]+\.py(?:::\w+)?", block.mark):
        assert exists(named), named
    if block.run_by:
        path, _, name = block.run_by.partition("::")
        tests = [node for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)]
        (test,) = (node for node in tests if node.name == name)
        assert "documented" in [argument.arg for argument in test.args.args], f"{name} does not read it"


# ---- every command can be read by the program that it is for ----


def read(argv: list[str]) -> None:
    """Has the program that `argv` starts read its arguments."""
    match argv:
        case ["routed-experts", *rest]:
            read_ours(rest)
        case ["vllm", "serve", *rest]:
            vllms(rest)
        case ["make", *rest]:
            read_make(rest)
        case ["python" | "python3", *rest]:
            read_python(rest)
        case ["pytest", *rest]:
            assert all(exists(path) for path in rest if path.startswith("tests")), argv
        case ["torchrun", *rest]:
            (script,) = (word for word in rest if word.endswith(".py"))
            assert (ROOT / script).exists(), script
        case ["docker", "run", *rest]:
            image = next(place for place, word in enumerate(rest) if word in IMAGES)
            read_ours(["serve", *rest[image + 1 :]])
        case ["docker", "build", *rest]:
            assert (ROOT / rest[rest.index("-f") + 1]).exists()
        case [program, *_]:
            assert program in ("docker", "curl", "pip"), f"no test looks at {argv}"


def read_ours(argv: list[str]) -> None:
    assert argv[0] in main.COMMANDS
    if argv[0] == "serve":
        if not any(word.startswith("--help") for word in argv):
            serve.parse(argv[1:])
    elif argv[1:] and argv[0] != "tiny-model":
        parser_of(lambda: main.main(argv))


def read_make(argv: list[str]) -> None:
    """And what make would then run of ours, as if everything were installed."""
    rules = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in argv:
        assert "=" in word or re.search(rf"^{word}:", rules, re.MULTILINE), f"make has no {word}"
    command = ["make", "-n", "-o", "setup", "DEVICE=cpu", *argv]
    # What the make that runs these tests was told does not go for this one.
    env = {"PATH": os.environ["PATH"]}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        if re.match(r"\S*/bin/(routed-experts serve|python -m (bench|tests))", line):
            (words,) = shell_words(line.partition("/bin/")[2])
            read(words)


def read_python(argv: list[str]) -> None:
    is_module = argv[0] == "-m"
    path = Path(find_spec(argv[1]).origin or "") if is_module else ROOT / argv[0]  # type: ignore[union-attr]
    if "argparse" in path.read_text(encoding="utf-8"):
        if is_module:
            module_parser(*argv[1:])
        else:
            program_parser(path, *argv[1:])


def test_commands_can_be_read() -> None:
    """Those of blocks, in sentences, and in what the programs say of themselves."""
    for block in BLOCKS:
        if block.language == "sh":
            found = shell_words(block.text)
            assert found, block.where
            for argv in found:
                read(argv)
    in_sentences = [
        (where, text) for where, text in SPANS if re.match(rf"(?:[A-Z_]+=\S+ )*(?:{'|'.join(COMMANDS)}) \S", text)
    ]
    assert {text.split()[0] for _, text in in_sentences} >= {"routed-experts", "make", "python", "pytest"}
    for path in sorted((ROOT / "examples").glob("*.py")):
        lines = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines()
        commands = [line for line in lines if f"examples/{path.name}" in line]
        assert len(commands) == 1, path
        in_sentences.append((path.name, commands[0]))
    for where, text in in_sentences:
        found = shell_words(text)
        assert len(found) == 1, where
        read(found[0])


# ---- flags and names in sentences ----


def parsers() -> Iterator[ArgumentParser]:
    """Of all that the documentation has commands of."""
    export = ["export", "file", "-o", "out.csv"]
    for argv in (["serve", "model"], ["compare", "model", "--url", "url"], ["view", "file"], export):
        yield parser_of(partial(main.main, argv))
    yield program_parser(ROOT / "examples/prefill_decode.py", "model")
    modules = [f"bench.{path.stem}" for path in (ROOT / "bench").glob("*.py") if "__main__" in path.read_text()]
    for name in (*modules, "tests.e2e.torture"):
        yield module_parser(name, *REQUIRED.get(name, ()))


REQUIRED = {
    "bench.engine_host": ("--variant", "off", "--engine", "{}", "--device", "cpu"),
    "bench.link_package": ("folder",),
}


def test_flags_exist() -> None:
    known = {"--numprocesses", "--help", *NOT_OURS}.union(*map(flags_of, parsers()))
    found = [(flag, where) for where, text in SPANS for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*(?![\w-]*…)", text)]
    assert [f"{where}: {flag}" for flag, where in found if flag not in known] == []
    assert {flag for flag, _ in found} >= NOT_OURS  # the list holds no more than it must


OUR_FOLDERS = {path.name for path in (*ROOT.iterdir(), *(ROOT / "tests").iterdir()) if path.is_dir()}


def test_files_exist() -> None:
    for where, text in SPANS:
        for name in text.split():
            folder, slash, rest = name.partition("/")
            if slash and folder in OUR_FOLDERS and re.fullmatch(r"[\w/.-]+(?:::.*)?", rest):
                assert exists(name, (ROOT / where).parent), f"{where}: {name}"


def test_names_of_ours_exist() -> None:
    """And those in the table of modules in `docs/clients.md`."""
    for _, text in SPANS:
        if re.fullmatch(r"routed_experts\.(protocol|server|capture)(\.\w+)*", text):
            found, *rest = text.split(".")
            while rest and find_spec(f"{found}.{rest[0]}") is not None:
                found = f"{found}.{rest.pop(0)}"
            target = importlib.import_module(found)
            for name in rest:
                target = getattr(target, name)
    table = (ROOT / "docs/clients.md").read_text(encoding="utf-8").partition("| module |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE)
    assert len(rows) == 5
    for module, what in rows:
        found_module = importlib.import_module(f"routed_experts.protocol.{module}")
        assert [name for name in re.findall(r"`(\w+)`", what) if not hasattr(found_module, name)] == []
