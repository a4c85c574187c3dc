"""`vllm serve MODEL --enable-return-routed-experts`, vLLM's own command, with this package
installed."""

import base64
import io
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.envs import disable_envs_cache

from routed_experts.server.inprocess.engine_hooks import _beam_search_online
from routed_experts.server.outputs.array_store import StoreError
from routed_experts.server.settings import SettingsError
from tests.contract.served import DECODER_LAYERS, every_layer_of, rows_of, serving, vllms
from tests.e2e.harness import Server, prompt_of

OVERRIDES = json.dumps({"num_experts": 1 << 15, "num_hidden_layers": DECODER_LAYERS})
MESSAGES = [{"role": "user", "content": "Which experts?"}]


@contextmanager
def stock(model: Path, plugins: str, *flags: str) -> Iterator[Server]:
    """vLLM's command with these plugins named."""
    disable_envs_cache()  # what the engine of a server before keeps
    flags = (
        "--enable-return-routed-experts",
        "--enable-scale-out",
        "--hf-overrides",
        OVERRIDES,
        *flags,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", plugins)
        with serving(model, *flags, command=vllms) as server:
            yield server


@pytest.fixture(scope="module")
def extended(tiny_model: Path) -> Iterator[Server]:
    """The whole HTTP contract."""
    with stock(tiny_model, "another,routed_experts") as server:
        yield server


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Iterator[Server]:
    """vLLM's own routes, with arrays from this capture."""
    with stock(tiny_model, "") as server:
        yield server


def npy(text: str) -> Any:
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


def check_vllms(choice: dict[str, Any], tokens: list[int], start: int) -> int:
    """The rows of `tokens` but the last, in vLLM's own form; gives how many there are."""
    rows = npy(choice["routed_experts"])
    assert rows.dtype == np.uint16
    assert np.array_equal(rows, every_layer_of(tokens[:-1], start))
    return len(rows)


def generate(server: Server, prompt: list[int], start: int = 0, **body: Any) -> dict[str, Any]:
    sampling = {"max_tokens": 7, "n": 2, "temperature": 1.0, "routed_experts_prompt_start": start}
    return server._post(
        "/inference/v1/generate", {"token_ids": prompt, "sampling_params": sampling, **body}
    )


@pytest.mark.parametrize("start", [0, 17, 30])
@pytest.mark.parametrize("plugins", ["extended", "plain"])
def test_vllms_own_endpoint(request: pytest.FixtureRequest, plugins: str, start: int) -> None:
    """The answer in vLLM's own form, which its own way of asking gets, whole and streamed."""
    server: Server = request.getfixturevalue(plugins)
    prompt = prompt_of(30, 6)  # whose rows fit one line
    whole = generate(server, prompt, start)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    for choice in whole["choices"]:
        check_vllms(choice, [*prompt, *choice["token_ids"]], start)
    params = {"max_tokens": 7, "routed_experts_prompt_start": start}
    tokens, end = list(prompt), start
    for chunk in server.stream("/inference/v1/generate", token_ids=prompt, sampling_params=params):
        (choice,) = chunk["choices"]
        tokens += choice["token_ids"]
        end += check_vllms(choice, tokens, end)
    assert (len(tokens), end) == (37, 36)


# ---- with the endpoint plugin named ----


def test_requests_that_do_not_ask_get_nothing(extended: Server) -> None:
    """And may be searched with beams: the executor has no log probabilities, so vLLM's search fails
    later."""
    body = {"prompt": prompt_of(10, 1), "max_tokens": 3}
    answers = [
        extended.complete(**body),
        extended.chat(messages=MESSAGES, max_tokens=3),
        *extended.stream(**body),
    ]
    answers.append(generate(extended, prompt_of(20, 3), return_routed_experts=False))
    assert "routed" not in json.dumps(answers).replace('"routed_experts": null', "")
    with extended.client() as client:
        response = client.post(
            "/v1/completions", json={"model": "tiny", **body, "use_beam_search": True, "n": 2}
        )
    assert response.status_code != 400, response.text


def settings(**keys: Any) -> tuple[str, str]:
    return "--additional-config", json.dumps(keys)


def test_settings_come_as_programs_give_them(tiny_model: Path, tmp_path: Path) -> None:
    folder, fields = (
        tmp_path / "store",
        {"return_routed_experts": True, "routed_experts_delivery": "reference"},
    )
    settings_given = {
        "routed_experts_store": str(folder),
        "routed_experts_store_bytes": 100_000,
        "routed_experts_page": False,
    }
    settings_given |= {"routed_experts_store_seconds": 50, "routed_experts_store_paths": True}
    settings_given |= {"routed_experts_record": str(tmp_path / "record")}
    with (
        stock(tiny_model, "routed_experts", *settings(**settings_given)) as server,
        server.client() as client,
    ):
        assert client.get("/routed_experts").status_code == 404
        began = time.time()
        answer = server.complete(
            prompt=prompt_of(9, 3), max_tokens=3, return_token_ids=True, **fields
        )
        reference = answer["choices"][0]["routed_experts"]
        now = time.time()
        assert began + 49 < reference["expires"] < now + 51
        assert Path(reference["path"]).parents[1] == folder
        rows = rows_of(
            [*answer["choices"][0]["prompt_token_ids"], *answer["choices"][0]["token_ids"]][:-1]
        )
        assert np.array_equal(np.load(reference["path"]), rows[9:].swapaxes(0, 1))
        body = {"model": "tiny", "prompt": prompt_of(900, 3), "max_tokens": 3, **fields}
        long = client.post("/v1/completions", json=body).json()
        assert "data" in long["prompt_routed_experts"]  # more than the store has room for
    assert folder.exists()
    assert [*(tmp_path / "record").glob("*.jsonl")]


@pytest.mark.parametrize(
    ("wrong_settings", "error", "message"),
    [  # the last one, only the model shows
        ({"routed_experts_store": __file__}, StoreError, "test_stock_serve"),
        (
            {"routed_experts_default": {"routed_experts_dtype": "uint8"}},
            SettingsError,
            "routed_experts_default: .*uint8",
        ),
    ],
)
def test_settings_that_cannot_be(
    tiny_model: Path, wrong_settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with (
        pytest.raises(error, match=message),
        stock(tiny_model, "routed_experts", *settings(**wrong_settings)),
    ):
        pass


# ---- without ----


def test_vllms_own_routes(plain: Server) -> None:
    with plain.client() as client:
        assert client.get("/v1/routed_experts").status_code == 404
    prompt = prompt_of(20, 3)
    for choice in plain.complete(
        prompt=prompt, max_tokens=4, n=2, temperature=1.0, return_token_ids=True
    )["choices"]:
        check_vllms(choice, [*prompt, *choice["token_ids"]], 0)


def test_beam_search_is_refused(plain: Server) -> None:
    """Its beams are put together from the answers of others, without their rows."""
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
    ):
        with plain.client() as client:
            request = {"model": "tiny", "max_tokens": 3, "use_beam_search": True, "n": 2, **body}
            response = client.post(path, json=request)
        assert response.status_code == 400, response.text
        assert "cannot be returned with beam search" in response.json()["error"]["message"]


def test_beam_search_on_a_programs_own_engine_client() -> None:
    """Which has no configuration to look at, or one of its own."""
    serving = SimpleNamespace(engine_client=object())
    assert _beam_search_online(lambda serving: "searched", serving) == "searched"
