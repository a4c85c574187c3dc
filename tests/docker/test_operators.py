"""The manifests and the proxy's configuration in `docker/`, read by their own tools."""

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml

from routed_experts.server.cli import serve
from tests.contract.served import check, serving
from tests.documentation import ROOT
from tests.e2e.harness import (
    ASK,
    ONE_PROCESS,
    SMALL_KV,
    Server,
    answers_of,
    answers_of_stream,
    free_port,
    read_events,
    wait_until,
)
from tests.e2e.harness import serving as serving_processes

pytestmark = pytest.mark.release

FOLDER = ROOT / "docker/kustomize"
BASE = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
MANIFESTS = {
    each["kind"]: each for name in BASE["resources"] for each in yaml.safe_load_all((FOLDER / name).read_text())
}
NAME = "routed-experts"
LABELS = {"app.kubernetes.io/name": NAME}
CRDS = {
    "PodMonitor": ("monitoring.coreos.com/v1", {"selector", "podMetricsEndpoints"}),
    "HTTPRoute": ("gateway.networking.k8s.io/v1", {"parentRefs", "hostnames", "rules"}),
}
"""Kinds without a schema here: what their public API calls them, and all fields of their `spec` that are used."""
KEY = {"Authorization": "Bearer a-key"}
needs_nginx = pytest.mark.skipif(
    shutil.which("nginx") is None or shutil.which("openssl") is None,
    reason="needs nginx and openssl (apt-get install nginx-light openssl)",
)


@pytest.mark.parametrize("kind", sorted(MANIFESTS.keys() - CRDS.keys()))
@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_manifests_are_those_of_kubernetes(kind: str, version: str) -> None:
    kubernetes_validate.validate(MANIFESTS[kind], version, strict=True)


def test_custom_resources_have_what_their_api_requires() -> None:
    """By hand: the fields as the API's reference names them, and the values that it restricts."""
    for kind, (version, fields) in CRDS.items():
        assert (MANIFESTS[kind]["apiVersion"], MANIFESTS[kind]["spec"].keys()) == (version, fields)
    (endpoint,) = MANIFESTS["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert endpoint.keys() == {"port", "path", "interval"}
    route = MANIFESTS["HTTPRoute"]["spec"]
    (rule,) = route["rules"]
    assert rule.keys() == {"matches", "timeouts", "backendRefs"}
    assert all(parent.keys() == {"name", "namespace"} for parent in route["parentRefs"])
    assert all(backend.keys() == {"name", "port"} for backend in rule["backendRefs"])
    assert all(re.fullmatch(r"([0-9]{1,5}(h|m|s|ms)){1,4}", limit) for limit in rule["timeouts"].values())
    for match in rule["matches"]:
        assert match["path"]["type"] in ("Exact", "PathPrefix")
        assert re.fullmatch(r"(/[\w.-]+)+", match["path"]["value"])


def test_the_base_is_whole() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {"kustomization.yaml", *BASE["resources"]}
    assert len(MANIFESTS) == len(BASE["resources"]), "one of each kind, one in each file"
    (image,) = BASE["images"]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (image["name"], image["newTag"]) == (the_container()["image"], version)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kustomize_builds_the_base() -> None:
    built = subprocess.run(["kubectl", "kustomize", str(FOLDER)], capture_output=True, text=True, check=True).stdout
    found = {each["kind"]: each for each in yaml.safe_load_all(built)}
    assert found.keys() == MANIFESTS.keys()
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"{BASE['images'][0]['newName']}:{BASE['images'][0]['newTag']}"
    assert all(found[kind] == MANIFESTS[kind] for kind in found if kind != "Deployment")


def the_container() -> dict[str, Any]:
    (container,) = MANIFESTS["Deployment"]["spec"]["template"]["spec"]["containers"]
    return container


def test_all_select_the_pod_and_its_port() -> None:
    spec = {kind: manifest["spec"] for kind, manifest in MANIFESTS.items()}
    assert spec["Deployment"]["template"]["metadata"]["labels"] == LABELS
    for kind, field in (("Service", "selector"), ("NetworkPolicy", "podSelector")):
        assert spec[kind][field] in (LABELS, {"matchLabels": LABELS})
    for kind in ("Deployment", "PodMonitor", "PodDisruptionBudget"):
        assert spec[kind]["selector"] == {"matchLabels": LABELS}
    assert spec["HorizontalPodAutoscaler"]["scaleTargetRef"] == {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": NAME,
    }
    assert "replicas" not in spec["Deployment"], "each apply would undo the autoscaler"
    (port,), (service,) = the_container()["ports"], spec["Service"]["ports"]
    probes = [the_container()[f"{probe}Probe"]["httpGet"] for probe in ("startup", "readiness", "liveness")]
    assert [probe["path"] for probe in probes] == ["/health"] * 3
    monitored = [each["port"] for each in spec["PodMonitor"]["podMetricsEndpoints"]]
    allowed = [each["port"] for rule in spec["NetworkPolicy"]["ingress"] for each in rule["ports"]]
    assert {service["targetPort"], *monitored, *allowed, *(probe["port"] for probe in probes)} == {port["name"]}
    (backend,) = spec["HTTPRoute"]["rules"][0]["backendRefs"]
    assert backend == {"name": MANIFESTS["Service"]["metadata"]["name"], "port": service["port"]}


def test_the_pod_fits_the_server_and_its_image() -> None:
    pod, container = MANIFESTS["Deployment"]["spec"]["template"]["spec"], the_container()
    args = serve.parse(container["args"])
    assert args.port == container["ports"][0]["containerPort"]
    image = (ROOT / "docker/Dockerfile").read_text()
    assert f"EXPOSE {args.port}\n" in image
    assert f"useradd --uid {pod['securityContext']['runAsUser']} " in image
    assert pod["terminationGracePeriodSeconds"] > args.shutdown_timeout
    written = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert written == {"/home/vllm", "/tmp", "/dev/shm"}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    claims = {
        volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume
    }
    assert claims == {MANIFESTS["PersistentVolumeClaim"]["metadata"]["name"]}


def test_the_route_has_the_paths_of_nginx() -> None:
    given = re.findall(r"location (= )?(\S+) \{ proxy_pass", (ROOT / "docker/nginx.conf").read_text())
    paths = [match["path"] for match in MANIFESTS["HTTPRoute"]["spec"]["rules"][0]["matches"]]
    assert [(path["type"] == "Exact", path["value"]) for path in paths] == [
        (bool(at), p.rstrip("/")) for at, p in given
    ]


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


@pytest.mark.e2e
def test_logs_are_json(tiny_model: Path, tmp_path: Path) -> None:
    environment = {"VLLM_LOGGING_CONFIG_PATH": str(ROOT / "docker/logging.json")}
    flags = (*SMALL_KV, *ONE_PROCESS, "--max-model-len", "512")
    with serving_processes(tiny_model, tmp_path / "log", *flags, env=environment) as server:
        server.complete(prompt="Hello", max_tokens=2, **ASK)
    text = server.log.read_text()
    names = {json.loads(line)["name"] for line in text.splitlines() if line.startswith("{")}
    assert {"uvicorn.access", "uvicorn.error", "vllm.v1.engine.core"} <= names
    assert any(name.startswith("vllm.routed_experts.") for name in names)
    others = [line for line in text.splitlines() if not line.startswith("{")]
    assert not [line for line in others if re.search(r"\b(INFO|WARNING|ERROR)\b", line)]
