"""Bodies of /v1/embeddings, /v1/score and /v1/rerank, with the fields of OpenAI, vLLM and Cohere.

A score is the cosine of two embeddings, or the output of a cross-encoder for a pair, as in vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple

from msgspec import Meta, structs

from pdserve.model.tokenizer import TextPair
from router.api.dialects.fields import (
    NO_EFFECT,
    Body,
    Known,
    ModelName,
    Text,
    TokenId,
    knows,
    prompts_of,
    refuse,
)
from router.api.preprocess import Truncation, embedding_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.model.tokenizer import Tokenizer
    from pdserve.types import ModelInfo


MAX_INPUTS = 2048
_Texts = Annotated[list[Text], Meta(min_length=1, max_length=MAX_INPUTS)]


class PoolingBody(Body, kw_only=True):
    """Fields of all three bodies."""

    input_field: ClassVar[str] = ""

    model: ModelName = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(description="Maximum tokens of an input; the rest is cut off. -1: what fits."),
    ] = None
    truncation_side: Annotated[
        Literal["left", "right"] | None,
        Meta(
            description="Cut the first (left) or the last (right) tokens, including special ones. "
            "By default the tokenizer's configuration decides, and special tokens are kept."
        ),
    ] = None

    def listed(self) -> list[str | tuple[int, ...] | TextPair]:
        """Return the inputs, or the pairs of texts. Raises InvalidRequest naming the field."""
        raise NotImplementedError

    def without_inputs(self) -> PoolingBody:
        """Return the body with short placeholders for inputs that the answer does not need."""
        raise NotImplementedError

    def truncation(self, model: ModelInfo) -> Truncation | None:
        """Return the truncation, if any. Raises InvalidRequest if `truncate_prompt_tokens` exceeds
        the model's limit."""
        most, limit = self.truncate_prompt_tokens, model.max_model_len - 1
        if most is None:
            return None
        if most == 0 or most > limit:
            refuse("truncate_prompt_tokens", f"must be -1, or 1 to {limit}")
        return Truncation(limit if most < 0 else most, self.truncation_side)


@knows(
    {
        "add_special_tokens": Known((True,)),
        "dimensions": Known((), "embeddings have the model's own size"),
    }
)
class EmbeddingsRequest(PoolingBody, kw_only=True):
    """Body of POST /v1/embeddings."""

    input: Annotated[
        str | list[TokenId | str | list[TokenId]],
        Meta(description="A text, its token ids, or a list of several."),
    ]
    encoding_format: Literal["float", "base64"] = "float"
    user: Annotated[str | None, Meta(description=NO_EFFECT)] = None

    input_field: ClassVar[str] = "input"

    def listed(self) -> list[str | tuple[int, ...] | TextPair]:
        found = prompts_of(self.input, "input", MAX_INPUTS)
        if not all(found):
            refuse("input", f"must be 1 to {MAX_INPUTS} texts that are not empty")
        return [*found]

    def without_inputs(self) -> PoolingBody:
        return structs.replace(self, input="-")


class ScoreRequest(PoolingBody, kw_only=True):
    """Body of POST /v1/score: one text against several, or two lists pair by pair."""

    text_1: Text | _Texts
    text_2: Text | _Texts
    input_field: ClassVar[str] = "text_2"

    def listed(self) -> list[str | tuple[int, ...] | TextPair]:
        """Return the pairs. Raises InvalidRequest unless `text_1` is one text, or both lists have
        the same length."""
        first = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        second = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        if len(first) not in (1, len(second)):
            refuse("text_1", f"must be one text, or {len(second)} like text_2")
        first *= len(second) if len(first) == 1 else 1
        return [TextPair(*pair) for pair in zip(first, second, strict=True)]

    def without_inputs(self) -> PoolingBody:
        return structs.replace(self, text_1="-", text_2="-")


@knows({"max_tokens_per_doc": Known()})
class RerankRequest(PoolingBody, kw_only=True):
    """Body of POST /v1/rerank."""

    query: Text
    documents: _Texts
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool = True
    input_field: ClassVar[str] = "documents"

    def listed(self) -> list[str | tuple[int, ...] | TextPair]:
        return [TextPair(self.query, document) for document in self.documents]

    def without_inputs(self) -> PoolingBody:
        return self if self.return_documents else structs.replace(self, documents=["-"])


PoolingRequest = EmbeddingsRequest | ScoreRequest | RerankRequest


class Inputs(NamedTuple):
    """Tokenised inputs, without duplicates. `second_at`: index at which an input's second text
    begins. `order`: index in `tokens` of each input; two per pair if embeddings are compared."""

    tokens: Sequence[Sequence[int]]
    second_at: list[int]
    order: list[int]


def tokenised(body: PoolingBody, tokenizer: Tokenizer | None, model: ModelInfo) -> Inputs:
    """Tokenise the inputs of a body. Raises InvalidRequest naming the field."""
    listed, truncation = body.listed(), body.truncation(model)
    if not model.cross_encoder:
        # Both texts of a pair are embedded, and the embeddings compared.
        listed = [x for y in listed for x in (y if isinstance(y, TextPair) else (y,))]
    places: dict[object, int] = {}
    order = [places.setdefault(x, len(places)) for x in listed]
    found = [
        embedding_tokens(x, truncation, tokenizer, model, field=body.input_field)
        for x in dict.fromkeys(listed)
    ]
    return Inputs([x for x, _ in found], [x for _, x in found], order)
