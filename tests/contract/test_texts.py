"""page: texts of many token ids in one request, which a proxy that passes /v1 passes too."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from routed_experts.server.cli.tiny_model import make_tokenizer
from routed_experts.server.http.routes import texts
from routed_experts.server.http.routes.texts import MAX_TOKENS, TEXTS_PATH
from tests.contract.served import serving


@pytest.fixture(scope="module")
def client(tiny_model: Path) -> Iterator[httpx.Client]:
    with serving(tiny_model) as server, server.client() as client:
        yield client


def test_texts_are_those_of_the_tokenizer(client: httpx.Client) -> None:
    """page: of every token, in one request, in its order; of repeated ones too."""
    tokenizer = make_tokenizer()
    ids = [*range(len(tokenizer)), 39, 39]
    said = client.post(TEXTS_PATH, json={"token_ids": ids})
    assert said.status_code == 200
    assert said.json() == {"texts": [tokenizer.decode([one]) for one in ids]}
    assert client.post(TEXTS_PATH, json={"token_ids": []}).json() == {"texts": []}


def test_a_space_before_a_word_stays() -> None:
    """page: many tokenizers drop it at the start of a text."""

    class Pieces:
        max_token_id = 2

        def decode(self, ids: Sequence[int]) -> str:
            return "".join(["\u2581Hello", ",", "\u2581\u2581"][one] for one in ids).replace(
                "\u2581", " "
            )[1:]

    assert texts._decode(Pieces(), [0, 1, 0]) == [" Hello", ",", " Hello"]
    assert texts._decode(Pieces(), [3]) == [""], "padding of the model's vocabulary"


WRONG = [
    b"",
    b"no json",
    b"[1]",
    b"{}",
    b'{"token_ids": 1}',
    b'{"token_ids": "1"}',
    b'{"token_ids": [-1]}',
    b'{"token_ids": ["1"]}',
    b'{"token_ids": [1.5]}',
    b'{"token_ids": [true]}',
    b'{"token_ids": [null]}',
    b'{"token_ids": [4000000000]}',
    b'{"token_ids": [1' + b"0" * 5000 + b"]}",
    b'{"token_ids": [1], "return_routed_experts": true}',
    json.dumps({"token_ids": [1] * (MAX_TOKENS + 1)}).encode(),
    json.dumps({"token_ids": ["x"] * 5_000_000}).encode(),
    b'{"token_ids": ' + b"[" * 100_000,
]


def test_wrong_ids_are_refused(client: httpx.Client) -> None:
    """page: with 400, a short sentence and OpenAI's form, however large the body is."""
    for body in WRONG:
        headers = {"Content-Type": "application/json"}
        refused = client.post(TEXTS_PATH, content=body, headers=headers)
        assert refused.status_code == 400, body[:40]
        error = refused.json()["error"]
        assert error["code"] == 400
        assert 0 < len(error["message"]) < 400
    assert client.post(TEXTS_PATH, json={"token_ids": [39]}).json() == {"texts": ["H"]}


def test_the_server_answers_others_meanwhile(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """page: many ids do not hold up the event loop."""
    is_decoding, may_end = Event(), Event()
    decode = texts._decode

    def slowly(tokenizer: Any, ids: Sequence[int]) -> list[str]:
        is_decoding.set()
        assert may_end.wait(60)
        return decode(tokenizer, ids)

    monkeypatch.setattr(texts, "_decode", slowly)
    with ThreadPoolExecutor() as threads:
        request = threads.submit(client.post, TEXTS_PATH, json={"token_ids": [39] * MAX_TOKENS})
        assert is_decoding.wait(60)
        assert client.get("/health").status_code == 200
        may_end.set()
        assert request.result().json() == {"texts": ["H"] * MAX_TOKENS}
