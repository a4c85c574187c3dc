"""Texts of token ids, for clients that show rows beside tokens."""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from routed_experts.server.outputs.threads import Threads
from routed_experts.server.vllm_api import AsyncLLM, VLLMValidationError

TEXTS_PATH = "/v1/routed_experts/texts"
MAX_TOKENS = 16_384
_MAX_BODY_BYTES = 16 * MAX_TOKENS  # JSON of that many ids, with room for spaces
_DECODER = Threads(1, "routed-experts-texts")
"""One thread, so that these requests leave the server's own threads to others."""


class TokenIds(BaseModel):
    """Token ids of the served model."""

    model_config = ConfigDict(extra="forbid")

    token_ids: list[Annotated[int, Field(strict=True, ge=0)]] = Field(
        max_length=MAX_TOKENS, fail_fast=True
    )


class TokenTexts(BaseModel):
    """The texts of token ids."""

    texts: list[str] = Field(
        description="the text of each id, in the order of the request; invalid UTF-8 is U+FFFD"
    )


async def texts_of(raw_request: Request, engine: AsyncLLM) -> TokenTexts:
    """The texts of the ids in the body of a request. `NotImplementedError` if the server runs
    without a tokenizer."""
    ids = await _ids_in(raw_request)
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise NotImplementedError("The server has no tokenizer (--skip-tokenizer-init).")
    last = max(tokenizer.max_token_id, engine.model_config.get_vocab_size() - 1)
    if ids and max(ids) > last:
        raise VLLMValidationError(
            f"token_ids: {max(ids)} is not a token of the model", parameter="token_ids"
        )
    return TokenTexts(texts=await _DECODER.run(_decode, tokenizer, ids))


async def _ids_in(raw_request: Request) -> list[int]:
    """Reads the body to its end, so that the client receives the error, but keeps no more than the
    limit."""
    body = bytearray()
    async for chunk in raw_request.stream():
        if len(body) <= _MAX_BODY_BYTES:
            body += chunk
    if len(body) > _MAX_BODY_BYTES:
        raise VLLMValidationError(f"token_ids: at most {MAX_TOKENS} ids", parameter="token_ids")
    try:
        return TokenIds.model_validate_json(bytes(body)).token_ids
    except ValidationError as error:
        first, *_ = error.errors(include_input=False, include_url=False, include_context=False)
        field = ".".join(map(str, first["loc"])) or "body"
        raise VLLMValidationError(
            f"{field}: {first['msg']}", parameter=str((*first["loc"], "body")[0])
        ) from None


def _decode(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    return [_text_of(tokenizer, token_id) for token_id in ids]


def _text_of(tokenizer: Any, token_id: int) -> str:
    """The text of a token, with the space that it may begin with.

    Many tokenizers drop a space at the beginning of a text. So the token is decoded twice in a row,
    and the second half is its text.
    """
    if token_id > tokenizer.max_token_id:
        return ""  # a model's vocabulary may be padded beyond the tokenizer's
    text: str = tokenizer.decode([token_id, token_id])
    return text[len(text) // 2 :]
