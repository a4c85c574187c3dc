"""The manifests and the proxy's configuration in `docker/`, read by their own tools."""

import copy
import json
import re
import shutil
import ssl
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPResponse, HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar
from urllib.parse import unquote

import httpx
import kubernetes_validate
import pytest
import yaml

from routed_experts.server.cli import serve
from routed_experts.server.settings import Settings
from tests.contract.served import check, serving
from tests.documentation import ROOT
from tests.e2e.harness import (
    ASK,
    ONE_PROCESS,
    SMALL_KV,
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
    manifest["kind"]: manifest
    for name in BASE["resources"]
    for manifest in yaml.safe_load_all((FOLDER / name).read_text())
}
NAME = "routed-experts"
LABELS = {"app.kubernetes.io/name": NAME}
CRDS = {
    "PodMonitor": ("monitoring.coreos.com/v1", {"selector", "podMetricsEndpoints"}),
    "HTTPRoute": ("gateway.networking.k8s.io/v1", {"parentRefs", "hostnames", "rules"}),
}
"""Kinds without a schema here: what their public API calls them, and all fields of their `spec`
that are used."""
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
    assert all(
        re.fullmatch(r"([0-9]{1,5}(h|m|s|ms)){1,4}", limit) for limit in rule["timeouts"].values()
    )
    for match in rule["matches"]:
        assert match["path"]["type"] in ("Exact", "PathPrefix")
        assert re.fullmatch(r"(/[\w.-]+)+", match["path"]["value"])


def test_the_base_is_whole() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {"kustomization.yaml", *BASE["resources"]}
    assert len(MANIFESTS) == len(BASE["resources"]), "one of each kind, one in each file"
    (image,) = BASE["images"]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (image["name"], image["newTag"]) == (the_container()["image"], version)


def built(name: str) -> list[dict[str, Any]]:
    """What kubectl makes of a folder."""
    command = ["kubectl", "kustomize", str(ROOT / "docker" / name)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return list(yaml.safe_load_all(output))


def by_kind(name: str) -> dict[str, dict[str, Any]]:
    """The same, where there is one of each kind."""
    manifests = built(name)
    kinds = {manifest["kind"]: manifest for manifest in manifests}
    assert len(kinds) == len(manifests)
    return kinds


needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")


@needs_kubectl
def test_kustomize_builds_the_base() -> None:
    manifests = by_kind("kustomize")
    assert manifests.keys() == MANIFESTS.keys()
    (container,) = manifests["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"{BASE['images'][0]['newName']}:{BASE['images'][0]['newTag']}"
    assert all(manifests[kind] == MANIFESTS[kind] for kind in manifests if kind != "Deployment")


def test_the_overlay_with_a_bucket_changes_what_the_base_has() -> None:
    """kubectl applies it; here its patches are what a strategic merge takes: names of the base, and
    lists that keep the base's flags."""
    folder = ROOT / "docker/kustomize-s3"
    overlay = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert (folder / overlay["resources"][0]).resolve() == FOLDER
    files = {
        "kustomization.yaml",
        "lifecycle.json",
        *(patch_entry["path"] for patch_entry in overlay["patches"]),
    }
    assert {path.name for path in folder.iterdir()} == files
    patches = [
        yaml.safe_load((folder / patch_entry["path"]).read_text())
        for patch_entry in overlay["patches"]
    ]
    for patch in patches:
        base = MANIFESTS[patch["kind"]]
        assert (patch["apiVersion"], patch["metadata"]) == (
            base["apiVersion"],
            {"name": base["metadata"]["name"]},
        )
    (container,) = patches[0]["spec"]["template"]["spec"]["containers"]
    flags = the_container()["args"]
    assert container["args"][: len(flags)] == flags
    added = dict(zip(*[iter(container["args"][len(flags) :])] * 2, strict=True))
    settings = Settings(routed_experts_store=added["--routed-experts-store"])
    (rule,) = json.loads((folder / "lifecycle.json").read_text())["Rules"]
    assert settings.routed_experts_store == f"s3://routed-experts/{rule['Filter']['Prefix'][:-1]}"
    merged = copy.deepcopy(MANIFESTS["Deployment"])
    merged["spec"]["template"]["spec"]["containers"][0] |= container
    kubernetes_validate.validate(merged, "1.37", strict=True)


@needs_kubectl
@pytest.mark.parametrize("overlay", ["kustomize-s3", "kustomize-tensor-parallel"])
def test_kustomize_builds_the_overlays(overlay: str) -> None:
    """What kubectl makes of them is of Kubernetes, selects the same pods, and has flags that the
    server takes."""
    manifests = by_kind(overlay)
    assert manifests.keys() == MANIFESTS.keys()
    kubernetes_validate.validate(manifests["Deployment"], "1.37", strict=True)
    template = manifests["Deployment"]["spec"]["template"]
    assert template["metadata"]["labels"] == LABELS
    (container,) = template["spec"]["containers"]
    args = serve.parse(container["args"])
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert args.tensor_parallel_size == gpus
    before = the_container()
    assert container["args"][1:3] == before["args"][1:3]
    assert container["volumeMounts"] == before["volumeMounts"]
    assert {variable["name"] for variable in container["env"]} == {
        variable["name"] for variable in before["env"]
    }


FIRST_POD = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}


@needs_kubectl
def test_a_group_of_nodes_is_one_server() -> None:
    """LeaderWorkerSet has no schema here; its pods are those of a Deployment."""
    manifests = by_kind("kustomize-nodes")
    assert manifests.keys() == MANIFESTS.keys() - {"Deployment"} | {"LeaderWorkerSet"}
    for kind in manifests.keys() - CRDS.keys() - {"LeaderWorkerSet"}:
        kubernetes_validate.validate(manifests[kind], "1.37", strict=True)
    group = manifests["LeaderWorkerSet"]
    assert (group["apiVersion"], group["spec"].keys()) == (
        "leaderworkerset.x-k8s.io/v1",
        {"leaderWorkerTemplate"},
    )
    target = {name: group[name] for name in ("apiVersion", "kind")}
    target["name"] = group["metadata"]["name"]
    assert manifests["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"] == target
    assert manifests["Service"]["spec"]["selector"] == LABELS | FIRST_POD
    assert manifests["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == LABELS | FIRST_POD
    assert {"from": [{"podSelector": {"matchLabels": LABELS}}]} in (
        manifests["NetworkPolicy"]["spec"]["ingress"]
    )


@needs_kubectl
def test_the_pods_of_a_group_differ_in_what_serves_http() -> None:
    template = by_kind("kustomize-nodes")["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    pods = [template["leaderTemplate"], template["workerTemplate"]]
    (first,), (other,) = (pod["spec"].pop("containers") for pod in pods)
    assert pods[0] == pods[1]
    assert pods[0]["metadata"]["labels"] == LABELS
    for name in ("ports", "startupProbe", "readinessProbe", "livenessProbe"):
        assert first.pop(name) == the_container()[name]
    variables = {"LWS_GROUP_SIZE": str(template["size"]), "LWS_LEADER_ADDRESS": "first.example"}
    args = []
    for index, container in enumerate((first, other)):
        text = json.dumps(container.pop("args"))
        for name, value in {**variables, "LWS_WORKER_INDEX": str(index)}.items():
            text = text.replace(f"$({name})", value)
        args.append(serve.parse(json.loads(text)))
    assert first == other
    assert [(node_args.node_rank, node_args.headless) for node_args in args] == [
        (0, False),
        (1, True),
    ]
    gpus = int(first["resources"]["limits"]["nvidia.com/gpu"])
    for node_args in args:
        parallel = node_args.tensor_parallel_size * node_args.pipeline_parallel_size
        assert parallel == node_args.nnodes * gpus == template["size"] * gpus
        assert node_args.shutdown_timeout < pods[0]["spec"]["terminationGracePeriodSeconds"]
    container = {**first, "args": [], "ports": the_container()["ports"]}
    deployment = copy.deepcopy(MANIFESTS["Deployment"])
    deployment["spec"]["template"] = {
        **pods[0],
        "spec": {**pods[0]["spec"], "containers": [container]},
    }
    kubernetes_validate.validate(deployment, "1.37", strict=True)


@needs_kubectl
def test_clients_reach_prefill_and_decode_through_a_proxy_only() -> None:
    manifests = built("kustomize-prefill-decode")
    for manifest in manifests:
        if manifest["kind"] not in CRDS:
            kubernetes_validate.validate(manifest, "1.37", strict=True)
    (policy,) = [manifest["spec"] for manifest in manifests if manifest["kind"] == "NetworkPolicy"]
    assert "HTTPRoute" not in {manifest["kind"] for manifest in manifests}
    assert policy["podSelector"]["matchLabels"] == LABELS
    assert "gateway" not in json.dumps(policy)


@needs_kubectl
@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_prefill_and_decode_are_servers_of_their_own(leg: str) -> None:
    own = {
        manifest["kind"]: manifest["spec"]
        for manifest in built("kustomize-prefill-decode")
        if manifest["metadata"]["name"].endswith(f"-{leg}")
    }
    labels = LABELS | {"app.kubernetes.io/component": leg}
    assert own["Service"]["selector"] == labels
    assert own["PodMonitor"]["selector"] == {"matchLabels": labels}
    assert own["Deployment"]["selector"] == {"matchLabels": labels}
    assert own["HorizontalPodAutoscaler"]["scaleTargetRef"]["name"] == f"{NAME}-{leg}"
    (container,) = own["Deployment"]["template"]["spec"]["containers"]
    config = serve.parse(container["args"]).kv_transfer_config
    assert (config.kv_connector, config.kv_role) == ("NixlConnector", "kv_both")
    (host,) = [variable for variable in container["env"] if "SIDE_CHANNEL_HOST" in variable["name"]]
    assert host["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}


def test_all_overlays_have_the_image_of_the_base() -> None:
    for path in (ROOT / "docker").rglob("kustomization.yaml"):
        assert yaml.safe_load(path.read_text()).get("images", BASE["images"]) == BASE["images"]


def the_container() -> dict[str, Any]:
    (container,) = MANIFESTS["Deployment"]["spec"]["template"]["spec"]["containers"]
    return container


def test_all_select_the_pod() -> None:
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
    assert "sessionAffinity" not in spec["Service"], (
        "a reference into one pod needs the overlay with a bucket"
    )


def test_all_use_the_port_of_the_pod() -> None:
    spec = {kind: manifest["spec"] for kind, manifest in MANIFESTS.items()}
    (port,) = the_container()["ports"]
    (service,) = spec["Service"]["ports"]
    assert service["targetPort"] == port["name"]
    for probe in ("startup", "readiness", "liveness"):
        request = the_container()[f"{probe}Probe"]["httpGet"]
        assert (request["path"], request["port"]) == ("/health", port["name"])
    for endpoint in spec["PodMonitor"]["podMetricsEndpoints"]:
        assert endpoint["port"] == port["name"]
    for rule in spec["NetworkPolicy"]["ingress"]:
        for allowed in rule["ports"]:
            assert allowed["port"] == port["name"]
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
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    claims = {
        volume["persistentVolumeClaim"]["claimName"]
        for volume in pod["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert claims == {MANIFESTS["PersistentVolumeClaim"]["metadata"]["name"]}


def test_the_route_has_the_paths_of_nginx() -> None:
    """A prefix of a route is of whole segments, and includes the path that ends there."""
    locations = re.findall(
        r"location (= )?(\S+) \{ proxy_pass", (ROOT / "docker/nginx.conf").read_text()
    )
    prefixes = {path.removesuffix("/") for exact, path in locations if not exact}
    exact_paths = {path for exact, path in locations if exact} - prefixes
    paths = [match["path"] for match in MANIFESTS["HTTPRoute"]["spec"]["rules"][0]["matches"]]
    assert {path["value"] for path in paths if path["type"] == "PathPrefix"} == prefixes
    assert {path["value"] for path in paths if path["type"] == "Exact"} == exact_paths


@contextmanager
def nginx(server_url: str, folder: Path) -> Iterator[str]:
    """nginx in front of a server, with the configuration as it is but for addresses and the
    certificate."""
    port, text = free_port(), (ROOT / "docker/nginx.conf").read_text()
    cert, key = folder / "cert.pem", folder / "key.pem"
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-subj",
        "/CN=localhost",
        "-days",
        "1",
    ]
    subprocess.run([*made, "-out", str(cert), "-keyout", str(key)], check=True, capture_output=True)
    changes = {
        "127.0.0.1:8000": server_url.removeprefix("http://"),
        "listen 443": f"listen 127.0.0.1:{port}",
    }
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


@dataclass(frozen=True)
class Received:
    """A request as it reaches the server behind nginx."""

    target: str  # of the request line
    headers: dict[str, str]

    @property
    def path(self) -> str:
        """What uvicorn makes of the target: decoded once, and not normalised."""
        return unquote(self.target.partition("?")[0])


class Recorder(BaseHTTPRequestHandler):
    """A server that records what reaches it."""

    protocol_version = "HTTP/1.1"
    received: ClassVar[list[Received]] = []

    def do_GET(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        # `path` has two slashes at its begin made one.
        self.received.append(Received(self.requestline.split()[1], headers))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def recording() -> Iterator[str]:
    """The address of such a server."""
    Recorder.received.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Recorder) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """nginx in front of a server that records what reaches it."""
    with recording() as server_url, nginx(server_url, tmp_path_factory.mktemp("nginx")) as url:
        yield url


@contextmanager
def connected(url: str) -> Iterator[HTTPSConnection]:
    context = ssl._create_unverified_context()
    connection = HTTPSConnection(url.removeprefix("https://"), context=context, timeout=60)
    try:
        yield connection
    finally:
        connection.close()


@pytest.fixture
def connection(proxy: str) -> Iterator[HTTPSConnection]:
    with connected(proxy) as to_proxy:
        yield to_proxy


def get(connection: HTTPSConnection, target: str, **headers: str) -> HTTPResponse:
    """The response to a request line as it is here: other clients normalise the path."""
    connection.putrequest("GET", target, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    response = connection.getresponse()
    response.read()
    return response


INNER = (
    "/metrics",
    "/metricsX",
    "//metrics",
    "/%6detrics",
    "/%256detrics",
    "/metrics%3f",
    "/metrics%23",
    "/tokenize",
)
PUBLISHED = (
    "v1/models",
    "v1/",
    "routed_experts",
    "routed_experts/page.js",
    "invocations",
    "health",
)
UP = ("..", "%2e%2e", ".%2e", "%2E.", "%252e%252e", "..;", "...", "..%00", "..%20")
SLASH = ("/", "%2f", "%2F", "//", "/./", "%5c", "%252f")
CONFUSING = [
    target
    for inner, slash, up, path in product(INNER, SLASH, UP, PUBLISHED)
    for target in (
        f"{inner}{slash}{up}{slash}{path}",
        f"/{path}{slash}{up}{inner}",
        f"/{path}{slash}{up}{slash}{up}{inner}",
    )
]
CONFUSING += [
    f"{slash}{path}"
    for slash in ("//", "///", "/./", "/%2f", "/x/../", "/x/..//")
    for path in PUBLISHED
]
CONFUSING += [
    f"https://localhost{path}"
    for path in ("", "/metrics", "/metrics/../v1/models", "//metrics/../v1/models")
]
CONFUSING += [f"/v1/models{mark}/../../metrics" for mark in ("?", "#", ";", "&", "\\")]
CONFUSING += [f"/metrics{mark}/../v1/models" for mark in ("?", "#", ";", "&", "\\")]
CONFUSING += [
    "/v1",
    "/V1/models",
    "/routed_expertsX",
    "/routed_experts.js",
    "/healthX",
    "/health/",
    "/invocations/",
]
CONFUSING += [
    "/inference/v1/generateX",
    "/inference/v1/generate/..",
    "/inference/v1/generate/%2e%2e/%2e%2e/%2e%2e/metrics",
]
"""Request targets that one parser may take for something published, and another one for something
else."""


@needs_nginx
def test_nginx_passes_on_the_path_that_it_matched(connection: HTTPSConnection) -> None:
    """What reaches the server is published, and is the same path to whoever normalises it."""
    is_published = re.compile(
        r"/(v1/.*|inference/v1/generate|invocations|routed_experts(/.*)?|health)"
    ).fullmatch
    for target in CONFUSING:
        Recorder.received.clear()
        status = get(connection, target).status
        assert Recorder.received or status in (301, 400, 404), (target, status)
        for received in Recorder.received:
            segments = received.path.split("/")
            assert is_published(received.path), (target, received)
            assert not {".", ".."}.intersection(segments), (target, received)
            assert "" not in segments[1:-1], (target, received)


@needs_nginx
@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/v1/models", "/v1/models"),
        ("/v1/models/a%20b%3Fc%25d", "/v1/models/a b?c%d"),
        ("/v1/models/org%2Fmodel", "/v1/models/org/model"),
        ("/v1/models/%C3%A4", "/v1/models/ä"),
        ("/inference/v1/generate", "/inference/v1/generate"),
        ("/invocations", "/invocations"),
        ("/routed_experts", "/routed_experts"),
        ("/routed_experts/page.js", "/routed_experts/page.js"),
        ("/health", "/health"),
    ],
)
def test_nginx_passes_on_what_is_published(
    connection: HTTPSConnection, target: str, path: str
) -> None:
    query = "a=%2e%2e%2f&b=c%20d"
    Recorder.received.clear()
    assert get(connection, f"{target}?{query}").status == 200
    (received,) = Recorder.received
    assert (received.path, received.target.partition("?")[2]) == (path, query)


@needs_nginx
def test_nginx_says_itself_who_asks(connection: HTTPSConnection) -> None:
    Recorder.received.clear()
    assert (
        get(connection, "/health", X_Forwarded_For="203.0.113.7", X_Forwarded_Proto="http").status
        == 200
    )
    (received,) = Recorder.received
    assert received.headers["x-forwarded-for"] == "127.0.0.1"
    assert received.headers["x-forwarded-proto"] == "https"


@needs_nginx
@pytest.mark.parametrize("target", ["/v1", "/routed_experts", "/invocations/"])
def test_nginx_redirects_to_no_other_host(connection: HTTPSConnection, target: str) -> None:
    response = get(connection, target, Host="other.example.org")
    assert response.status in (200, 301, 404)
    assert "other.example.org" not in (response.getheader("Location") or "")


@needs_nginx
@pytest.mark.e2e
def test_behind_nginx(tiny_model: Path, tmp_path: Path) -> None:
    body = {"model": "tiny", "prompt": "Hello" * 50, "max_tokens": 40, "temperature": 0, **ASK}
    with (
        serving(tiny_model, "--api-key", "a-key", "--enable-scale-out") as server,
        nginx(server.url, tmp_path) as url,
        httpx.Client(base_url=url, verify=False, timeout=300, trust_env=False) as client,
    ):
        assert client.get("/health").status_code == 200
        whole = client.post("/v1/completions", json=body, headers=KEY)
        check(*answers_of(whole.json()), 40)
        request = {"json": {**body, "stream": True}, "headers": KEY}
        with client.stream("POST", "/v1/completions", **request) as response:
            check(*answers_of_stream(list(read_events(response.iter_lines()))), 40)
        for path in ("/v1/completions", "/inference/v1/generate", "/invocations"):
            assert client.post(path, json=body).status_code == 401, path
        assert client.get("/routed_experts").status_code == 200
        texts = {"json": {"token_ids": [39]}}  # which the page asks for
        assert client.post("/v1/routed_experts/texts", **texts).status_code == 401
        assert client.post("/v1/routed_experts/texts", **texts, headers=KEY).json() == {
            "texts": ["H"]
        }
        for path in ("/metrics", "/tokenize", "/scale_elastic_ep", "/v1x", "/docs"):
            assert client.get(path, headers=KEY).status_code == 404, path
        with connected(url) as connection:
            for target in CONFUSING[:: len(CONFUSING) // 200]:
                response = get(connection, target, **KEY)
                assert response.status in (200, 301, 307, 400, 404, 405), target
                # as metrics are
                assert not (response.getheader("Content-Type") or "").startswith("text/plain"), (
                    target
                )
        large = client.post(
            "/v1/completions", json={**body, "prompt": "x" * (100 << 20)}, headers=KEY
        )
        assert (large.status_code, large.json()["error"]["type"]) == (400, "BadRequestError"), (
            "not 413 of nginx"
        )


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
