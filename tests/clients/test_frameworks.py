"""What training frameworks do with rows accepts ours, and puts each where its token is.

The decoders are in `consumers`. They get answers of known rows, made with the server's own encoder; and those of a real
server, held against a Hugging Face forward pass.
"""

from typing import Any

import numpy as np
import orjson
import pytest

from routed_experts.protocol.batch import spread_layers
from routed_experts.protocol.codec import resolve_dtype
from tests.clients import consumers as of
from tests.clients.consumers import Rejected
from tests.e2e.harness import Oracle, Server, prompt_of
from tests.protocol.answers import rows_of
from tests.protocol.forms import encode

P, G = 9, 6
TOTAL = P + G
L, K = 4, 3
EXPERTS = [128, 256, 512]
"""Up to 128 int8 holds the ids, up to 256 uint8, above neither."""
IN_PROCESS = [of.VERL.take, of.nemo_rl, of.SKYRL.take, of.MS_SWIFT.take, of.ART.take]
over_http = pytest.mark.parametrize("framework", of.HTTP)


def known(experts: int, count: int = TOTAL - 1, seed: int = 3) -> np.ndarray:
    """Rows with the highest expert in them, so that types that are too narrow are seen."""
    rows = rows_of(count, seed, experts, L, K)
    rows[0, 0] = [experts - 1, 0, 1]
    return rows


def sent(rows: np.ndarray, fmt: Any, dtype: Any, experts: int, start: int = 0) -> Any:
    """A choice's joined rows on the wire."""
    return encode(rows[start:], fmt=fmt, dtype=resolve_dtype(dtype, experts), start=start)


def in_process(rows: np.ndarray, experts: int) -> np.ndarray:
    """`CompletionOutput.routed_experts`: of the type that vLLM's own capture has."""
    return rows.astype(resolve_dtype("vllm", experts))


def test_engines_in_process() -> None:
    for experts in EXPERTS:
        rows = in_process(known(experts), experts)
        for take in IN_PROCESS:
            if take is of.nemo_rl and experts > 256:
                with pytest.raises(Rejected, match="UInt16"):
                    take(rows, TOTAL, experts)
            else:
                assert np.array_equal(take(rows, TOTAL, experts), known(experts))
        # Aborted after two tokens, resumed with them in the prompt: each row is of the run that made its token.
        first, second = known(experts, P + 2 - 1, seed=1), known(experts, seed=2)
        assert np.array_equal(of.verl_resumed(first, second, G - 2), np.concatenate([first, second[P + 1 :]]))


def check_verifiers(payload: Any, rows: np.ndarray, start: int) -> None:
    """From the bytes to the trainer's tensor."""
    got = of.renderers(orjson.dumps({"choices": [{"index": 0, "routed_experts": payload}]}))
    array = got["choices"][0]["routed_experts"]
    assert isinstance(array["data"], memoryview)
    messages: Any = of.verifiers(array, start, [P - start, G])
    batch = of.prime_rl_trainer(np.concatenate(messages), TOTAL - start)
    assert np.array_equal(batch[0], np.concatenate([rows[start:], rows[-1:]]))


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("start", [0, P - 1])
def test_prime_rl_and_verifiers(experts: int, start: int) -> None:
    rows = known(experts)
    check_verifiers(of.prime_rl(in_process(rows[start:], experts), start), rows, start)
    for dtype in ("int16", "auto", "int32"):
        check_verifiers(sent(rows, "object", dtype, experts, start), rows, start)


@over_http
def test_http(framework: str) -> None:
    asked = of.HTTP[framework]
    for experts in EXPERTS:
        rows = known(experts)
        for start in (0, 5):
            value = orjson.loads(orjson.dumps(sent(rows, asked.fmt, asked.dtype, experts, start)))
            assert np.array_equal(asked.take(value, TOTAL - 1 - start, L, K, experts), rows[start:])
    if framework == "xtuner":
        with pytest.raises(Rejected):
            asked.take(sent(rows, "npy", "int16", experts), TOTAL - 1, L, K, experts)


def test_what_is_rejected() -> None:
    """A row too few, as in the last chunk of a stream alone; rows that are not known, by some."""
    rows = known(200)
    for asked in of.HTTP.values():
        with pytest.raises(Rejected):
            asked.take(sent(rows[:-1], asked.fmt, asked.dtype, 200), TOTAL - 1, L, K, 200)
    for framework in (of.VERL, of.MS_SWIFT, of.ART):
        with pytest.raises(Rejected):
            framework.take(in_process(rows[:-1], 200), TOTAL, 200)
    assert of.verifiers(of.prime_rl(rows[:-1], 0), 0, [P, G])[1] is None
    assert (of.nemo_rl(rows[:-1], TOTAL, 200)[TOTAL - 2] == -1).all()
    rows[4] = -1
    for unknown in (
        lambda: of.SKYRL.take(rows, TOTAL, 200),
        lambda: of.prime_rl(rows, 0),
        lambda: of.HTTP["vime"].take(sent(rows, "npy", "int16", 200), TOTAL - 1, L, K, 200),
    ):
        with pytest.raises(Rejected):
            unknown()
    assert (of.nemo_rl(rows, TOTAL, 200)[4] == -1).all()


def test_dense_layers() -> None:
    """Of five decoder layers the first is dense: verl and NeMo-RL take both axes, others decoder layers only."""
    rows, moe_layers = known(200), (1, 2, 3, 4)
    spread = spread_layers(rows, moe_layers, 5)
    for payload in (rows, spread):
        assert np.array_equal(payload[:, of.payload_layers(payload.shape[1], moe_layers, 5, both=True)], rows)
    assert np.array_equal(spread[:, of.payload_layers(5, moe_layers, 5, both=False)], rows)
    with pytest.raises(Rejected):
        of.payload_layers(4, moe_layers, 5, both=False)
    for asked in of.HTTP.values():
        got = asked.take(sent(spread, asked.fmt, asked.dtype, 200), TOTAL - 1, 5, K, 200)
        assert np.array_equal(got[:, moe_layers], rows)
        assert not got[:, 0].any()  # ART fails otherwise
        with pytest.raises(Rejected):
            asked.take(sent(rows, asked.fmt, asked.dtype, 200), TOTAL - 1, 5, K, 200)


@pytest.mark.e2e
@over_http
@pytest.mark.parametrize("chat", [False, True])
def test_a_real_server(server: Server, oracle: Oracle, framework: str, chat: bool) -> None:
    """Its model's first layer is dense; DeepSeek-V3, GLM-4.5 and Kimi-K2 need every decoder layer."""
    asked = of.HTTP[framework]
    fields: dict[str, Any] = {"return_routed_experts": True, "return_token_ids": True, "max_tokens": 9}
    fields |= {
        "routed_experts_layout": "joined",
        "routed_experts_format": asked.fmt,
        "routed_experts_dtype": asked.dtype,
    }
    for layers, start in (("moe", 0), ("all", 0), ("moe", 33)):
        body = {**fields, "ignore_eos": True, "routed_experts_layers": layers, "routed_experts_start_len": start}
        if chat:
            answer = server.chat(**body, messages=[{"role": "user", "content": "Which experts take all of this?"}])
        else:
            answer = server.complete(**body, prompt=prompt_of(70, seed=5))
        (choice,) = answer["choices"]
        tokens = [*(answer.get("prompt_token_ids") or choice["prompt_token_ids"]), *choice["token_ids"]]
        got = asked.take(choice["routed_experts"], len(tokens) - 1 - start, 5 + (layers == "all"), 4, 16)
        if layers == "all":
            assert not got[:, 0].any()
            got = got[:, 1:]
            assert got.any(axis=2).all()
        assert oracle.wrong(got, tokens[:-1], start) == []
