"""Texts of token ids, for clients that show rows beside tokens."""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.concurrency import run_in_threadpool

from routed_experts.server.vllm_api import AsyncLLM, VLLMValidationError

TEXTS_PATH = "/v1/routed_experts/texts"
MAX_TOKENS = 16_384


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


async def texts_of(body: bytes, engine: AsyncLLM) -> TokenTexts:
    """The texts of the ids in the body of a request. `NotImplementedError` if the server runs
    without a tokenizer."""
    try:
        ids = TokenIds.model_validate_json(body).token_ids
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise NotImplementedError("The server has no tokenizer (--skip-tokenizer-init).")
    last = max(tokenizer.max_token_id, engine.model_config.get_vocab_size() - 1)
    if ids and max(ids) > last:
        raise VLLMValidationError(
            f"token_ids: {max(ids)} is not a token of the model", parameter="token_ids"
        )
    return TokenTexts(texts=await run_in_threadpool(_decode, tokenizer, ids))


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
