"""Bodies of requests that are valid but for some fields: every field of ours and its siblings, with
any JSON value."""

import base64
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import httpx
import orjson
import yaml
from hypothesis import strategies as st
from vllm import SamplingParams

from routed_experts.capture.wire.message import OPT_IN_ARG
from routed_experts.protocol.models import PREFIXES
from tests.documentation import ROOT
from tests.e2e.harness import prompt_of

SPEC: dict[str, Any] = yaml.safe_load((ROOT / "openapi.yaml").read_text())
SCHEMAS: dict[str, Any] = SPEC["components"]["schemas"]
PROMPT = prompt_of(30, 1)
GENERATE = "/inference/v1/generate"
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
    GENERATE: {"token_ids": PROMPT, "sampling_params": {"max_tokens": 3}},
}
COUNTS = {"n", "best_of", "max_tokens", "max_completion_tokens", "min_tokens"}
"""They decide how much is generated, so that they stay small."""

# What vLLM's connectors read of a request, in 0.32.
REMOTE = {
    "remote_engine_id": "engine",
    "remote_block_ids": [[1, 2]],
    "remote_host": "127.0.0.1",
    "remote_port": 9,
}
PULL: dict[str, Any] = {"do_remote_prefill": True, "do_remote_decode": False, **REMOTE}
PULL |= {"remote_request_id": "request", "tp_size": 1}
SEND = {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(REMOTE)}
OTHERS = (
    "dcp_size",
    "pp_size",
    "remote_num_tokens",
    "remote_block_size",
    "remote_blocks_expiry_time",
    "transfer_id",
)
OTHERS += (
    "max_load_tokens",
    "max_offload_tokens",
    "load_tiers",
    "_p_side_truncated",
    "_remote_blocks_processed",
)

JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
OTHER_TYPES = st.sampled_from([None, True, 0, 5, -1, 1 << 70, 0.5, float("nan"), "", "5"]) | JUNK
OTHER_TYPES |= st.sampled_from([[], {}, [[]], [5], ["5"], {"a": 5}])
SIMPLE = {
    "boolean": st.booleans(),
    "integer": st.integers(-2, 40) | st.integers(),
    "number": st.floats(-2, 3) | st.floats(),
    "string": st.text(max_size=8),
    "null": st.none(),
}
SMALL = st.integers(-1, 4) | JUNK.filter(
    lambda value: not isinstance(value, int | float) or value < 5
)


def values(schema: Any, depth: int = 0) -> st.SearchStrategy[Any]:
    """What a schema allows, roughly, and at times anything."""
    if depth > 4:
        return JUNK
    match schema:
        case {"$ref": ref}:
            return values(SCHEMAS[ref.rsplit("/", 1)[1]], depth + 1)
        case {"anyOf": several} | {"oneOf": several} | {"allOf": several}:
            return st.one_of(*(values(option, depth + 1) for option in several))
        case {"enum": allowed}:
            return st.sampled_from(allowed)
        case {"const": value}:
            return st.just(value)
        case {"type": "array"}:
            return st.lists(values(schema.get("items"), depth + 1), max_size=3)
        case {"type": "object"}:
            properties = {
                name: values(option, depth + 1)
                for name, option in schema.get("properties", {}).items()
            }
            return st.fixed_dictionaries({}, optional=properties)
        case {"type": kind}:
            return SIMPLE.get(kind, JUNK)
    return JUNK


def fields_of(path: str) -> dict[str, Any]:
    """The schemas of an endpoint's fields, by name."""
    content = SPEC["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    properties: dict[str, Any] = SCHEMAS[content["$ref"].rsplit("/", 1)[1]]["properties"]
    return properties


def mostly(valid: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """`valid` in nine of ten cases, and anything in the others."""
    return st.integers(0, 9).flatmap(lambda dice: valid if dice else JUNK)


@dataclass(frozen=True)
class Hostile:
    """Makes requests."""

    shape: tuple[int, int]  # (L, K) of the server
    left_out: Collection[str] = ()  # fields that are never sent

    def requests(self) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
        """Endpoints, each with a body that is valid but for some fields, and with fields of KV
        transfers in most."""
        return st.sampled_from(sorted(VALID)).flatmap(
            lambda path: st.tuples(st.just(path), self._body(path))
        )

    def _body(self, path: str) -> st.SearchStrategy[dict[str, Any]]:
        fields = {
            name: schema for name, schema in fields_of(path).items() if name not in self.left_out
        }
        ours = sorted(name for name in fields if name.startswith(PREFIXES))
        # Names that mean something elsewhere, and names that are nearly ours.
        for name in ("extra_body", "sampling_params", "routing", "routed_experts_top"):
            fields.setdefault(name, {"type": "object"})
        names = st.sampled_from(ours) | st.sampled_from(sorted(fields))
        transfer = mostly(self._transfer())
        extra_args = mostly(self._extra_args(transfer))
        if path == GENERATE:
            extra = {"sampling_params": mostly(self._sampling(extra_args))}
        else:
            extra = {"vllm_xargs": extra_args}

        @st.composite
        def some_fields(draw: Any) -> dict[str, Any]:
            return {
                name: draw(SMALL if name in COUNTS else values(fields[name]) | JUNK)
                for name in draw(st.lists(names, min_size=1, max_size=3))
            }

        changes = {
            "fields": some_fields(),
            "transfer": st.fixed_dictionaries({"kv_transfer_params": transfer}),
            "extra": st.fixed_dictionaries(extra),
        }
        # Mostly in one place: what is refused first hides what comes after it.
        places = st.sampled_from(
            [["fields"], ["transfer"], ["transfer"], ["extra"], ["fields", "transfer", "extra"]]
        )

        @st.composite
        def body(draw: Any) -> dict[str, Any]:
            made = {"model": "tiny", **VALID[path]}
            if draw(st.booleans()):
                made["return_routed_experts"] = True
            for place in draw(places):
                made |= draw(changes[place])
            return made

        return body()

    def _sampling(self, extra_args: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
        names = sorted(
            {*SamplingParams.__struct_fields__} - {*self.left_out, *COUNTS, "extra_args"}
        )
        some = {"extra_args": extra_args} | dict.fromkeys(
            {"n", "min_tokens"} - {*self.left_out}, SMALL
        )
        of_ours = st.fixed_dictionaries({"max_tokens": st.just(3) | SMALL}, optional=some)
        others = st.dictionaries(
            st.sampled_from(names), st.integers(-1, 2) | st.floats(0, 2) | JUNK, max_size=2
        )
        return st.builds(lambda some, more: {**some, **more}, of_ours, others)

    def _extra_args(self, transfer: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
        names = st.sampled_from(["kv_transfer_params", OPT_IN_ARG, "routed_experts"]) | st.text(
            max_size=8
        )
        return st.dictionaries(names, transfer | JUNK, max_size=2)

    def _transfer(self) -> st.SearchStrategy[dict[str, Any]]:
        """What an instance that prefills, or one that decodes, is given, with up to two keys
        changed or left out."""
        rows = st.integers(0, 9).flatmap(
            lambda dice: self._rows() if dice < 6 else st.none() if dice < 9 else JUNK
        )
        keys = st.sampled_from([*PULL, *PULL, *OTHERS, "routed_experts"])

        @st.composite
        def transfer(draw: Any) -> dict[str, Any]:
            made, of_prompt = dict(draw(st.sampled_from([PULL, PULL, SEND]))), draw(rows)
            if of_prompt is not None:
                made["routed_experts"] = of_prompt
            for key in draw(st.lists(keys, min_size=1, max_size=2)):
                if draw(st.integers(0, 4)) == 4:
                    made.pop(key, None)
                else:
                    made[key] = draw(OTHER_TYPES)
            return made

        return transfer()

    def _rows(self) -> st.SearchStrategy[dict[str, Any]]:
        """Rows of some of the prompt's tokens, valid but at times for one key."""

        @st.composite
        def rows(draw: Any) -> dict[str, Any]:
            count = draw(st.sampled_from([1, 1, 1, 0, 30, 31]))
            dtype, size = draw(st.sampled_from([("int16", 2), ("uint8", 1)]))
            data = base64.b64encode(bytes(count * self.shape[0] * self.shape[1] * size)).decode()
            made = {"data": data, "dtype": dtype, "shape": [count, *self.shape]}
            made["until"] = draw(st.sampled_from([None, 0, 1 << 39, 1 << 39]))
            if draw(st.integers(0, 4)) == 4:
                made[draw(st.sampled_from(["data", "dtype", "shape", "until", "x"]))] = draw(JUNK)
            return made

        return rows()


def check_error(response: httpx.Response) -> None:
    assert response.status_code >= 400, response.text
    error = orjson.loads(response.content)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["code"] == response.status_code


def check_stream(response: httpx.Response) -> None:
    *events, end = [line for line in response.text.splitlines() if line.startswith("data: ")]
    assert end == "data: [DONE]"
    for event in events:
        error = orjson.loads(event.removeprefix("data: ")).get("error")
        assert error is None or error["code"] < 500, event


def check_response(response: httpx.Response) -> None:
    """Not the server's fault: a whole answer, or an error in OpenAI's form."""
    assert response.status_code < 500, response.text
    kind = response.headers["content-type"]
    if response.status_code != 200:
        check_error(response)
    elif kind.startswith("text/event-stream"):
        check_stream(response)
    elif kind.startswith("application/json"):
        assert isinstance(orjson.loads(response.content), dict)
