"""Reads, renders and tokenises large bodies in a separate process, `python -m
router.api.large_bodies`. In the router this would block the event loop, and so the tokens of all
streams, for seconds: neither JSON decoding nor a chat template releases the GIL.

The process reads jobs from standard input and writes one `Done` per job to standard output. Each
message is MessagePack, preceded by its length in eight bytes. Results are small, but for images:
token ids, and the body without its prompts.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np  # noqa: F401 - loaded before the limit, in which it may not find room

from pdserve.errors import ErrorInfo, InternalError, InvalidRequest, PdserveError
from pdserve.model.token_cache import TokenCache
from pdserve.model.token_ids import TokenIds
from pdserve.model.tokenizer import Conversation, Tokenizer
from pdserve.types import ModelInfo
from pdserve.v1 import generation_pb2 as g
from router.api.body_process import GENERATE, Done, Job
from router.api.dialects.anthropic import CountTokensRequest
from router.api.dialects.embeddings import PoolingBody, tokenised
from router.api.dialects.fields import GenerateBody, check_rest, encode, read
from router.api.dialects.responses import ResponsesRequest
from router.api.dialects.tokens import DetokenizeRequest, TokenizeRequest
from router.api.grpc_requests import read_request
from router.api.preprocess import (
    NoTokenizer,
    ParsedRequest,
    prompt_tokens,
    prompt_with_images,
)
from router.api.route_table import ROUTES

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)

_KINDS = {x.body.__name__: x.body for x in ROUTES if x.body is not None}
_TOKENIZER_KINDS = (TokenizeRequest, DetokenizeRequest, CountTokensRequest)
_NICE = 5
# Token ids of 200 conversations of 100,000 tokens.
_TOKEN_CACHE_BYTES = 128 << 20


def read_large(job: Job, tokenizer: Tokenizer | None, cache: TokenCache) -> Done:
    """Read and tokenise the body of a job. Raises ClientError naming the field, and Unavailable for
    text without a tokenizer."""
    model = ModelInfo(
        name=job.model,
        path="",
        max_model_len=job.max_model_len,
        vocab_size=job.vocab_size,
        dtype="",
        cross_encoder=job.cross_encoder,
        modalities=job.modalities,
    )
    if job.kind == GENERATE:
        parsed = read_request(g.GenerateRequest.FromString(job.data), timeout_s=None)
        return _prompts([parsed], tokenizer, model, job.tenant, cache)
    kind = _KINDS[job.kind]
    body: Any = read(kind, job.data)
    if kind in _TOKENIZER_KINDS:
        if tokenizer is None:
            raise NoTokenizer(model)
        found = body.answer(tokenizer, model, cache.of(job.tenant))
        return Done(found) if isinstance(found, bytes) else Done(images=found)
    if isinstance(body, PoolingBody):
        inputs = tokenised(body, tokenizer, model)
        rest = encode(body.without_inputs())
        return Done(rest, list(map(_pack, inputs.tokens)), None, inputs.second_at, inputs.order)
    assert isinstance(body, GenerateBody)
    items = b""
    if isinstance(body, ResponsesRequest):
        body.put_before(job.previous)
        items = body.stored_items
    done = _prompts(body.parse(""), tokenizer, model, job.tenant, cache)
    done.body, done.items = encode(body.without_prompt()), items
    check_rest(len(done.body))
    return done


def _prompts(
    parsed: list[ParsedRequest],
    tokenizer: Tokenizer | None,
    model: ModelInfo,
    tenant: str,
    cache: TokenCache,
) -> Done:
    """Tokenise all prompts, or check one with images."""
    chat = parsed[0].prompt
    if isinstance(chat, Conversation) and chat.images:
        if tokenizer is None:
            raise NoTokenizer(model)
        add, field = parsed[0].add_special_tokens, parsed[0].prompt_field
        return Done(images=prompt_with_images(chat, tokenizer, model, add, field=field))
    parts = cache.of(tenant, parsed[0].cache_salt)  # all are of one body
    return Done(tokens=[_pack(prompt_tokens(one, tokenizer, model, parts)) for one in parsed])


def _pack(tokens: Sequence[int]) -> tuple[bytes, bytes]:
    found = TokenIds.of(tokens)
    return found.packed, found.varints


class _Reader:
    """Executes jobs. State: the loaded tokenizers, by digest, and the token ids of texts."""

    def __init__(self) -> None:
        self._tokenizers: dict[str, Tokenizer] = {}
        self._cache = TokenCache(_TOKEN_CACHE_BYTES)

    def read(self, job: Job) -> Done:
        try:
            return read_large(job, self._tokenizer(job), self._cache)
        except NoTokenizer:
            return Done(wants_tokenizer=True)
        except PdserveError as error:
            return Done(
                error=ErrorInfo(
                    error.code, error.message, error.field, error.retry_after_s, error.reason
                )
            )
        except MemoryError:
            return Done(error=ErrorInfo(InvalidRequest.code, "the body needs too much memory"))
        except Exception:
            logger.exception("a body of kind %s", job.kind)
            text = "internal error; see the router's log"
            return Done(error=ErrorInfo(InternalError.code, text))

    def _tokenizer(self, job: Job) -> Tokenizer | None:
        if job.files and job.tokenizer not in self._tokenizers:
            self._tokenizers[job.tokenizer] = Tokenizer.load(job.files)
            gc.freeze()  # it stays, so no collection need look at it
        return self._tokenizers.get(job.tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory-mib", type=int, required=True, help="beyond what it has now")
    memory = parser.parse_args().memory_mib << 20
    now = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + memory, now + memory))
    # The router has priority: it gets the CPU, and if memory runs out, the kernel kills this
    # process first.
    os.nice(_NICE)
    Path("/proc/self/oom_score_adj").write_text("1000", "ascii")
    # Large bodies are trees without reference cycles. To search them for cycles would take most of
    # the time, so collect only between jobs.
    gc.freeze()
    gc.disable()
    reader, jobs, results = _Reader(), sys.stdin.buffer, sys.stdout.buffer
    while size := jobs.read(8):  # empty once the router has ended
        done = reader.read(msgspec.msgpack.decode(jobs.read(int.from_bytes(size)), type=Job))
        data = msgspec.msgpack.encode(done)
        results.write(len(data).to_bytes(8) + data)
        results.flush()
        gc.collect()


if __name__ == "__main__":
    main()
