"""Clients that others' generators make of `openapi.yaml`, used against a server: in Python, and in
TypeScript (`generated_client.ts`).

The generators are installed apart, as they need other versions of packages than vLLM.
"""

import importlib
import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from routed_experts.protocol.codec import decode
from tests.contract.engine import K, L
from tests.contract.served import rows_of, serving
from tests.documentation import ROOT
from tests.e2e.harness import COMPLETIONS, Server, prompt_of

pytestmark = pytest.mark.release

PYTHON_GENERATOR = "openapi-python-client==0.29.1"
NODE_PACKAGES = (
    "openapi-typescript@7.13.0",
    "openapi-fetch@0.17.0",
    "typescript@5.9.3",
    "@types/node@20.19.43",
)
TSCONFIG = {
    "compilerOptions": {
        "strict": True,
        "target": "es2022",
        "module": "nodenext",
        "types": ["node"],
        "rewriteRelativeImportExtensions": True,
    },
    "files": ["generated_client.ts"],
}
DESCRIPTION = ROOT / "openapi.yaml"
KEY = "secret"
PROMPT = prompt_of(20, 1)
OPTIONS: dict[str, Any] = {
    "model": "tiny",
    "temperature": 0,
    "max_tokens": 4,
    "return_routed_experts": True,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    with serving(tiny_model, "--api-key", KEY) as server:
        yield server


def run(command: list[str], folder: Path) -> str:
    """What a command prints; where it fails, the test does."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def install(command: list[str], folder: Path) -> None:
    """Skips the tests where there is no index of packages."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"a generator cannot be installed: {done.stderr.strip().splitlines()[-1:]}")


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The package that openapi-python-client makes."""
    folder = tmp_path_factory.mktemp("generator")
    venv.create(folder / "venv", with_pip=True)
    python = str(folder / "venv/bin/python")
    install([python, "-m", "pip", "install", "-q", PYTHON_GENERATOR], folder)
    generate = [str(folder / "venv/bin/openapi-python-client"), "generate", "--meta", "none"]
    said = run([*generate, "--path", str(DESCRIPTION), "--output-path", "generated_client"], folder)
    assert "ERROR" not in said
    assert "Unable to" not in said, said
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("generated_client")
        for name in [name for name in sys.modules if name.startswith("generated_client")]:
            del sys.modules[name]


@pytest.fixture(scope="module")
def client(generated: ModuleType, server: Server) -> Any:
    return generated.AuthenticatedClient(base_url=server.url, token=KEY)


def operation(name: str) -> Any:
    return importlib.import_module(f"generated_client.api.default.{name}")


def models() -> Any:
    return importlib.import_module("generated_client.models")


def complete(client: Any, **fields: Any) -> Any:
    """The answer to a completion: status and what the client made of it."""
    body = models().RoutedCompletionRequest.from_dict({**OPTIONS, "prompt": PROMPT, **fields})
    return operation("create_completion_v1_completions_post").sync_detailed(
        client=client, body=body
    )


def check(prompt: list[int], prompt_rows: Any, rows: Any, tokens: list[int]) -> None:
    """Rows are those that the played model has for these tokens."""
    assert len(tokens) == OPTIONS["max_tokens"]
    assert np.array_equal(prompt_rows, rows_of(prompt))
    assert np.array_equal(rows, rows_of([*prompt, *tokens[:-1]], len(prompt)))


def rows_in(array: Any) -> Any:
    assert isinstance(array, models().RoutedExpertsArray)
    return decode(array.to_dict())


def test_prompts_of_a_completion_have_an_array_each(client: Any) -> None:
    prompts = [prompt_of(5, seed) for seed in range(3)]
    answer = complete(client, prompt=prompts).parsed
    for prompt, array, choice in zip(
        prompts, answer.prompt_routed_experts, answer.choices, strict=True
    ):
        check(prompt, rows_in(array), rows_in(choice.routed_experts), choice.token_ids)


def test_a_chat_in_python(client: Any) -> None:
    message = {"role": "user", "content": "Hi"}
    body = models().RoutedChatRequest.from_dict({**OPTIONS, "messages": [message]})
    answer = operation("create_chat_completion_v1_chat_completions_post").sync(
        client=client, body=body
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    check(
        answer.prompt_token_ids,
        rows_in(answer.prompt_routed_experts),
        rows_in(choice.routed_experts),
        choice.token_ids,
    )


@pytest.mark.parametrize("kind", ["Completion", "Chat", "Generate"])
def test_a_client_sends_only_what_its_user_says(generated: ModuleType, kind: str) -> None:
    said = {
        "Completion": {"prompt": "Hi"},
        "Chat": {"messages": [{"role": "user", "content": "Hi"}]},
        "Generate": {"token_ids": [1], "sampling_params": {"max_tokens": 3}},
    }[kind]
    assert getattr(models(), f"Routed{kind}Request").from_dict(said).to_dict() == said


def chunks_of(client: Any, path: str, body: dict[str, Any], model: Any) -> list[Any]:
    """The events of a stream, each as the schema of a chunk."""
    with client.get_httpx_client().stream("POST", path, json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    *events, done = lines
    assert (response.status_code, done) == (200, "[DONE]")
    return [model.from_dict(json.loads(event)) for event in events]


def test_a_stream_in_python(client: Any) -> None:
    body = {**OPTIONS, "prompt": PROMPT, "stream": True}
    chunks = chunks_of(client, COMPLETIONS, body, models().RoutedCompletionChunk)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    arrays = [rows_in(choice.routed_experts) for choice in choices if choice.routed_experts]
    tokens = [token for choice in choices for token in choice.token_ids]
    check(PROMPT, rows_in(chunks[0].prompt_routed_experts), np.concatenate(arrays), tokens)


def test_a_reference_in_python(client: Any) -> None:
    reference = complete(client, routed_experts_delivery="reference").parsed.prompt_routed_experts
    assert isinstance(reference, models().RoutedExpertsReference)
    rows = operation("stored_rows_v1_routed_experts_rows_id_get").sync(reference.id, client=client)
    array = np.frombuffer(rows.payload.read(), np.int16).reshape(L, len(PROMPT), K)
    assert np.array_equal(array.transpose(1, 0, 2), rows_of(PROMPT))
    deletion = operation("delete_rows_v1_routed_experts_rows_id_delete")
    assert deletion.sync_detailed(reference.id, client=client).status_code == 204
    assert deletion.sync_detailed(reference.id, client=client).parsed.error.code == 410


def test_errors_in_python(generated: ModuleType, client: Any, server: Server) -> None:
    invalid = complete(client, routed_experts_prompt_start=99)
    assert (invalid.status_code, invalid.parsed.error.code) == (400, 400)
    assert invalid.parsed.error.param == "routed_experts_prompt_start"
    unauthorized = complete(generated.Client(base_url=server.url))
    assert (unauthorized.status_code, unauthorized.parsed.error) == (401, "Unauthorized")
    assert complete(client, model="another").parsed.error.code == 404


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`generated_client.ts`, compiled with the types that openapi-typescript makes."""
    if shutil.which("npm") is None:
        pytest.skip("there is no npm")
    folder = tmp_path_factory.mktemp("typescript")
    (folder / "package.json").write_text(json.dumps({"type": "module"}))
    (folder / "tsconfig.json").write_text(json.dumps(TSCONFIG))
    install(
        ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", *NODE_PACKAGES], folder
    )
    run(["npx", "openapi-typescript", str(DESCRIPTION), "-o", "schema.d.ts"], folder)
    shutil.copy(ROOT / "tests/contract/generated_client.ts", folder)
    run(["npx", "tsc", "-p", "."], folder)
    return folder / "generated_client.js"


def test_a_client_in_typescript(compiled: Path, server: Server) -> None:
    said = json.loads(run(["node", str(compiled), server.url, json.dumps(PROMPT)], compiled.parent))
    for answer in said["answers"]:
        prompt_rows, rows = (
            np.array(answer[name]).reshape(-1, L, K) for name in ("prompt_ids", "ids")
        )
        check(answer["prompt"], prompt_rows, rows, answer["tokens"])
    errors = said["errors"]
    assert errors["statuses"] == [400, 401, 404]
    assert (errors["400"], errors["401"]) == ("routed_experts_prompt_start", "Unauthorized")
    assert errors["404"]["code"] == 404
