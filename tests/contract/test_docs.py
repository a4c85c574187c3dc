"""The documentation misleads nobody: its code is run or says why not; links, flags, files, names
and messages exist."""

import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

from routed_experts.server.cli import serve
from routed_experts.server.cli.main import COMMANDS
from tests.documentation import PAGES, ROOT, blocks, exists, spans
from tests.sources import PATHS, strings

BLOCKS, SPANS = list(blocks()), list(spans())
NOW = [span for span in SPANS if not span[0].startswith("CHANGELOG.md")]
"""Without the page that names what is gone."""
_NOT_OURS = """
--build --build-arg --wait --ipc --time --tmpfs --read-only --shm-size --stop-timeout --foreground --head --init --rm
--network --no-healthcheck --address --extra-index-url --no-deps --require-hashes --decoder-ports --prefiller-ports
--isolated --no-sync --with --router_replay_mode --use-rollout-routing-replay --init-expert-location
--moe-routing-trace-path --cap-drop --security-opt --policy --worker-urls
"""
NOT_OURS = set(_NOT_OURS.split())
"""Flags of docker, timeout, pip, uv, Ray, routers, trainers and other engines."""


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> Iterator[tuple[str, Path, str]]:
    """Those to files: the link, the file and the anchor."""
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        yield link, (page.parent / path).resolve() if path else page, anchor


def test_links_lead_somewhere() -> None:
    assert [
        f"{page}: {link}"
        for page in PAGES
        for link, target, anchor in links(page)
        if not target.exists() or (anchor and anchor not in anchors(target))
    ] == []


def test_each_page_is_at_most_one_behind_those_that_the_readme_names() -> None:
    first = {target for _, target, _ in links(ROOT / "README.md") if target.suffix == ".md"}
    near = first | {target for page in first for _, target, _ in links(page)}
    docs = ROOT / "docs"
    pages = {*docs.rglob("*.md"), docs / "grafana.json", docs / "alerts.yaml"}
    assert pages - near == set()


def test_every_block_says_who_runs_it() -> None:
    """That test reads it by its fixture `documented`."""
    for block in BLOCKS:
        assert block.language in ("sh", "python", "javascript", "json", "text"), (
            f"{block.where}: name the language after the fence"
        )
        is_excused = block.mark.startswith("not run: ") and len(block.mark) > 29
        assert block.language == "text" or bool(block.run_by) != is_excused, (
            f"{block.where}: <!-- run by TEST -->?"
        )
        for named in re.findall(r"tests/[\w/]+\.py(?:::\w+)?", block.mark):
            assert exists(named), named
        if block.run_by:
            path, _, name = block.run_by.partition("::")
            assert re.search(rf"def {name}\([^)]*\bdocumented\b", (ROOT / path).read_text()), (
                block.run_by
            )


def test_flags_exist() -> None:
    vllms = ServeSubcommand().subparser_init(FlexibleArgumentParser().add_subparsers())
    serve.add_flags(vllms)
    known = {"--help", *(flag for action in vllms._actions for flag in action.option_strings)}
    for path in (
        *PATHS,
        *ROOT.glob("bench/*.py"),
        *ROOT.glob("examples/*.py"),
        *ROOT.glob("tests/e2e/torture.py"),
        *ROOT.glob("tests/mutations.py"),
    ):
        known.update(re.findall(r'"(--[a-z][\w-]*)"', path.read_text(encoding="utf-8")))
    texts = [*NOW, *((block.where, block.text) for block in BLOCKS if block.language == "sh")]
    flags = [
        (flag, at)
        for at, text in texts
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*(?![\w-]*…)", text)
    ]
    assert [f"{where}: {flag}" for flag, where in flags if flag not in known | NOT_OURS] == []
    assert {flag for flag, _ in flags} >= NOT_OURS  # the list holds no more than it must


OUR_FOLDERS = {
    path.name for path in (*ROOT.iterdir(), *(ROOT / "tests").iterdir()) if path.is_dir()
} - {"build"}  # what tools leave, not in every checkout


def test_commands_and_files_exist() -> None:
    rules = (ROOT / "Makefile").read_text(encoding="utf-8")
    shell_blocks = [(block.where, block.text) for block in BLOCKS if block.language == "sh"]
    for where, text in [*SPANS, *shell_blocks]:
        for target in re.findall(r"(?:^|\n)make ([a-z][\w-]*)", text):
            assert re.search(rf"^{target}:", rules, re.MULTILINE), f"{where}: make has no {target}"
        for command in re.findall(r"(?:^|\n|/)routed-experts ([a-z][\w-]*)", text):
            assert command in COMMANDS, f"{where}: routed-experts has no {command}"
        for name in filter(is_path_of_ours, text.split()):
            assert exists(name, (ROOT / where).parent), f"{where}: {name}"


def is_path_of_ours(word: str) -> bool:
    folder, slash, rest = word.partition("/")
    is_below = bool(slash) and folder in OUR_FOLDERS
    return is_below and re.fullmatch(r"[\w/.-]+(?:::.*)?", rest) is not None


FIELD = re.compile(r"(return_routed|routed_experts|prompt_routed)_\w+")
NAME = re.compile(r"[A-Za-z_]+(\.[A-Za-z_]+)*")
MODULE = re.compile(r"routed_experts\.(protocol|server|capture)(\.\w+)*")


def words_in(*paths: Path) -> set[str]:
    texts = (path.read_text(encoding="utf-8") for path in paths)
    return {path.stem for path in paths} | set(re.findall(r"\w+", "".join(texts)))


def test_fields_exist() -> None:
    """Of requests and responses, and metrics (see test_metrics)."""
    words = words_in(*PATHS, ROOT / "docs/metrics.md")
    assert [place for place in NOW if FIELD.fullmatch(place[1]) and place[1] not in words] == []


def test_names_in_the_structure_exist() -> None:
    pages_own = [*ROOT.glob("server/page/static/*.js"), *ROOT.glob("tests/**/*.py")]
    words = words_in(*PATHS, *pages_own, ROOT / "CHANGELOG.md")
    missing = [
        f"{where}: {text}"
        for where, text in SPANS
        if where.startswith("docs/structure.md") and NAME.fullmatch(text)
        if not set(re.sub(r"\.(py|js|md)$", "", text).split(".")) <= words
    ]
    assert missing == []


def is_there(dotted: str) -> bool:
    """Whether there is a module of this name, or one that has what is named."""
    try:
        pkgutil.resolve_name(dotted)
    except (ImportError, AttributeError):
        return False
    return True


def test_modules_and_what_they_have_exist() -> None:
    dotted = [text for _, text in SPANS if MODULE.fullmatch(text)]
    page = (ROOT / "docs/train.md").read_text(encoding="utf-8")
    table = page.partition("| module |")[2].partition("\n\n")[0]
    for module, what in re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE):
        names = re.findall(r"`(\w+)`", what)
        dotted += [f"routed_experts.protocol.{module}.{name}" for name in names]
    assert len(dotted) > 20
    assert [text for text in dotted if not is_there(text)] == []


def test_messages_on_the_page_of_errors_are_those_of_the_code() -> None:
    """They are the code at the beginning of its list items, before a colon; `…` stands for any
    text."""
    known = {text for path in PATHS for text in strings(path)}
    section = (ROOT / "docs/run.md").read_text(encoding="utf-8").partition("\n## Errors")[2]
    listed = [
        text
        for head in re.findall(r"^- (`.*?`): ", section, re.MULTILINE)
        for text in re.findall(r"`(.*?)`", head)
    ]
    assert len(listed) > 3
    forms = {
        text: ".*".join(re.escape(part.strip()) for part in text.split("…")) for text in listed
    }
    assert [
        text
        for text, form in forms.items()
        if not any(re.fullmatch(form, known_text) for known_text in known)
    ] == []


def test_the_glossary_is_short_and_its_words_stand_where_it_points() -> None:
    section = (ROOT / "docs/structure.md").read_text(encoding="utf-8").partition("## Words")[2]
    rows = re.findall(r"^\| ([\w ]+) \| .+ \| `([\w/.]+)` \|$", section, re.MULTILINE)
    assert 10 <= len(rows) <= 20
    assert len({word for word, _ in rows}) == len(rows)
    for word, path in rows:
        name = word.replace(" ", "[ _]?")  # DeviceCache, device_cache
        text = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"(?<![a-z]){name}", text, re.IGNORECASE), f"{path} has no {word}"
