"""Prompts with images on a real engine: every row against a Hugging Face forward pass, or the
routers' own scores."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL.Image import Image

from routed_experts.server.http.seams import HAS_SCALE_OUT_FLAG
from tests.e2e.harness import (
    ASK,
    CHAT,
    FLOAT32,
    ONE_PROCESS,
    Answer,
    Server,
    answer_of,
    answers_of,
    answers_of_stream,
    cached_tokens,
    check,
    decode,
    one,
    rows_of,
    same,
    serving,
)
from tests.e2e.images import (
    SHAPE,
    WITH_TORCHVISION,
    VisionOracle,
    make_image,
    make_vision_model,
    needs_torchvision,
    turn,
)
from tests.gpu.test_scores import run_in_little_space

pytestmark = [pytest.mark.e2e, pytest.mark.release, needs_torchvision]

GENERATE = "/inference/v1/generate"
BLOCK, CHUNK = 32, 64
FLAGS = (
    *FLOAT32,
    "--kv-cache-memory-bytes",
    str(16 << 20),
    "--max-model-len",
    "1024",
    "--block-size",
    str(BLOCK),
)
FLAGS += (
    "--max-num-batched-tokens",
    str(CHUNK),
    "--max-num-seqs",
    "8",
    "--enable-prompt-tokens-details",
)
FLAGS += ("--limit-mm-per-prompt", '{"image": 3, "video": 0}', *ONE_PROCESS)
FLAGS += ("--enable-scale-out",) if HAS_SCALE_OUT_FLAG else ()
LARGE = 100
"""Tokens of an image that takes more than a chunk."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vision") / "model"
    make_vision_model(directory)
    return directory


@pytest.fixture(scope="module")
def vision(model: Path) -> VisionOracle:
    return VisionOracle(model)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(
        model, tmp_path_factory.mktemp("server") / "log", *FLAGS, env=WITH_TORCHVISION
    ) as running:
        yield running


def body_of(*messages: dict[str, Any], max_tokens: int = 9, **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), "max_tokens": max_tokens, "ignore_eos": True, **more}


def exact(answer: Answer, vision: VisionOracle, *images: Image) -> Answer:
    vision.show(*images)
    check(answer, vision)
    return answer


def large(seed: int) -> Image:
    return make_image(seed, LARGE // 10, 10)


def test_layers(server: Server) -> None:
    """Those of the decoder, of which the first is dense: there are none of the vision tower."""
    assert server.info()["layer_ids"] == list(SHAPE.layer_ids)
    rows = server.chat(**ASK, **body_of(turn(make_image(0))), routed_experts_layers="all")[
        "prompt_routed_experts"
    ]
    assert rows["shape"][1] == 1 + len(SHAPE.layer_ids)
    assert (decode(rows)[:, 0] == 0).all()


def test_an_image_in_several_chunks_and_its_prefix_hits(
    server: Server, vision: VisionOracle
) -> None:
    """The rows of a hit are those of the same image, and another image's equal placeholders are no
    hit."""
    first, other = large(1), large(2)
    body = body_of(turn("Look: ", first, " What is it?"))
    cold = server.chat(**ASK, **body)
    (answer,) = answers_of(cold)
    exact(answer, vision, first)
    pad = vision.model.config.image_token_id
    assert answer.prompt.count(pad) == LARGE
    assert len(answer.prompt) == cold["usage"]["prompt_tokens"] > 2 * CHUNK - 1
    assert cached_tokens(cold) == 0
    warm = server.chat(**ASK, **body)
    assert (
        cached_tokens(warm)
        == (len(answer.prompt) - 1) // BLOCK * BLOCK
        > answer.prompt.index(pad) + LARGE
    )
    same(answer_of(warm), answer)
    same(answer_of(server.stream(CHAT, **ASK, **body)), answer)
    changed = server.chat(**ASK, **body_of(turn("Look: ", other, " What is it?")))
    assert cached_tokens(changed) < answer.prompt.index(pad) + BLOCK
    unlike = exact(answer_of(changed), vision, other)
    assert unlike.prompt == answer.prompt
    assert not np.array_equal(unlike.prompt_rows, answer.prompt_rows)


def test_turns_with_several_images_and_choices(server: Server, vision: VisionOracle) -> None:
    images = [large(4), make_image(5), make_image(6, 3, 2)]
    first = turn("One ", images[0], " two ", images[1])
    begun = exact(one(server, path=CHAT, **body_of(first)), vision, *images[:2])
    said = {"role": "assistant", "content": begun.text}
    body = body_of(first, said, turn("three ", images[2]), max_tokens=30, n=2, temperature=1.0)
    chunks = server.stream(CHAT, **ASK, **body)
    whole = server.chat(**ASK, **body)
    assert cached_tokens(whole) > LARGE
    for answers in (answers_of_stream(chunks, per_prompt=2), answers_of(whole)):
        assert len(answers) == 2
        for answer in answers:
            exact(answer, vision, *images)


def test_rendered_prompts(server: Server, vision: VisionOracle) -> None:
    """`features` and `content_parts` of the endpoint for token ids."""
    shown = large(11)
    message = turn("Look: ", shown, "?")
    expected = one(server, path=CHAT, **body_of(message))
    forms = {
        "routed_experts_format": "object",
        "routed_experts_layout": "split",
        "routed_experts_layers": "moe",
    }
    params = {"max_tokens": 9, "ignore_eos": True, "temperature": 0}
    rendered = server.post("/v1/chat/completions/render", {"model": "tiny", **body_of(message)})
    assert rendered["token_ids"] == expected.prompt
    pad = vision.model.config.image_token_id
    at = expected.prompt.index(pad)
    unexpanded = [*expected.prompt[: at + 1], *expected.prompt[at + LARGE :]]
    parts = [{"type": "image_url", "url": message["content"][1]["image_url"]["url"]}]
    for prompt in (
        {"token_ids": expected.prompt, "features": rendered["features"]},
        {"token_ids": unexpanded, "content_parts": parts},
    ):
        ask = {"model": "tiny", "sampling_params": params, **ASK, **forms, **prompt}
        got = server.post(GENERATE, ask)
        rows = decode(got["prompt_routed_experts"]), decode(got["choices"][0]["routed_experts"])
        assert got["choices"][0]["token_ids"] == expected.tokens
        assert np.array_equal(np.concatenate(rows), rows_of(expected))
    with server.client() as client:
        said = client.post(GENERATE, json={**ask, "routed_experts_prompt_start": 2})
    assert (said.status_code, said.json()["error"]["param"]) == (400, "routed_experts_prompt_start")
    assert "content_parts" in said.json()["error"]["message"]


def test_every_row_in_16_bits(model: Path) -> None:
    """In process, in chunks that no image fits, without a cache of processed images."""
    limit = {"image": 1, "video": 0}
    counts = run_in_little_space(
        model, WITH_TORCHVISION, images=3, mm_processor_cache_gb=0, limit_mm_per_prompt=limit
    )
    assert counts["hits on images"] > 200
