"""The torture test, short, and for thousands of requests in the long run (see `tests.e2e.torture`).

`tests/e2e/test_completions.py` has the profile of asynchronous scheduling, on the server that it
shares.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Cases
from tests.e2e.harness import ASK, Oracle, Server, answer_of, check, one, prompt_of
from tests.e2e.torture import PROFILES, REQUESTS, Torture, serving_profile
from tests.long_runs import times

pytestmark = [pytest.mark.e2e, pytest.mark.release]


@pytest.fixture(scope="module", params=["offload", "ngram"])
def profile(request: pytest.FixtureRequest) -> str:
    profile: str = request.param
    return profile


@pytest.fixture(scope="module")
def engine(
    profile: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with serving_profile(tiny_model, tmp_path_factory.mktemp(profile) / "log", profile) as server:
        yield server


@pytest.mark.long
@pytest.mark.parametrize("load_profile", PROFILES)
def test_torture_by_random_load(
    load_profile: str, tiny_model: Path, tmp_path: Path, cases: Cases
) -> None:
    seed = time.time_ns() % 1_000_000
    print(f"profile {load_profile}, seed {seed}")
    with serving_profile(tiny_model, tmp_path / "log", load_profile) as server:
        torture = Torture(server, Oracle(tiny_model), load_profile, 100 + times(900), seed)
        assert torture.run() == []
    cases.add(torture.counts["requests"])


def test_torture(engine: Server, profile: str, tiny_model: Path) -> None:
    assert Torture(engine, Oracle(tiny_model), profile, REQUESTS).run() == []


@pytest.mark.parametrize("profile", ["ngram"], indirect=True, scope="module")
def test_stop_string_inside_an_accepted_group(engine: Server, oracle: Oracle) -> None:
    """Of n-gram drafts: the rows end with the token that completes the stop string, not with the
    group."""
    cut = 0
    for seed in range(410, 440):
        body = {"prompt": prompt_of(4, seed=seed) * 9, "max_tokens": 150, "ignore_eos": True}
        chunks = engine.stream(**ASK, **body)
        free, end = answer_of(chunks), 0
        check(free, oracle)
        for group in (choice["token_ids"] for chunk in chunks for choice in chunk["choices"]):
            begin, end = end, end + len(group)
            if len(group) < 2 or len(free.text) != len(free.tokens):
                continue
            # The shortest text that ends with the group's first token and is not found before.
            stop = next(
                s
                for k in range(begin, -1, -1)
                if free.text.index(s := free.text[k : begin + 1]) == k
            )
            for ending, reason in (
                ({"stop": [stop]}, "stop"),
                ({"max_tokens": begin + 1}, "length"),
            ):
                answer = one(engine, **{**body, **ending})
                assert (answer.finish_reason, answer.tokens) == (reason, free.tokens[: begin + 1])
                check(answer, oracle)
            cut += 1
            break
        if cut == 3:
            return
    raise AssertionError(f"only {cut} answers ended inside an accepted group")
