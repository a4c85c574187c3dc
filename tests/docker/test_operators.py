"""The manifests and the proxy's configuration in `docker/`, read by their own tools."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import kubernetes_validate
import pytest
import yaml

from routed_experts.server.cli import serve
from tests.contract.served import check, serving
from tests.documentation import ROOT
from tests.e2e.harness import ASK, Server, answers_of, answers_of_stream, free_port, read_events, wait_until

pytestmark = pytest.mark.release

MANIFESTS = list(yaml.safe_load_all((ROOT / "docker/kubernetes.yaml").read_text()))
KEY = {"Authorization": "Bearer a-key"}
needs_nginx = pytest.mark.skipif(
    shutil.which("nginx") is None or shutil.which("openssl") is None,
    reason="needs nginx and openssl (apt-get install nginx-light openssl)",
)


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: manifest["kind"])
@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_manifests_are_those_of_kubernetes(manifest: dict[str, object], version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)


def test_the_pod_fits_the_server() -> None:
    (pod,) = (each["spec"]["template"]["spec"] for each in MANIFESTS if each["kind"] == "Deployment")
    (container,) = pod["containers"]
    args = serve.parse(container["args"])
    assert args.port == container["ports"][0]["containerPort"]
    assert pod["terminationGracePeriodSeconds"] > args.shutdown_timeout
    assert pod["securityContext"]["runAsUser"] == 2000
    written = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert written == {"/home/vllm", "/tmp", "/dev/shm"}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@contextmanager
def nginx(server: Server, folder: Path) -> Iterator[str]:
    """nginx in front of `server`, with the configuration as it is but for addresses and the certificate."""
    port, text = free_port(), (ROOT / "docker/nginx.conf").read_text()
    cert, key = folder / "cert.pem", folder / "key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "1"]
    subprocess.run([*made, "-out", str(cert), "-keyout", str(key)], check=True, capture_output=True)
    changes = {"127.0.0.1:8000": server.url.removeprefix("http://"), "listen 443": f"listen 127.0.0.1:{port}"}
    changes |= {"/etc/nginx/tls/cert.pem": str(cert), "/etc/nginx/tls/key.pem": str(key)}
    for before, after in changes.items():
        assert text.count(before) == 1
        text = text.replace(before, after)
    conf = folder / "nginx.conf"
    conf.write_text(text)
    command = ["nginx", "-e", "stderr", "-c", str(conf), "-g", f"pid {folder}/pid; daemon off;"]
    tested = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stderr
    process = subprocess.Popen(command)
    try:
        wait_until(
            lambda: (folder / "pid").read_text(), "nginx does not start"
        )  # empty since the test, until it listens
        yield f"https://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(120)


@needs_nginx
@pytest.mark.e2e
def test_behind_nginx(tiny_model: Path, tmp_path: Path) -> None:
    body = {"model": "tiny", "prompt": "Hello" * 50, "max_tokens": 40, "temperature": 0, **ASK}
    with (
        serving(tiny_model, "--api-key", "a-key", "--enable-scale-out") as server,
        nginx(server, tmp_path) as url,
        httpx.Client(base_url=url, verify=False, timeout=300, trust_env=False) as client,
    ):
        assert client.get("/health").status_code == 200
        whole = client.post("/v1/completions", json=body, headers=KEY)
        check(*answers_of(whole.json()), 40)
        asked = {"json": {**body, "stream": True}, "headers": KEY}
        with client.stream("POST", "/v1/completions", **asked) as response:
            check(*answers_of_stream(list(read_events(response.iter_lines()))), 40)
        for path in ("/v1/completions", "/inference/v1/generate", "/invocations"):
            assert client.post(path, json=body).status_code == 401, path
        assert client.get("/routed_experts").status_code == 200
        texts = {"json": {"token_ids": [39]}}  # which the page asks for
        assert client.post("/v1/routed_experts/texts", **texts).status_code == 401
        assert client.post("/v1/routed_experts/texts", **texts, headers=KEY).json() == {"texts": ["H"]}
        for path in ("/metrics", "/tokenize", "/scale_elastic_ep", "/v1x", "/docs"):
            assert client.get(path, headers=KEY).status_code == 404, path
        large = client.post("/v1/completions", json={**body, "prompt": "x" * (100 << 20)}, headers=KEY)
        assert (large.status_code, large.json()["error"]["type"]) == (400, "BadRequestError"), "not 413 of nginx"
