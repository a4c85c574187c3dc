"""Both images, built for real on stand-ins for their bases; the CPU image is also run, as its own
user.

No registry is needed: the stand-in is a minimal Debian, and buildah builds without a daemon, as
root, in a store of its own that is removed at the end.
"""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from routed_experts.server.cli import serve
from routed_experts.server.http.process.plugin import ADDRESS_FILE_VARIABLE
from tests.documentation import ROOT
from tests.e2e.harness import Server, answers_of_stream, free_port, wait_until

pytestmark = pytest.mark.release

PORT = 8000
USER_ID = 2000
START_LIMIT_S = 600
STOP_LIMIT_S = 120
FREEZE = ("python3", "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check")
# Which of pip's settings say where packages come from.
PIP_SETTINGS = (
    "index-url",
    "extra-index-url",
    "find-links",
    "no-index",
    "trusted-host",
    "proxy",
    "cert",
)
PIP_SETTINGS += ("timeout", "default-timeout")
# A container's process with nothing to write to but what `--tmpfs` and a volume give it, without
# capabilities and new privileges: `READ_ONLY ROOT COMMAND …`. What a container engine puts into
# every container is put there too.
READ_ONLY = f"""
set -e
root=$1; shift
touch "$root/etc/hosts" "$root/etc/resolv.conf"
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t tmpfs -o mode=775,uid={USER_ID},gid=0 tmpfs "$root/home/vllm"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount --bind /etc/hosts "$root/etc/hosts"
mount --bind /etc/resolv.conf "$root/etc/resolv.conf"
exec chroot "$root" setpriv --no-new-privs --bounding-set=-all --inh-caps=-all \
    --reuid={USER_ID} --regid=0 --clear-groups -- "$@"
"""
MISSING_TOOLS = [tool for tool in ("buildah", "debootstrap") if shutil.which(tool) is None]

needs_buildah = pytest.mark.skipif(
    bool(MISSING_TOOLS) or os.geteuid() != 0,
    reason=f"needs root and buildah and debootstrap (apt-get install buildah debootstrap); missing: {MISSING_TOOLS}",
)


@dataclass(frozen=True)
class Builder:
    """buildah with a store of its own."""

    folder: Path  # holds the store and all that buildah writes
    # how layers are stored. Where the kernel does not let overlays be mounted, each is a copy of
    # all below
    driver: str
    # options of every build, which let its pip find packages as this machine's pip does
    build_options: tuple[str, ...]

    def command(self, *args: str) -> list[str]:
        env = ("env", f"TMPDIR={self.folder}", "BUILDAH_ISOLATION=chroot")
        store = ("--root", str(self.folder / "store"), "--runroot", str(self.folder / "run"))
        return [*env, "buildah", "--storage-driver", self.driver, *store, *args]

    def __call__(self, *args: str) -> str:
        return run(self.command(*args)).strip()

    def build(self, tag: str, dockerfile: Path, *options: str, context: Path = ROOT) -> str:
        """What the build says."""
        every = ("--pull-never", "--network", "host", "--format", "docker", *self.build_options)
        return self("bud", *every, *options, "--file", str(dockerfile), "--tag", tag, str(context))

    def run(self, container: str, *command: str) -> str:
        return self("run", container, "--", *command)

    @contextmanager
    def container(self, image: str) -> Iterator[str]:
        name = self("from", "--pull-never", image)
        try:
            yield name
        finally:
            self("rm", name)


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (
        f"{' '.join(command)}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    )
    return done.stdout


def pip_options(config: Path, settings: dict[str, str]) -> tuple[str, ...]:
    """Options of a build that make pip find packages as `settings` say, without leaving them in the
    image."""
    config.write_text(
        "".join(["[global]\n", *(f"{name} = {value}\n" for name, value in settings.items())])
    )
    volumes = {f"{config}:/etc/pip.conf:ro"}
    for word in " ".join(settings.values()).split():
        path = Path(word.removeprefix("file://"))
        if path.is_absolute() and path.exists():
            # An index in a folder links to files beside it, so its parent is meant.
            path = path.parent if word.startswith("file://") else path
            volumes.add(f"{path}:{path}:ro")
    return tuple(f"--volume={volume}" for volume in sorted(volumes))


def pip_settings() -> dict[str, str]:
    """Where this machine's pip finds packages. A variable of the environment wins over a file, as
    in pip."""
    lines = run([sys.executable, "-m", "pip", "config", "list"]).splitlines()
    settings = {}
    for line in sorted(lines, key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2]] = ast.literal_eval(value)
    return {name: settings[name] for name in PIP_SETTINGS if name in settings}


def storage_driver(folder: Path) -> str:
    """`overlay` where such a file system can be mounted on this one."""
    lower, upper, work, merged = (folder / name for name in ("lower", "upper", "work", "merged"))
    for directory in (lower, upper, work, merged):
        directory.mkdir(parents=True)
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    command = [
        "unshare",
        "--mount",
        "--",
        "mount",
        "-t",
        "overlay",
        "overlay",
        "-o",
        options,
        str(merged),
    ]
    return (
        "overlay"
        if subprocess.run(command, capture_output=True, check=False).returncode == 0
        else "vfs"
    )


@pytest.fixture(scope="module")
def builder() -> Iterator[Builder]:
    # Not pytest's folder, which stays and may be in memory: the images take several gigabytes.
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="images-") as name:
        folder = Path(name)
        options = pip_options(folder / "pip.conf", pip_settings())
        yield Builder(folder, storage_driver(folder / "probe"), options)


@pytest.fixture(scope="module")
def minimal_debian(builder: Builder) -> str:
    """A stand-in for the CPU image's base, under that base's name."""
    container = builder("from", "scratch")
    packages = "--include=python3,python3-venv,passwd,ca-certificates"
    run(["debootstrap", "--variant=minbase", packages, "bookworm", builder("mount", container)])
    (base,) = re.findall(
        r"^ARG BASE=(\S+)$", (ROOT / "docker/Dockerfile.cpu").read_text(), re.MULTILINE
    )
    tag = f"docker.io/library/{base}"
    builder("commit", "--rm", container, tag)
    return tag


@pytest.fixture(scope="module")
def vllm_stand_in(builder: Builder, minimal_debian: str) -> str:
    """What the GPU image relies on in its base, vLLM left out: the system's Python, with pip and a
    new setuptools.

    Debian marks its Python as its own, which vLLM's image may or may not do.
    """
    lines = (ROOT / "requirements-cpu.txt").read_text().splitlines()
    setuptools = next(line for line in lines if line.startswith("setuptools=="))
    context = builder.folder / "stand-in"
    context.mkdir()
    (context / "Dockerfile").write_text(
        f"FROM {minimal_debian}\n"
        "RUN apt-get update && apt-get install -y --no-install-recommends python3-pip\n"
        f"RUN python3 -m pip install --break-system-packages {setuptools}\n"
        "WORKDIR /vllm-workspace\n"
        'ENTRYPOINT ["vllm", "serve"]\n'
    )
    builder.build("localhost/vllm-stand-in", context / "Dockerfile", context=context)
    return "localhost/vllm-stand-in"


def checked_config(builder: Builder, image: str) -> dict[str, Any]:
    """What both images promise to whoever runs them."""
    config: dict[str, Any] = json.loads(builder("inspect", "--type", "image", image))["Docker"][
        "config"
    ]
    assert config["Entrypoint"] == ["routed-experts", "serve"]
    assert not config["Cmd"], "an argument of the image would be lost as soon as the user gives one"
    assert list(config["ExposedPorts"]) == [f"{PORT}/tcp"]
    assert config["User"] == "vllm"
    assert f"{ADDRESS_FILE_VARIABLE}=/tmp/routed-experts.address" in config["Env"]
    assert ADDRESS_FILE_VARIABLE in " ".join(config["Healthcheck"]["Test"])
    labels = {
        name.removeprefix("org.opencontainers.image."): value
        for name, value in config["Labels"].items()
    }
    assert (
        labels["version"]
        == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    )
    assert labels["base.name"]
    assert not [entry for entry in config["Env"] if entry.startswith("PIP_")]
    return config


def in_container(
    builder: Builder, container: str, config: dict[str, Any], argv: list[str]
) -> list[str]:
    """`argv` as a container engine runs it, but for namespaces, with `--read-only --tmpfs /tmp
    --tmpfs /home/vllm --cap-drop ALL --security-opt no-new-privileges`.

    The command becomes `argv`'s process, so that a signal to the one is a signal to the other.
    """
    environment = ["env", "-i", f"--chdir={config['WorkingDir']}", *config["Env"]]
    unshared = ["unshare", "--mount", "--", "bash", "-c", READ_ONLY, "bash"]
    return [*unshared, builder("mount", container), *environment, *argv]


@contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Whatever the command leaves behind is killed at the end."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if process.poll() is None:
            for leftover in [*psutil.Process(process.pid).children(recursive=True), process]:
                leftover.kill()
        process.wait()


def is_over(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@needs_buildah
@pytest.mark.e2e
@pytest.mark.timeout(1200)
def test_cpu_image_serves_the_tiny_model(
    builder: Builder, minimal_debian: str, tmp_path: Path
) -> None:
    """Built as the documentation says, run without arguments but for the port on a file system that
    is read-only but for /tmp and the home, asked, and stopped."""
    builder.build("localhost/cpu", ROOT / "docker/Dockerfile.cpu")
    config = checked_config(builder, "localhost/cpu")
    port, log = free_port(), tmp_path / "log"
    environment = ["env", "-i", *config["Env"]]
    health_check = [*environment, *config["Healthcheck"]["Test"][1:]]
    with builder.container("localhost/cpu") as container:
        for path, writable in (
            ("/tmp", True),
            ("/home/vllm/.cache", True),
            ("/opt/venv", False),
            ("/var/tmp", False),
        ):
            mkdir = in_container(builder, container, config, ["mkdir", "-p", f"{path}/written"])
            assert (
                subprocess.run(mkdir, capture_output=True, check=False).returncode == 0
            ) == writable, path
        serve = in_container(
            builder, container, config, [*config["Entrypoint"], "--port", str(port)]
        )
        with running(serve, log) as process:
            server = Server(Path(), f"http://127.0.0.1:{port}", process, log)

            def is_healthy() -> bool:
                """As the image's own health check says."""
                assert process.poll() is None, log.read_text()[-6000:]
                check = [
                    "nsenter",
                    f"--target={process.pid}",
                    "--mount",
                    "--root",
                    "--",
                    *health_check,
                ]
                return subprocess.run(check, capture_output=True, check=False).returncode == 0

            wait_until(is_healthy, lambda: log.read_text()[-6000:], START_LIMIT_S)
            main = psutil.Process(process.pid)
            processes = [main, *main.children(recursive=True)]
            assert main.name() == "routed-experts"
            assert {p.uids().real for p in processes} == {USER_ID}
            for p in processes:
                status = Path(f"/proc/{p.pid}/status").read_text()
                assert "\nNoNewPrivs:\t1\n" in status
                assert set(re.findall(r"\nCap(?:Inh|Prm|Eff|Bnd|Amb):\t0*(\w*)", status)) == {""}
            assert {c.laddr.ip for c in main.net_connections() if c.laddr.port == port} >= {
                "0.0.0.0"
            }

            body = {"model": "tiny-moe", "prompt": "Hello", "max_tokens": 8, "ignore_eos": True}
            (answer,) = answers_of_stream(
                server.stream(**body, return_routed_experts=True, return_token_ids=True)
            )
            assert answer.prompt_rows.shape == (len("Hello"), 5, 4)
            assert answer.rows.shape == (8 - 1, 5, 4)

            main.send_signal(signal.SIGTERM)
            assert process.wait(STOP_LIMIT_S) == 0, log.read_text()[-6000:]
            # what they started ends a little later
            psutil.wait_procs(processes, timeout=STOP_LIMIT_S)
            assert all(is_over(p) for p in processes)


@needs_buildah
@pytest.mark.timeout(1200)
def test_gpu_image_adds_only_this_project_and_orjson(builder: Builder, vllm_stand_in: str) -> None:
    """As far as it goes without vLLM: the command starts, and nothing that the base brought was
    replaced."""
    builder.build(
        "localhost/gpu", ROOT / "docker/Dockerfile", "--build-arg", f"BASE={vllm_stand_in}"
    )
    checked_config(builder, "localhost/gpu")
    with builder.container(vllm_stand_in) as container:
        before = set(builder.run(container, *FREEZE).splitlines())
    with builder.container("localhost/gpu") as container:
        after = set(builder.run(container, *FREEZE).splitlines())
        assert "usage: routed-experts" in builder.run(container, "routed-experts", "--help")
        assert builder.run(container, "id", "-u") == str(USER_ID)
        # A user id that the image does not know, as some clusters give out, can write there too.
        builder("run", "--user", "12345:0", container, "--", "touch", "/home/vllm/.cache/written")
        assert "tests" not in builder.run(container, "ls", "-A", "/src").split()
    assert before <= after
    assert {line.partition("==")[0] for line in after - before} == {
        "orjson",
        "routed-experts-server",
    }


def test_whatever_runs_the_image_gives_it_no_privileges() -> None:
    """And publishes its port where only the host's own programs reach it, unless told otherwise."""
    service = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]["server"]
    assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert service["read_only"] is True
    assert service["ports"] == [f"${{ADDRESS:-127.0.0.1}}:${{PORT:-{PORT}}}:{PORT}"]
    _, *runs = (ROOT / "docker/README.md").read_text().split("docker run --rm")
    for options in runs:
        assert (
            " --cap-drop ALL --security-opt no-new-privileges "
            in options.partition("routed-experts")[0]
        )
        assert f" -p 127.0.0.1:{PORT}:{PORT} " in options.partition("routed-experts")[0]


def test_whatever_runs_the_image_waits_for_the_server() -> None:
    """Longer than the server takes at most, which is the time of its flag and what ends vLLM's
    processes after it."""
    longest = serve.SHUTDOWN_TIMEOUT_S + 5
    grace = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]["server"][
        "stop_grace_period"
    ]
    assert int(grace.removesuffix("s")) >= longest
    readme = (ROOT / "docker/README.md").read_text()
    runs = readme.count("docker run --rm")
    assert runs == readme.count(f"docker run --rm --init --stop-timeout {longest} ") > 1
    for page in (readme, (ROOT / "docs/run.md").read_text()):
        assert f"({serve.SHUTDOWN_TIMEOUT_S} s" in page
