"""`routed-experts export` from a running server, and its files in vLLM's own code."""

import json
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from routed_experts.server.cli.main import main
from routed_experts.server.http.routes.texts import TEXTS_PATH
from routed_experts.server.tools import running
from routed_experts.server.tools.running import RunningServer
from tests.contract.engine import NUM_EXPERTS, K, L, weights_for
from tests.contract.served import LAYER_IDS, rows_of, serving
from tests.e2e.harness import Server

CHAT = {
    "messages": [{"role": "user", "content": "Which experts?"}],
    "max_tokens": 5,
    "n": 2,
    "seed": 1,
}
LINES = [
    "def f(x):",
    {"prompt": [40, 50, 60], "max_tokens": 9, "routed_experts_format": "raw"},
    CHAT,
]


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    default = {
        "return_routed_experts": True,
        "routed_experts_delivery": "reference",
        "routed_experts_layout": "joined",
    }
    flags = (
        "--enable-return-routed-expert-weights",
        "--routed-experts-default",
        json.dumps(default),
    )
    with serving(tiny_model, *flags) as server:
        yield server


def exported(server: Server, folder: Path, prompts: str, name: str, *flags: str) -> Path:
    prompts_of = ["--url", server.url, "--prompts", str(folder / prompts), "--max-tokens", "4"]
    assert main(["export", *prompts_of, "-o", str(folder / name), *flags]) == 0
    return folder / name


def table_of(server: Server, folder: Path, prompts: str) -> list[dict[str, Any]]:
    table = pq.read_table(exported(server, folder, prompts, "out.parquet"))
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def check_choice(arrays: dict[str, np.ndarray], request: int, choice: int, generated: int) -> None:
    """Its rows, behind those of its prompt, which stand with the first choice, are its tokens'."""
    of_request = arrays["request"] == request
    prompt = of_request & (arrays["is_prompt"] == 1)
    own = of_request & (arrays["choice"] == choice) & (arrays["is_prompt"] == 0)
    assert arrays["choice"][prompt].max() == 0
    assert own.sum() == generated
    sequence = np.flatnonzero(prompt | own)
    assert arrays["position"][sequence].tolist() == list(range(len(sequence)))
    tokens = arrays["token_id"][sequence].tolist()
    assert np.array_equal(arrays["experts"][sequence], rows_of(tokens))


def test_rows_weights_and_texts(server: Server, tmp_path: Path, tiny_model: Path) -> None:
    """Of prompts, token ids and a chat with two choices, whatever form the server returns by
    default."""
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, LINES)))
    with np.load(exported(server, tmp_path, "prompts.jsonl", "out.npz", "--weights")) as archive:
        arrays = dict(archive)
    assert arrays["layer_ids"].tolist() == LAYER_IDS
    assert int(arrays["num_experts"]) == NUM_EXPERTS
    check_choice(arrays, request=0, choice=0, generated=3)
    check_choice(arrays, request=1, choice=0, generated=8)
    check_choice(arrays, request=2, choice=0, generated=4)
    check_choice(arrays, request=2, choice=1, generated=4)
    assert set(zip(arrays["request"].tolist(), arrays["choice"].tolist(), strict=True)) == {
        (0, 0),
        (1, 0),
        (2, 0),
        (2, 1),
    }
    assert np.array_equal(
        arrays["weights"].view(np.int32), weights_for(arrays["experts"]).view(np.int32)
    )
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    texts = {row["token_id"]: row["token"] for row in table_of(server, tmp_path, "prompts.jsonl")}
    assert texts == {token: tokenizer.decode([token]) for token in texts}


def test_texts_come_with_one_request_for_many(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """page: below /v1, which every proxy passes; and no id is asked for twice."""
    requests: list[tuple[str, Any]] = []
    call = RunningServer._call

    def noted(self: RunningServer, path: str, body: Any = None, where: str = "") -> dict[str, Any]:
        requests.append((path, body))
        return call(self, path, body, where)

    monkeypatch.setattr(RunningServer, "_call", noted)
    monkeypatch.setattr(running, "TEXTS_AT_ONCE", 20)
    (tmp_path / "prompts.txt").write_text(f"{''.join(map(chr, range(33, 100)))}\nExperts\n")
    assert all(row["token"] for row in table_of(server, tmp_path, "prompts.txt"))
    assert {path for path, _ in requests if not path.startswith("/v1/")} == set()
    ids = [body["token_ids"] for path, body in requests if path == "/v1/routed_experts/texts"]
    assert 4 <= len(ids) <= 6
    assert max(Counter(chain.from_iterable(ids)).values()) == 1


def test_a_server_without_texts_and_weights(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows are there all the same."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": [40, 50, 60]}')
    with serving(tiny_model, "--skip-tokenizer-init") as server:
        rows = table_of(server, tmp_path, "prompts.jsonl")
        with server.client() as client:
            texts = client.post(TEXTS_PATH, json={"token_ids": [1]})
        prompts = ["--url", server.url, "--prompts", str(tmp_path / "prompts.jsonl")]
        assert main(["export", *prompts, "--weights", "-o", str(tmp_path / "none.npz")]) == 2
    assert {row["token"] for row in rows} == {None}
    assert (texts.status_code, texts.json()["error"]["code"]) == (501, 501)
    assert "no tokenizer" in texts.json()["error"]["message"]
    words = "start it with --enable-return-routed-expert-weights, or leave out --weights."
    assert f"captures no weights: {words}" in capsys.readouterr().err


def test_plain_prompts_and_a_server_that_refuses_one(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text('{"prompt": 1}\n\n"Quoted", he said.\n')
    with np.load(exported(server, tmp_path, "prompts.txt", "out.npz")) as archive:
        assert "2 responses" in capsys.readouterr().out
        assert archive["experts"].shape[1:] == (L, K)
    for line, sentence in [
        ('{"prompt": "a", "max_tokens": 0}', "wrong.jsonl, line 1: the server returned status 400"),
        ("[1]", "line 1 is not a prompt: write a string, or an object with a prompt or messages."),
        ("{]", "line 1 is not valid JSON"),
    ]:
        (tmp_path / "wrong.jsonl").write_text(line)
        command = ["export", "--url", server.url, "--prompts", str(tmp_path / "wrong.jsonl")]
        assert main([*command, "-o", str(tmp_path / "none.npz")]) == 2
        assert sentence in capsys.readouterr().err
    assert not (tmp_path / "none.npz").exists()


def test_folders_of_prompts(server: Server, tmp_path: Path) -> None:
    """Each row says which file and folder its prompt came from."""
    for name, text in {
        "code/a.txt": "def f(x):",
        "code/b.jsonl": '"x = 1"',
        "code/notes.md": "no prompt",
        "prose/a.txt": "Once upon a time",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    folders = [str(tmp_path / folder) for folder in ("code", "prose")]
    out = tmp_path / "out.parquet"
    prompts = ["--url", server.url, "--prompts", *folders, "--max-tokens", "2"]
    assert main(["export", *prompts, "-o", str(out)]) == 0
    rows = pq.read_table(out).to_pylist()
    names = [("code/a.txt", "code"), ("code/b.jsonl", "code"), ("prose/a.txt", "prose")]
    places = dict.fromkeys((row["source"], row["group"]) for row in rows)
    assert [*places] == [(str(tmp_path / source), str(tmp_path / group)) for source, group in names]
    assert all(row["token"] for row in rows)
