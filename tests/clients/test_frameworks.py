"""What training frameworks do with rows accepts ours, and puts each where its token is.

The decoders are in `consumers`. They get answers of known rows, made with the server's own encoder; and, at the end,
those of a real server, held against a Hugging Face forward pass.
"""

import json
from typing import Any

import numpy as np
import orjson
import pytest
import torch

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


def known(experts: int, count: int = TOTAL - 1, seed: int = 3) -> np.ndarray:
    """Rows with the highest expert in them, so that types that are too narrow are seen."""
    rows = rows_of(count, seed, experts, L, K)
    rows[0, 0] = [experts - 1, 0, 1]
    return rows


def engine_array(rows: np.ndarray, experts: int, writable: bool = True) -> np.ndarray:
    """`CompletionOutput.routed_experts`: of the type that vLLM's own capture has."""
    array = rows.astype(np.uint8 if experts <= 256 else np.uint16)
    array.flags.writeable = writable
    return array


def sent(rows: np.ndarray, fmt: Any, dtype: Any, experts: int, start: int = 0) -> Any:
    """A choice's joined rows on the wire."""
    return encode(rows[start:], fmt=fmt, dtype=resolve_dtype(dtype, experts), start=start)


PROMPT, RESPONSE = list(range(100, 100 + P)), list(range(200, 200 + G))


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("writable", [True, False])
class TestInProcess:
    """Engines that the framework holds itself."""

    def test_verl(self, experts: int, writable: bool) -> None:
        rows = known(experts)
        columns = of.verl(engine_array(rows, experts, writable), PROMPT, RESPONSE, prompt_columns=20)
        assert columns.dtype == torch.int16
        assert np.array_equal(columns[20 - P : 20 - P + TOTAL - 1], rows)
        assert not columns[: 20 - P].any()
        assert not columns[20 + G - 1 :].any()

    def test_verl_packed(self, experts: int, writable: bool) -> None:
        rows = known(experts)
        whole, replayed = of.verl_packed(engine_array(rows, experts, writable), TOTAL)
        assert np.array_equal(whole[replayed], rows)

    def test_verl_resumed(self, experts: int, writable: bool) -> None:
        """Aborted after two tokens, resumed with them in the prompt: each row is of the run that made its token."""
        first, second = known(experts, P + 2 - 1, seed=1), known(experts, TOTAL - 1, seed=2)
        got = of.verl_resumed(engine_array(first, experts), engine_array(second, experts, writable), G - 2)
        assert np.array_equal(got, np.concatenate([first, second[P + 1 :]]))
        assert len(got) == TOTAL - 1

    def test_nemo_rl(self, experts: int, writable: bool) -> None:
        rows = known(experts)
        if experts > 256:  # its range check cannot read vLLM's type for them
            with pytest.raises(NotImplementedError, match="UInt16"):
                of.nemo_rl(engine_array(rows, experts), TOTAL, 20, experts)
            return
        whole = of.nemo_rl(engine_array(rows, experts, writable=True), TOTAL, 20, experts)
        of.nemo_rl_validate(whole, experts)
        assert np.array_equal(whole[: TOTAL - 1], rows)
        assert (whole[TOTAL - 1 :] == torch.arange(K)).all()

    def test_skyrl(self, experts: int, writable: bool) -> None:
        rows = known(experts)
        whole = of.skyrl(engine_array(rows, experts, writable), (P, G), columns=20)
        assert np.array_equal(whole[20 - TOTAL : 19], rows)
        assert whole[19].tolist() == [list(range(K))] * L

    def test_ms_swift(self, experts: int, writable: bool) -> None:
        rows = known(experts)
        whole = of.ms_swift(engine_array(rows, experts, writable), TOTAL, columns=20)
        assert np.array_equal(whole[: TOTAL - 1], rows)
        assert not whole[TOTAL - 1 :].any()

    def test_art(self, experts: int, writable: bool) -> None:
        rows = known(experts)
        whole = of.art(engine_array(rows, experts, writable), PROMPT, RESPONSE, experts)
        assert np.array_equal(whole[: TOTAL - 1], rows)
        assert len(whole) == TOTAL

    @pytest.mark.parametrize("start", [0, P - 1])
    def test_prime_rl(self, experts: int, writable: bool, start: int) -> None:
        """From its server's JSON to its trainer's tensor, a later turn with a prompt start included."""
        rows = known(experts)
        payload = of.prime_rl_server(engine_array(rows[start:], experts, writable), start)
        payload = of.renderers(orjson.dumps({"choices": [{"routed_experts": payload}]}))
        got = of.verifiers(payload["choices"][0]["routed_experts"], start, [P - start, G])
        check_verifiers(got, rows, start)


def check_verifiers(got: list[Any], rows: np.ndarray, start: int) -> None:
    user, assistant = got
    assert np.array_equal(user, rows[start:P])
    assert np.array_equal(assistant[:-1], rows[P:])
    assert np.array_equal(assistant[-1], rows[-1])
    batch = of.prime_rl_trainer(np.concatenate(got), TOTAL - start)
    assert batch.shape == (1, TOTAL - start, *rows.shape[1:])
    assert np.array_equal(batch[0, :-1], rows[start:])


class TestRejected:
    """The checks are really there: what would be wrong is rejected."""

    def test_a_row_too_few(self) -> None:
        rows = engine_array(known(200), 200)[:-1]
        for take in (
            lambda: of.verl_packed(rows, TOTAL),
            lambda: of.ms_swift(rows, TOTAL, 20),
            lambda: of.art(rows, PROMPT, RESPONSE, 200),
            lambda: of.vime({"routed_experts": sent(known(200)[:-1], "npy", "auto", 200)}, range(TOTAL), L, K, 200),
            lambda: of.xtuner({"routed_experts": rows.tolist()}, TOTAL, L, K),
            lambda: of.slime({"routed_experts": sent(known(200)[:-1], "raw", "int32", 200)}, range(TOTAL), L, K),
        ):
            with pytest.raises(Rejected):
                take()
        assert of.verifiers(of.prime_rl_server(rows, 0), 0, [P, G])[1] is None
        assert (of.nemo_rl(rows, TOTAL, 20, 200)[TOTAL - 2] == -1).all()

    def test_another_type_than_vllms(self) -> None:
        with pytest.raises(Rejected):
            of.art(known(200), PROMPT, RESPONSE, 200)

    def test_unknown_rows(self) -> None:
        rows = known(200)
        rows[4] = -1
        for take in (
            lambda: of.skyrl(rows, (P, G), 20),
            lambda: of.prime_rl_server(rows, 0),
            lambda: of.vime({"routed_experts": sent(rows, "npy", "int16", 200)}, range(TOTAL), L, K, 200),
        ):
            with pytest.raises(Rejected):
                take()
        of.nemo_rl_validate(of.nemo_rl(rows, TOTAL, 20, 200), 200)


@pytest.mark.parametrize("experts", EXPERTS)
class TestHttp:
    """Forms that a server-wide default or the request chooses; rows joined, as all of them expect."""

    def test_vime(self, experts: int) -> None:
        rows = known(experts)
        choice = {"routed_experts": sent(rows, "npy", "auto", experts)}
        assert np.array_equal(of.vime(choice, range(TOTAL), L, K, experts), rows)

    def test_vime_streamed(self, experts: int) -> None:
        """Not possible: it decodes the last chunk alone, and ours has the rows of that chunk's tokens."""
        rows = known(experts)
        chunks = [{"choices": [{"routed_experts": sent(rows[:-1], "npy", "auto", experts)}]}]
        chunks += [{"choices": [{"routed_experts": sent(rows[-1:], "npy", "auto", experts)}]}]
        with pytest.raises(Rejected):
            of.vime(of.vime_streamed(chunks), range(TOTAL), L, K, experts)

    @pytest.mark.parametrize("dtype", ["int16", "auto", "int32"])
    @pytest.mark.parametrize("start", [0, P - 1])
    def test_verifiers(self, experts: int, start: int, dtype: str) -> None:
        rows = known(experts)
        body = orjson.dumps({"choices": [{"index": 0, "routed_experts": sent(rows, "object", dtype, experts, start)}]})
        payload = of.renderers(body)["choices"][0]["routed_experts"]
        assert isinstance(payload["data"], memoryview)
        check_verifiers(of.verifiers(payload, start, [P - start, G]), rows, start)

    def test_xtuner(self, experts: int) -> None:
        rows = known(experts)
        choice = json.loads(orjson.dumps({"routed_experts": sent(rows, "list", "int16", experts)}))
        assert np.array_equal(of.xtuner(choice, TOTAL, L, K), rows)
        for fmt in ("object", "npy", "raw"):
            with pytest.raises(Rejected):
                of.xtuner({"routed_experts": sent(rows, fmt, "int16", experts)}, TOTAL, L, K)

    @pytest.mark.parametrize("start", [0, 5])
    def test_slime(self, experts: int, start: int) -> None:
        rows = known(experts)
        info = {"routed_experts": sent(rows, "raw", "int32", experts, start), "routed_experts_start_len": start}
        got = of.slime(info, range(TOTAL), L, K)
        assert np.array_equal(got, rows[start:])
        of.slime_validate(got, range(L))

    @pytest.mark.parametrize("tp_size", [1, 8])
    def test_slime_tensor_parallel(self, experts: int, tp_size: int) -> None:
        """Ranks take consecutive tokens; together they have every row, in order."""
        rows = known(experts)
        taken = of.slime({"routed_experts": sent(rows, "raw", "int32", experts)}, range(TOTAL), L, K)
        shards = of.slime_shards(taken, TOTAL, experts, tp_size)
        assert len({len(shard) for shard in shards}) == 1
        assert np.array_equal(torch.cat(shards)[: TOTAL - 1], rows)

    @pytest.mark.parametrize("start", [0, 5])
    def test_miles(self, experts: int, start: int) -> None:
        rows = known(experts)
        info = {"routed_experts": sent(rows, "raw", "int32", experts, start)}
        assert np.array_equal(of.miles(info, TOTAL - 1 - start, L), rows[start:])

    def test_areal(self, experts: int) -> None:
        rows = known(experts)
        info = {"routed_experts": sent(rows, "raw", "int32", experts), "prompt_tokens": P, "completion_tokens": G}
        assert np.array_equal(of.areal(info).reshape(-1, L, K), rows)


class TestDenseLayers:
    """A model of five decoder layers, of which the first is dense: which layer axis each framework takes."""

    MOE_LAYERS = (1, 2, 3, 4)
    ROWS = known(200)
    SPREAD = spread_layers(ROWS, MOE_LAYERS, 5)

    @pytest.mark.parametrize("layers", [of.verl_layers, of.nemo_rl_layers])
    @pytest.mark.parametrize("rows", [ROWS, SPREAD], ids=["MoE layers", "decoder layers"])
    def test_either(self, layers: Any, rows: np.ndarray) -> None:
        taken = layers(rows.shape[1], self.MOE_LAYERS, 5)
        assert np.array_equal(rows[:, taken], self.ROWS)

    def test_decoder_layers_only(self) -> None:
        """SkyRL, ms-swift, prime-rl, vime, slime, miles, xtuner and ART count dense layers too, as vLLM's own does."""
        taken = of.decoder_layers(5, self.MOE_LAYERS, 5)
        assert np.array_equal(self.SPREAD[:, taken], self.ROWS)
        with pytest.raises(Rejected):
            of.decoder_layers(4, self.MOE_LAYERS, 5)

    def test_vime(self) -> None:
        rows = of.vime({"routed_experts": sent(self.SPREAD, "npy", "auto", 200)}, range(TOTAL), 5, K, 200)
        of.vime_moe_layers(rows, self.MOE_LAYERS)
        with pytest.raises(Rejected):
            of.vime({"routed_experts": sent(self.ROWS, "npy", "auto", 200)}, range(TOTAL), 5, K, 200)

    def test_art(self) -> None:
        filled = of.art_dense_layers(engine_array(self.SPREAD, 200), [0])
        assert np.array_equal(filled[:, 1:], self.ROWS)
        with pytest.raises(Rejected):
            of.art_dense_layers(engine_array(self.ROWS, 200), [0])

    def test_slime_and_xtuner(self) -> None:
        got = of.slime({"routed_experts": sent(self.SPREAD, "raw", "int32", 200)}, range(TOTAL), 5, K)
        of.slime_validate(got, self.MOE_LAYERS)
        assert np.array_equal(got[:, self.MOE_LAYERS], self.ROWS)
        with pytest.raises(Rejected):
            of.slime({"routed_experts": sent(self.ROWS, "raw", "int32", 200)}, range(TOTAL), 5, K)
        assert np.array_equal(
            of.xtuner({"routed_experts": self.SPREAD.tolist()}, TOTAL, 5, K)[:, self.MOE_LAYERS], self.ROWS
        )


@pytest.mark.e2e
class TestRealServer:
    """The same decoders with answers of a real server, held against the oracle. The model's first layer is dense."""

    PROMPT = prompt_of(70, seed=5)
    ASK = {"return_routed_experts": True, "return_token_ids": True, "routed_experts_layout": "joined"}  # noqa: RUF012
    L, K, EXPERTS = 5, 4, 16

    def ask(self, server: Server, **fields: Any) -> dict[str, Any]:
        body = {**self.ASK, "prompt": self.PROMPT, "max_tokens": 9, "ignore_eos": True, **fields}
        (choice,) = server.complete(**body)["choices"]
        return choice

    def check(self, oracle: Oracle, tokens: list[int], got: Any, start: int = 0) -> None:
        assert oracle.wrong(np.asarray(got).reshape(-1, self.L, self.K), tokens[:-1], start) == []

    def test_npy(self, server: Server, oracle: Oracle) -> None:
        choice = self.ask(server, routed_experts_format="npy", routed_experts_dtype="auto")
        tokens = [*self.PROMPT, *choice["token_ids"]]
        self.check(oracle, tokens, of.vime(choice, tokens, self.L, self.K, self.EXPERTS))

    @pytest.mark.parametrize("framework", ["vime", "xtuner", "slime", "miles"])
    def test_every_decoder_layer(self, server: Server, oracle: Oracle, framework: str) -> None:
        """What frameworks that index by decoder layer need of DeepSeek-V3, GLM-4.5 and Kimi-K2."""
        form = {"vime": "npy", "xtuner": "list"}.get(framework, "raw")
        fields = {"routed_experts_format": form, "routed_experts_dtype": "int32"}
        choice = self.ask(server, **fields, routed_experts_layers="all")
        tokens = [*self.PROMPT, *choice["token_ids"]]
        if framework == "vime":
            got = of.vime(choice, tokens, 6, self.K, self.EXPERTS)
            of.vime_moe_layers(got, range(1, 6))
        elif framework == "xtuner":
            got = of.xtuner(choice, len(tokens), 6, self.K)
        elif framework == "slime":
            got = of.slime(choice, tokens, 6, self.K)
            of.slime_validate(got, range(1, 6))
        else:
            got = of.miles({**choice, "routed_experts_start_len": 0}, len(tokens) - 1, 6)
        rows = np.asarray(got).reshape(-1, 6, self.K)
        assert not rows[:, 0].any()
        self.check(oracle, tokens, rows[:, 1:])

    def test_raw(self, server: Server, oracle: Oracle) -> None:
        for start in (0, 33):
            choice = self.ask(
                server, routed_experts_format="raw", routed_experts_dtype="int32", routed_experts_start_len=start
            )
            tokens = [*self.PROMPT, *choice["token_ids"]]
            info = {"routed_experts": choice["routed_experts"], "routed_experts_start_len": start}
            self.check(oracle, tokens, of.slime(info, tokens, self.L, self.K), start)
            self.check(oracle, tokens, of.miles(info, len(tokens) - 1 - start, self.L), start)
        choice = self.ask(server, routed_experts_format="raw", routed_experts_dtype="int32")
        tokens = [*self.PROMPT, *choice["token_ids"]]
        lengths = {"prompt_tokens": len(self.PROMPT), "completion_tokens": len(choice["token_ids"])}
        self.check(oracle, tokens, of.areal({"routed_experts": choice["routed_experts"], **lengths}))

    def test_list_from_chat(self, server: Server, oracle: Oracle) -> None:
        body = {"messages": [{"role": "user", "content": "Which?"}], "max_tokens": 9, "ignore_eos": True}
        answer = server.chat(**self.ASK, **body, routed_experts_format="list")
        (choice,) = answer["choices"]
        tokens = [*answer["prompt_token_ids"], *choice["token_ids"]]
        self.check(oracle, tokens, of.xtuner(choice, len(tokens), self.L, self.K))
