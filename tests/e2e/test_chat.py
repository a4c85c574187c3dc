"""Chat completions on a real engine: roles, tools and parsers between the tokens and the chunks."""

from typing import Any

import numpy as np
import pytest

from tests.e2e.harness import ASK, Answer, Oracle, Server, answers_of, answers_of_stream, check, decode, same

pytestmark = pytest.mark.e2e

PATH = "/v1/chat/completions"
USER: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me something about experts."}]}
TOOL = {
    "type": "function",
    "function": {
        "name": "pick",
        "description": "Picks one.",
        "parameters": {
            "type": "object",
            "properties": {"which": {"type": "string", "enum": ["first", "second", "third"]}},
            "required": ["which"],
            "additionalProperties": False,
        },
    },
}
TOOL_CHOICES: dict[str, Any] = {
    "auto": "auto",
    "required": "required",
    "named": {"type": "function", "function": {"name": "pick"}},
}


def one(server: Server, start: int = 0, **body: Any) -> Answer:
    """The single choice of a request, asked for both ways, which must agree bit for bit."""
    if start:
        body["routed_experts_prompt_start"] = start
    (unstreamed,) = answers_of(server.chat(**ASK, **body), start)
    (streamed,) = answers_of_stream(server.stream(PATH, **ASK, **body), start)
    same(unstreamed, streamed)
    return unstreamed


def test_streamed_and_not(server: Server, oracle: Oracle) -> None:
    check(one(server, **USER, max_tokens=16, ignore_eos=True), oracle)


def test_the_role_comes_first_with_the_prompts_rows(server: Server) -> None:
    first, second, *_ = server.stream(PATH, **USER, max_tokens=4, ignore_eos=True, **ASK)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert decode(first["prompt_routed_experts"]).shape[0] > 0
    assert "routed_experts" not in first["choices"][0]
    assert "prompt_routed_experts" not in second
    (choice,) = second["choices"]  # of one token, which has not been in a forward pass; of more, if outputs merged
    assert choice.get("routed_experts", {"shape": [0]})["shape"][0] == len(choice["token_ids"]) - 1


def test_one_new_token(server: Server, oracle: Oracle) -> None:
    answer = one(server, **USER, max_completion_tokens=1)
    assert answer.rows.shape == (0, 5, 4)
    check(answer, oracle)


def test_the_next_turn_asks_for_what_is_new(server: Server, oracle: Oracle) -> None:
    first = one(server, **USER, max_tokens=12, ignore_eos=True)
    messages = [*USER["messages"], {"role": "assistant", "content": first.text}, {"role": "user", "content": "More."}]
    start = len(first.prompt) + len(first.tokens) - 1
    second = one(server, start, messages=messages, max_tokens=6, ignore_eos=True)
    assert second.prompt[:start] == [*first.prompt, *first.tokens[:-1]]
    assert len(second.prompt_rows) == len(second.prompt) - start
    check(second, oracle)
    whole = one(server, messages=messages, max_tokens=6, ignore_eos=True)
    assert np.array_equal(whole.prompt_rows[:start], np.concatenate([first.prompt_rows, first.rows]))


def test_prompt_start_at_the_end_of_the_prompt(server: Server, oracle: Oracle) -> None:
    length = len(one(server, **USER, max_tokens=1).prompt)
    check(one(server, length, **USER, max_tokens=5, ignore_eos=True), oracle)


def test_several_choices(server: Server, oracle: Oracle) -> None:
    body = {**USER, "max_tokens": 12, "n": 2, "temperature": 1.0}
    unstreamed = answers_of(server.chat(**ASK, **body))
    chunks = server.stream(PATH, **ASK, **body)
    streamed = answers_of_stream(chunks, per_prompt=2)
    assert len(unstreamed) == len(streamed) == 2
    for answer in (*unstreamed, *streamed):
        check(answer, oracle)
    assert ["prompt_routed_experts" in chunk for chunk in chunks].index(True) == 0
    assert sum("prompt_routed_experts" in chunk for chunk in chunks) == 1


@pytest.mark.parametrize("n", [1, 2])
def test_echo_of_a_message_that_is_continued(server: Server, oracle: Oracle, n: int) -> None:
    """The stream has a second chunk for each choice before the first token: the message so far."""
    body: dict[str, Any] = {
        "messages": [*USER["messages"], {"role": "assistant", "content": "Well, "}],
        "echo": True,
        "add_generation_prompt": False,
        "max_tokens": 6,
        "n": n,
        "ignore_eos": True,
        "temperature": 1.0 if n > 1 else 0.0,
    }
    unstreamed = answers_of(server.chat(**ASK, **body))
    streamed = answers_of_stream(server.stream(PATH, **ASK, **body), per_prompt=n)
    for answer in (*unstreamed, *streamed):
        assert answer.text.startswith("Well, ")
        check(answer, oracle)
    if n == 1:
        same(unstreamed[0], streamed[0])


def test_continued_without_echo(server: Server, oracle: Oracle) -> None:
    messages = [*USER["messages"], {"role": "assistant", "content": "Well, "}]
    check(one(server, messages=messages, add_generation_prompt=False, max_tokens=6, ignore_eos=True), oracle)


@pytest.mark.parametrize("choice", TOOL_CHOICES)
def test_tools(server: Server, oracle: Oracle, choice: str) -> None:
    """With the tokens asked for, vLLM sends a chunk for each, whatever its parser holds back."""
    body = {**USER, "tools": [TOOL], "tool_choice": TOOL_CHOICES[choice], "max_tokens": 80}
    (unstreamed,) = answers_of(server.chat(**ASK, **body))
    (streamed,) = answers_of_stream(server.stream(PATH, **ASK, **body))
    for answer in (unstreamed, streamed):
        check(answer, oracle)
    assert unstreamed.tokens == streamed.tokens
    assert np.array_equal(unstreamed.rows, streamed.rows)
    assert np.array_equal(unstreamed.prompt_rows, streamed.prompt_rows)


@pytest.mark.parametrize("choice", TOOL_CHOICES)
def test_tools_with_chunks_held_back(server: Server, choice: str) -> None:
    """Without the tokens, a parser that waits for more text sends nothing: the rows come with its next chunk."""
    body = {**USER, "tools": [TOOL], "tool_choice": TOOL_CHOICES[choice], "max_tokens": 80}
    unstreamed = server.chat(**body, return_routed_experts=True)
    chunks = server.stream(PATH, **body, return_routed_experts=True)
    assert chunks[0]["prompt_routed_experts"] == unstreamed["prompt_routed_experts"]
    assert not any("prompt_routed_experts" in chunk for chunk in chunks[1:])
    arrays = [each for chunk in chunks if (each := chunk["choices"][0].get("routed_experts"))]
    whole = unstreamed["choices"][0]["routed_experts"]
    assert np.array_equal(np.concatenate([decode(array) for array in arrays]), decode(whole))
    ends = [array["start"] + array["shape"][0] for array in arrays]
    assert [array["start"] for array in arrays] == [whole["start"], *ends[:-1]]
    if choice != "auto":
        assert max(array["shape"][0] for array in arrays) > 1, "nothing was held back"
        assert any(chunk["choices"][0]["delta"].get("tool_calls") for chunk in chunks)


@pytest.mark.parametrize("choice", TOOL_CHOICES)
def test_tools_with_and_without_routing(server: Server, choice: str) -> None:
    """The answers are the same but for the rows; how many tokens a chunk has depends on the reader."""
    body = {**USER, "tools": [TOOL], "tool_choice": TOOL_CHOICES[choice], "max_tokens": 40}

    def said(chunks: list[dict[str, Any]]) -> tuple[str, list[str], list[str]]:
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or []]
        return (
            "".join(delta.get("content") or "" for delta in deltas),
            ["".join(call.get(part) or "" for call in calls) for part in ("name", "arguments")],
            [reason for chunk in chunks if (reason := chunk["choices"][0]["finish_reason"])],
        )

    plain = server.stream(PATH, **body)
    routed = server.stream(PATH, **body, return_routed_experts=True)
    assert said(plain) == said(routed)
    assert "routed_experts" not in repr(plain)


@pytest.mark.parametrize(
    "constraint",
    [
        {"structured_outputs": {"choice": ["first", "second"]}},
        {"structured_outputs": {"regex": "[ab]{6}"}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"enum": ["b"]}}}},
            }
        },
    ],
    ids=["choice", "regex", "json_schema"],
)
def test_structured_output(server: Server, oracle: Oracle, constraint: dict[str, Any]) -> None:
    check(one(server, **USER, **constraint, max_tokens=24), oracle)


def test_logprobs(server: Server, oracle: Oracle) -> None:
    body = {**USER, "max_tokens": 8, "ignore_eos": True, "logprobs": True, "top_logprobs": 2}
    plain = server.chat(**body)["choices"][0]["logprobs"]
    response = server.chat(**ASK, **body)
    chunks = server.stream(PATH, **ASK, **body)
    assert response["choices"][0]["logprobs"] == plain
    streamed = [entry for chunk in chunks for entry in (chunk["choices"][0].get("logprobs") or {}).get("content", [])]
    assert streamed == plain["content"]
    check(answers_of(response)[0], oracle)
    same(answers_of(response)[0], answers_of_stream(chunks)[0])


def test_usage_chunks(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = server.stream(
        PATH, **USER, max_tokens=4, ignore_eos=True, stream_options=options, return_routed_experts=True
    )
    *rest, last = chunks
    assert last["choices"] == []
    assert "prompt_routed_experts" not in last
    rows = 0
    for chunk in rest:
        rows += chunk["choices"][0].get("routed_experts", {"shape": [0]})["shape"][0]
        assert rows == max(chunk["usage"]["completion_tokens"] - 1, 0)
    assert last["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("interval", [3, 100])
def test_stream_interval(server: Server, oracle: Oracle, interval: int) -> None:
    body = {**USER, "max_tokens": 11, "ignore_eos": True}
    (answer,) = answers_of_stream(server.stream(PATH, **ASK, **body, stream_interval=interval))
    same(answer, one(server, **body))
    check(answer, oracle)


def test_joined_layout(server: Server) -> None:
    body = {**USER, "max_tokens": 6, "ignore_eos": True, "return_routed_experts": True}
    split = server.chat(**body)
    rows = np.concatenate([decode(split["prompt_routed_experts"]), decode(split["choices"][0]["routed_experts"])])
    joined = server.chat(**body, routed_experts_layout="joined")
    assert "prompt_routed_experts" not in joined
    assert np.array_equal(decode(joined["choices"][0]["routed_experts"]), rows)
    chunks = server.stream(PATH, **body, routed_experts_layout="joined")
    assert not any("prompt_routed_experts" in chunk for chunk in chunks)
    arrays = [each for chunk in chunks if (each := chunk["choices"][0].get("routed_experts"))]
    assert np.array_equal(np.concatenate([decode(array) for array in arrays]), rows)


def test_same_answer_with_and_without_routing(server: Server) -> None:
    body = {**USER, "max_tokens": 12}
    plain, routed = server.chat(**body), server.chat(**body, return_routed_experts=True)
    assert "prompt_routed_experts" not in plain
    assert "routed_experts" not in plain["choices"][0]
    del routed["prompt_routed_experts"], routed["choices"][0]["routed_experts"]
    for answer in (plain, routed):
        del answer["id"], answer["created"]
    assert plain == routed
