"""Routing as an input at the HTTP door, with a real engine: the page's commands, scores and bans."""

import copy
import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import ban
from routed_experts.protocol.codec import decode
from routed_experts.protocol.collect import Routing, collect
from routed_experts.protocol.expert_load import count_experts
from routed_experts.protocol.score import score
from tests.contract.served import serving_quickly
from tests.e2e.harness import FLOAT32, ONE_PROCESS, ROOT, Oracle, Server, prompt_of, serving
from tests.e2e.steered import Reference

pytestmark = pytest.mark.e2e

ADDRESS = "localhost:8000"
NOISE = 1e-4
"""Of log-probabilities in float32, between a forward pass of one token and one of all."""
ASK = {"return_routed_experts": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """As `make serve ARGS=--enable-routed-experts-input`, on another port."""
    log = tmp_path_factory.mktemp("input") / "log"
    flags = ("--served-model-name", "tiny-moe", *FLOAT32, "--enable-routed-experts-input")
    memory = ("--kv-cache-memory-bytes", str(64 << 20))
    with serving_quickly(tiny_model, log, *flags, *memory) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def routing(client: OpenAI) -> Routing:
    """An answer of 12 tokens to 40."""
    answer = ask(client, max_tokens=12, logprobs=0)
    (routing,) = collect(answer)
    return routing


def ask(client: OpenAI, prompt: list[int] | None = None, **fields: Any) -> Any:
    of_openai = {name: fields.pop(name) for name in ("logprobs", "n") if name in fields}
    return client.completions.create(
        model="tiny-moe",
        prompt=prompt or prompt_of(40, 1),
        max_tokens=fields.pop("max_tokens", 1),
        temperature=0.0,
        extra_body={**ASK, **fields},
        **of_openai,
    ).model_dump()


def random_rows(server: Server, num_rows: int) -> np.ndarray:
    info = server.info()
    shape = (num_rows, info["num_layers"], info["num_experts"])
    random = np.random.default_rng(0).random(shape)
    return np.argsort(random)[..., : info["top_k"]].astype(np.int16)


def test_the_page_scores_an_answer_again(
    server: Server, documented: list[str], tmp_path: Path
) -> None:
    (program,) = documented
    start, _, program = program.partition("JSON=")
    assert "make serve ARGS=--enable-routed-experts-input" in start
    program = f"set -e\nJSON={program}".replace(ADDRESS, server.url)
    done = subprocess.run(
        ["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    generated, scored = map(json.loads, done.stdout.splitlines())
    assert len(generated) == len(scored) == 8
    assert np.abs(np.subtract(generated, scored)).max() < NOISE


def test_own_rows_change_nothing(client: OpenAI, routing: Routing) -> None:
    """Bit for bit, where both are computed at once."""
    scored = score(client, routing.prompt_token_ids or (), routing.token_ids or (), routing.rows)
    assert np.array_equal(scored.forced, scored.own)
    assert np.abs(scored.own - routing.logprobs).max() < NOISE


def test_other_rows_are_what_a_difference_is_made_of(
    server: Server, client: OpenAI, routing: Routing
) -> None:
    """A response whose rows are random was made by an engine that routes otherwise."""
    prompt, tokens = routing.prompt_token_ids or (), routing.token_ids or ()
    rows = random_rows(server, len(routing.rows))
    forced = score(client, prompt, tokens, rows).forced
    scored = score(client, prompt, tokens, rows)
    split = scored.split(forced)
    assert np.abs(split.whole).max() > 0.01
    assert np.array_equal(split.rest, np.zeros(len(tokens)))
    assert np.array_equal(split.routing, split.whole)


def test_stored_rows(client: OpenAI, routing: Routing) -> None:
    """A reference is sent back as it came."""
    prompt = [*(routing.prompt_token_ids or ())]
    first = ask(client, prompt, max_tokens=12, routed_experts_delivery="reference")
    arrays = [first["prompt_routed_experts"], first["choices"][0]["routed_experts"]]
    whole = [*prompt, *(routing.token_ids or ())]
    own = ask(client, whole, prompt_logprobs=0)
    by_id = ask(client, whole, prompt_logprobs=0, routed_experts_replay=arrays)
    assert by_id["choices"][0]["prompt_logprobs"] == own["choices"][0]["prompt_logprobs"]
    assert np.array_equal(decode(by_id["prompt_routed_experts"])[: len(routing.rows)], routing.rows)


def test_the_page_splits_a_difference(
    client: OpenAI, routing: Routing, documented: list[str]
) -> None:
    (program,) = documented
    names: dict[str, Any] = {"client": client, "routing": routing}
    exec(program, names)
    assert np.array_equal(names["whole"], names["because_of_routing"] + names["rest"])
    assert not names["because_of_routing"].any()


def test_the_study_of_bans_measures_what_transformers_computes(
    server: Server,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without a ban, and without the expert of each layer that the other half of the prompts takes
    most."""
    files = [ROOT / "examples/ban.py", ROOT / "README.md"]
    sizes = ["--prompts", "6", "--characters", "150", "--banned", "1", "--seeds", "2"]
    monkeypatch.setattr(sys, "argv", ["ban", *map(str, files), "--url", server.url, *sizes])
    ban.main()
    lines = [line.split("|") for line in capsys.readouterr().out.splitlines() if "| ban |" in line]
    said = {cells[2].strip(): float(cells[4]) for cells in lines}

    info = server.info()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    prompts = [tokenizer.encode(prompt) for prompt in ban.prompts_of(files[0], 6, 150)]
    reference = Reference(tiny_model, info["layer_ids"])
    oracle = Oracle(tiny_model)
    rows = np.concatenate([oracle.rows(prompt) for prompt in prompts[1::2]])
    no_bias = np.zeros((info["num_layers"], info["num_experts"]), np.float32)
    ban_of_busiest = no_bias.copy()
    busiest = count_experts(rows, info["num_experts"]).argmax(axis=1)
    ban_of_busiest[range(len(busiest)), busiest] = -np.inf
    for name, bias in {"nothing": no_bias, "top 1": ban_of_busiest}.items():
        logprobs = [reference.logprobs_with_bias(prompt, bias) for prompt in prompts[::2]]
        expected = np.exp(-np.concatenate(logprobs).mean())
        assert said[name] == pytest.approx(expected, rel=1e-3)


def cut_out(model: Path, banned: list[list[int]], folder: Path) -> Reference:
    """transformers with a checkpoint of the same model without an expert of each layer."""
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = copy.deepcopy(whole.config)
    config.num_experts -= 1
    weights = whole.state_dict()
    for layer, expert in banned:
        of_experts = [name for name in weights if f".layers.{layer}.mlp." in name]
        for name in of_experts:
            assert len(weights[name]) == whole.config.num_experts
            weights[name] = torch.cat([weights[name][:expert], weights[name][expert + 1 :]])
    pruned = AutoModelForCausalLM.from_config(config)
    pruned.load_state_dict(weights)
    pruned.save_pretrained(folder)
    return Reference(folder, [layer for layer, _ in banned])


def test_a_mask_of_a_server_is_a_checkpoint_without_its_experts(
    tiny_model: Path, documented: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a client that says nothing of it: OpenAI's, which asks as evaluation harnesses do."""
    monkeypatch.chdir(tmp_path)
    (program,) = documented
    make_mask, serve, *_, ask_info, show = program.splitlines()
    assert serve.startswith("make serve ARGS=")
    flags = serve.split('"')[1].split()
    subprocess.run(["bash", "-c", make_mask], check=True)
    banned = json.loads(Path("mask.json").read_text())["routed_experts_deactivate"]
    small = ("--kv-cache-memory-bytes", str(64 << 20))
    with serving(tiny_model, tmp_path / "log", *FLOAT32, *ONE_PROCESS, *small, *flags) as masked:
        said = f"{ask_info}\n{show}".replace(ADDRESS, masked.url)
        shown = subprocess.check_output(["bash", "-c", said], text=True)
        assert json.loads(shown) == {"routed_experts_deactivate": banned}
        openai = OpenAI(base_url=f"{masked.url}/v1", api_key="none", max_retries=0)
        prompts = [prompt_of(length, length) for length in (1, 17, 60)]
        harness: dict[str, Any] = {"echo": True, "logprobs": 1, "temperature": 0.0, "seed": 1234}
        before = masked.profile()["counts"]
        answer = openai.completions.create(model="tiny", prompt=prompts, max_tokens=8, **harness)
        beams = {"use_beam_search": True}
        openai.completions.create(model="tiny", prompt=[1, 2], n=2, max_tokens=4, extra_body=beams)
        scored = {"query": [1, 2], "items": [[3], [4]], "label_token_ids": [5, 6]}
        masked.post("/generative_scoring", {"model": "tiny", **scored})
        counts = masked.profile()["counts"] - before
        layer_ids = masked.info()["layer_ids"]
    assert (counts.sum(axis=1) >= 4 * (sum(map(len, prompts)) + 3 * 7 + 5 + 6)).all()
    assert [counts[layer_ids.index(layer), expert] for layer, expert in banned] == [0] * 5
    pruned = cut_out(tiny_model, banned, tmp_path / "pruned")
    unpruned = Reference(tiny_model, [])
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        assert choice.logprobs is not None
        generated = choice.logprobs.tokens[len(prompt) :]
        tokens = [*prompt, *tokenizer.convert_tokens_to_ids(generated)]
        logprobs = np.array(choice.logprobs.token_logprobs[1:], float)
        assert np.abs(logprobs - pruned.logprobs(tokens)).max() < 2e-5
        assert np.abs(logprobs - unpruned.logprobs(tokens)).max() > 0.01


@pytest.mark.long
def test_the_small_model_learns_from_texts_what_holds_for_others(tmp_path: Path) -> None:
    """In 40 of its steps. Chance gives each of the 1,024 tokens the same probability."""
    script = ROOT / "examples/train_small_moe.py"
    subprocess.run([sys.executable, str(script), str(tmp_path), "--steps", "40"], check=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    reference = Reference(tmp_path, range(4))
    by_chance = -np.log(len(tokenizer))
    for name in ("code.txt", "prose.txt"):
        tokens = tokenizer.encode((tmp_path / name).read_text()[:2000])
        assert reference.logprobs(tokens).mean() > by_chance + 0.3


@pytest.mark.parametrize("name", ["score", "steer"])
def test_examples(
    server: Server, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--url", server.url])
    if name == "score":
        sys.argv += ["--other", server.url]
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    if name == "score":
        assert "because of other experts:   0.00e+00" in said
    else:
        before, after = (json.loads(line[line.index("[") :]) for line in said.splitlines()[-2:])
        banned = int(np.argmax(before))
        assert before[banned] > 0
        assert after[banned] == 0
