"""Reads, renders and tokenises large bodies in a separate process, `python -m
router.intake.body_reader`. In the router this would block the event loop, and so the tokens of all
streams, for seconds: neither JSON decoding nor a chat template releases the GIL.

The process answers each `Job` with a `Done`, both in MessagePack (pdserve/process/child_pool.py).
Results are small, but for images: token ids, and the body without its prompts.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np  # noqa: F401 - loaded before the limit, in which it may not find room

from pdserve.errors import ErrorInfo, InternalError, InvalidRequest, PdserveError
from pdserve.model.token_cache import TokenCache
from pdserve.model.token_ids import TokenIds
from pdserve.model.tokenizer import Tokenizer
from pdserve.process.child_pool import calls, connected, limit, reply
from pdserve.types import ModelInfo
from router.dialects.anthropic import CountTokensRequest, MessagesRequest
from router.dialects.embeddings import (
    CohereEmbedRequest,
    EmbeddingsRequest,
    PoolingBody,
    PoolRequest,
    RerankRequest,
    ScoreRequest,
)
from router.dialects.fields import check_rest
from router.dialects.generation_rpc import GenerateMessage
from router.dialects.openai import ChatRequest, CompletionRequest
from router.dialects.responses import Earlier, ResponsesRequest
from router.dialects.token_generate import TokenGenerateRequest
from router.dialects.tokens import DetokenizeRequest, TokenizeRequest
from router.intake.body_processes import Done, Job
from router.intake.image_prompts import ImagePrompt
from router.intake.tokenise import NoTokenizer, tokenise_body

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)

KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, GenerateMessage),
        TokenGenerateRequest,
        *(TokenizeRequest, DetokenizeRequest, CountTokensRequest),
        *(EmbeddingsRequest, PoolRequest, CohereEmbedRequest, ScoreRequest, RerankRequest),
    )
}
_NICE = 5
_MAX_TOKENIZERS = 4
_JOBS_PER_FULL_COLLECTION = 1024
# Token ids of 200 conversations of 100,000 tokens.
_TOKEN_CACHE_BYTES = 128 << 20


def read_large(job: Job, tokenizer: Tokenizer | None, cache: TokenCache) -> Done:
    """Read and tokenise the body of a job. Raises ClientError naming the field, and NoTokenizer for
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
    body = KINDS[job.kind].decode(job.data)
    items = b""
    if isinstance(body, ResponsesRequest):
        body = body.after(Earlier(job.previous))
    found = tokenise_body(body, model, cache, job.tenant, tokenizer, job.texts)
    body = found.body
    if isinstance(body, ResponsesRequest):
        items = body.stored_items
    prompts = found.prompts or found.inputs.tokens
    images = next((x for x in prompts if isinstance(x, ImagePrompt)), None)  # the only prompt then
    done = Done(
        tokens=[_pack(x) for x in prompts if not isinstance(x, ImagePrompt)],
        images=images,
        second_at=found.inputs.second_at,
        order=found.inputs.order,
        items=items,
        pieces=list(found.pieces),
    )
    if isinstance(body, PoolingBody):
        done.body = body.without_inputs().encoded()
    elif found.parsed:
        done.body = body.without_prompt().encoded()
        check_rest(len(done.body))
    else:
        done.body, done.is_answer = found.answer, True
    return done


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
            if len(self._tokenizers) == _MAX_TOKENIZERS:
                del self._tokenizers[next(iter(self._tokenizers))]
            self._tokenizers[job.tokenizer] = Tokenizer.load(job.files)
            gc.freeze()  # it stays, so no collection need look at it
        return self._tokenizers.get(job.tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory-mib", type=int, required=True, help="beyond what it has now")
    args, sock = connected(parser)
    limit(args.memory_mib << 20)
    # The router has priority: it gets the CPU, and if memory runs out, the kernel kills this
    # process first.
    os.nice(_NICE)
    Path("/proc/self/oom_score_adj").write_text("1000", "ascii")
    # Large bodies are trees without reference cycles. To search them for cycles would take most of
    # the time, so collect only between jobs, and mostly only what the last job made: the token
    # ids of conversations stay.
    gc.freeze()
    gc.disable()
    reader = _Reader()
    for number, data in enumerate(calls(sock), 1):
        done = reader.read(msgspec.msgpack.decode(data, type=Job))
        reply(sock, msgspec.msgpack.encode(done))
        gc.collect(0 if number % _JOBS_PER_FULL_COLLECTION else 2)


if __name__ == "__main__":
    main()
