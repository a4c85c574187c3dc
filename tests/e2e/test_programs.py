"""Programs that are forks of the tests' own process with vLLM end, print and are stopped as those
that are started."""

import json
import os
import signal
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import programs
from tests.e2e.harness import wait_until
from tests.fork_server import MODULES

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not programs.forks(), reason="here, all are started as users do"),
]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("print('said')", 0),
        ("import atexit, sys; atexit.register(print, 'said'); sys.exit(3)", 3),
        ("import sys; print('said'); sys.exit('a message')", 1),
        ("print('said'); 1 / 0", 1),
        ("import os, signal; print('said', flush=True); os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("from threading import Thread; Thread(target=lambda: print('said')).start()", 0),
    ],
)
def test_a_fork_says_and_ends_with_what_a_program_does(code: str, status: int) -> None:
    forked = programs.run(["-c", code])
    started = programs.run(["-c", code], as_users_do=True)
    assert (forked.stdout, forked.returncode) == (started.stdout, started.returncode)
    assert (started.stdout, started.returncode) == ("said\n", status)
    assert forked.stderr.splitlines()[-1:] == started.stderr.splitlines()[-1:]


def test_a_fork_has_vllm_and_no_other_variables_than_it_is_given() -> None:
    code = "import json, os, sys; print(json.dumps([{**os.environ}, 'vllm' in sys.modules]))"
    env = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
    variables, has_vllm = json.loads(programs.run(["-c", code], env=env).stdout)
    assert variables == env
    assert has_vllm
    env["PYTHONPATH"] = "elsewhere"  # which Python reads when it begins
    variables, has_vllm = json.loads(programs.run(["-c", code], env=env).stdout)
    assert variables == env
    assert not has_vllm


def test_a_fork_is_killed_when_its_client_is_gone() -> None:
    """As when the process that tests is killed."""
    with tempfile.TemporaryFile() as out:
        sleeps = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
        process = programs.start(["-c", sleeps], out.fileno())
        assert isinstance(process, programs.Forked)
        wait_until(lambda: os.fstat(out.fileno()).st_size > 0, "nothing was printed")
        assert os.pread(out.fileno(), 100, 0) == b"%d\n" % process.pid
    pid = process.pid
    process.connection.close()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the program is left")


def test_without_a_fork_server_programs_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning has the reason."""
    with monkeypatch.context() as patch, programs.own_fork_server():
        patch.setattr(sys, "executable", "/bin/false")
        with pytest.warns(UserWarning, match="programs take longer"):
            connection = programs.connect(os.environ)
    assert connection is None


def test_what_is_imported_before_a_fork_is_there() -> None:
    """The fork server leaves out what a version of vLLM does not have, and nothing of this project."""
    assert [name for name in MODULES if find_spec(name) is None] == []
