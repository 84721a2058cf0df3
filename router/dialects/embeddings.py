"""Bodies of embeddings, scores and reranking, with the fields of OpenAI, vLLM and Cohere.

A score is the cosine of two embeddings, or the output of a cross-encoder for a pair, as in vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple

from msgspec import Meta, structs

from pdserve.model.tokenizer import Conversation, TextPair
from router.dialects.conversation import Message, Variables, template_variables, without_billing
from router.dialects.fields import (
    MAX_MESSAGES,
    Body,
    Count,
    Ignored,
    InferenceGeo,
    Known,
    ModelName,
    Text,
    TokenId,
    knows,
    prompts_of,
    refuse,
)

if TYPE_CHECKING:
    from pdserve.types import ModelInfo


MAX_INPUTS = 2048
Input = str | tuple[int, ...] | TextPair | Conversation
_Texts = Annotated[list[Text], Meta(min_length=1, max_length=MAX_INPUTS)]


class Truncation(NamedTuple):
    """Truncation of an input to `most` tokens. `side`: "right" keeps the first tokens, "left" the
    last; None truncates texts as the tokenizer is configured."""

    most: int
    side: str | None

    def __call__(self, tokens: tuple[int, ...], second_at: int) -> tuple[tuple[int, ...], int]:
        """Truncate the tokens of an input. `second_at`: index of its second text's first token."""
        gone = max(0, len(tokens) - self.most)
        if self.side == "left":
            return tokens[gone:], max(0, second_at - gone)
        return tokens[: self.most], min(second_at, self.most)


class PoolingBody(Body, kw_only=True):
    """A body whose inputs are pooled."""

    input_field: ClassVar[str] = ""

    model: ModelName = None
    inference_geo: InferenceGeo = None

    def listed(self) -> list[Input]:
        """Return the inputs, or the pairs of texts. Raises InvalidRequest naming the field."""
        raise NotImplementedError

    def without_inputs(self) -> PoolingBody:
        """Return the body with short placeholders for inputs that the answer does not need."""
        raise NotImplementedError

    def truncation(self, model: ModelInfo) -> Truncation | None:
        """Return the truncation, if any. Raises InvalidRequest if it exceeds the model's limit."""
        raise NotImplementedError


class TruncatedBody(PoolingBody, kw_only=True):
    """Fields of vLLM's bodies."""

    user: Ignored = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(description="Most tokens of an input, but not 0: the rest is cut off. -1: what fits."),
    ] = None
    truncation_side: Annotated[
        Literal["left", "right"] | None,
        Meta(
            description="Cut the first (left) or the last (right) tokens, including special ones. "
            "By default the tokenizer's configuration decides, and special tokens are kept."
        ),
    ] = None

    def truncation(self, model: ModelInfo) -> Truncation | None:
        most, limit = self.truncate_prompt_tokens, model.max_model_len
        if most is None:
            return None
        if most == 0 or most > limit:
            refuse("truncate_prompt_tokens", f"must be -1, or 1 to {limit}")
        return Truncation(limit if most < 0 else most, self.truncation_side)


# Fields of vLLM's bodies that change nothing at these values.
_KNOWN = {
    "mm_processor_kwargs": Known(({},)),
    "padding": Known(("do_not_pad",)),
    "priority": Known((0,)),
    "use_activation": Known((True,)),
}
_KNOWN_OF_EMBEDDINGS = _KNOWN | {
    "add_special_tokens": Known((True,)),
    "chat_template": Known((), "the model's own is used"),
    "dimensions": Known((), "embeddings have the model's own size"),
    "embed_dtype": Known(("float32",)),
    "endianness": Known(("native", "little")),
    "media_io_kwargs": Known(({},)),
}
_KNOWN_OF_SCORES = _KNOWN | {
    "chat_template_kwargs": Known(({},)),
    "instruction": Known(),
    "max_tokens_per_doc": Known((0,)),
    "max_tokens_per_query": Known((0,)),
}


class EmbeddingBody(TruncatedBody, kw_only=True):
    """Fields of embeddings: inputs, or a conversation."""

    input: Annotated[
        str | list[TokenId | str | list[TokenId]] | None,
        Meta(description="A text, its token ids, or a list of several."),
    ] = None
    messages: Annotated[
        Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None,
        Meta(description="A conversation without images, in place of `input`."),
    ] = None
    chat_template_kwargs: Variables = None
    add_generation_prompt: Annotated[
        bool | None, Meta(description="The conversation ends as before an answer. Default: false.")
    ] = None
    continue_final_message: Annotated[
        bool | None, Meta(description="The conversation ends within its last message.")
    ] = None
    encoding_format: Annotated[
        Literal["float", "base64", "bytes", "bytes_only"] | None,
        Meta(
            description="bytes: the vectors alone, float32 and little-endian, and the rest as JSON "
            "in the header `metadata`, which bytes_only leaves out."
        ),
    ] = None

    input_field: ClassVar[str] = "input"

    def listed(self) -> list[Input]:
        if self.messages is not None:
            if self.input is not None:
                refuse("messages", "cannot be combined with input")
            messages = [x.parse(f"messages[{i}]") for i, x in enumerate(self.messages)]
            chat = Conversation(
                without_billing(messages),
                bool(self.add_generation_prompt),
                bool(self.continue_final_message),
                template_variables(self.chat_template_kwargs, None),
            )
            if chat.images:
                refuse("messages", "has an image, and images have no embeddings here")
            return [chat]
        if self.input is None:
            refuse("input", "is required")
        found = prompts_of(self.input, "input", MAX_INPUTS)
        if not all(found):
            refuse("input", f"must be 1 to {MAX_INPUTS} texts that are not empty")
        return [*found]

    def without_inputs(self) -> PoolingBody:
        return structs.replace(self, input="-", messages=None)


@knows(_KNOWN_OF_EMBEDDINGS)
class EmbeddingsRequest(EmbeddingBody, kw_only=True):
    """Body of POST /v1/embeddings."""


@knows(_KNOWN_OF_EMBEDDINGS | {"task": Known(("embed",))})
class PoolRequest(EmbeddingBody, kw_only=True):
    """Body of POST /pooling."""


EmbeddingType = Literal["float", "base64", "binary", "ubinary"]


@knows(
    {
        "images": Known(([],)),
        "inputs": Known(([],), "use texts"),
        "output_dimension": Known((), "embeddings have the model's own size"),
        "priority": Known((0,)),
    }
)
class CohereEmbedRequest(PoolingBody, kw_only=True):
    """Body of POST /v2/embed."""

    texts: _Texts
    input_type: Ignored = None
    embedding_types: Annotated[
        list[EmbeddingType] | None,
        Meta(description="float by default. binary, ubinary: the signs of 8 numbers in one."),
    ] = None
    truncate: Annotated[
        Literal["NONE", "START", "END"] | None,
        Meta(description="Cut the first or the last tokens beyond `max_tokens`. Default: END."),
    ] = None
    max_tokens: Annotated[
        Count | None, Meta(description="Most tokens of a text. Default: the model's context.")
    ] = None
    input_field: ClassVar[str] = "texts"

    def listed(self) -> list[Input]:
        return [*self.texts]

    def without_inputs(self) -> PoolingBody:
        return self

    def truncation(self, model: ModelInfo) -> Truncation | None:
        most, limit = self.max_tokens or model.max_model_len, model.max_model_len
        if most > limit:
            refuse("max_tokens", f"must be 1 to {limit}")
        if self.truncate == "NONE":
            if self.max_tokens is not None:
                refuse("max_tokens", "requires truncate to be START or END")
            return None
        return Truncation(most, "left" if self.truncate == "START" else None)


@knows(_KNOWN_OF_SCORES)
class ScoreRequest(TruncatedBody, kw_only=True):
    """Body of POST /v1/score: one text against several, or two lists pair by pair."""

    text_1: Text | _Texts | None = None
    text_2: Text | _Texts | None = None
    queries: Annotated[Text | _Texts | None, Meta(description="Same as text_1.")] = None
    documents: Annotated[Text | _Texts | None, Meta(description="Same as text_2.")] = None
    input_field: ClassVar[str] = "text_2"

    def listed(self) -> list[Input]:
        """Return the pairs. Raises InvalidRequest unless `text_1` is one text, or both lists have
        the same length."""
        first = _one_of("text_1", self.text_1, "queries", self.queries)
        second = _one_of("text_2", self.text_2, "documents", self.documents)
        if len(first) not in (1, len(second)):
            refuse("text_1", f"must be one text, or {len(second)} like text_2")
        first *= len(second) if len(first) == 1 else 1
        return [TextPair(*pair) for pair in zip(first, second, strict=True)]

    def without_inputs(self) -> PoolingBody:
        return structs.replace(self, text_1="-", text_2="-", queries=None, documents=None)


def _one_of(
    name: str, given: str | list[str] | None, other: str, same: str | list[str] | None
) -> list[str]:
    """Return the texts of a field that has two names. Raises InvalidRequest."""
    if given is not None and same is not None:
        refuse(other, f"cannot be combined with {name}")
    found = same if given is None else given
    if found is None:
        refuse(name, "is required")
    return [found] if isinstance(found, str) else found


@knows(_KNOWN_OF_SCORES)
class RerankRequest(TruncatedBody, kw_only=True):
    """Body of POST /v1/rerank."""

    query: Text
    documents: _Texts
    top_n: Annotated[Annotated[int, Meta(ge=0)] | None, Meta(description="0: all.")] = None
    return_documents: bool | None = None
    input_field: ClassVar[str] = "documents"

    def listed(self) -> list[Input]:
        return [TextPair(self.query, document) for document in self.documents]

    def without_inputs(self) -> PoolingBody:
        return (
            self if self.return_documents is not False else structs.replace(self, documents=["-"])
        )


PoolingRequest = EmbeddingsRequest | PoolRequest | CohereEmbedRequest | ScoreRequest | RerankRequest
