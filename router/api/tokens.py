"""Bodies of /tokenize and /detokenize, with vLLM's fields."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.api.bodies import Body, Known, ModelName, TokenIds, knows, refuse
from router.api.openai import Begins, Continues, Effort, Message, Variables, conversation

if TYPE_CHECKING:
    from pdserve.tokenizer import Conversation


@knows(
    {
        "chat_template": Known((), "the model's own is used"),
        "media_io_kwargs": Known(({},)),
        "mm_processor_kwargs": Known(({},)),
        "return_token_strs": Known((False,), "use /detokenize"),
        "tools": Known(([],)),
    }
)
class TokenizeRequest(Body, kw_only=True):
    """Body of POST /tokenize: a text, or a conversation."""

    model: ModelName = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: Variables = None
    reasoning_effort: Effort = None
    add_generation_prompt: Begins = None
    continue_final_message: Continues = None

    def content(self) -> str | Conversation:
        """Raises InvalidRequest naming the field."""
        if self.prompt is None and not self.messages:
            refuse("prompt", "or 'messages' is required")
        if self.prompt is not None and self.messages:
            refuse("messages", "cannot be combined with prompt")
        return conversation(self) if self.prompt is None else self.prompt


class DetokenizeRequest(Body, kw_only=True):
    """Body of POST /detokenize."""

    model: ModelName = None
    tokens: TokenIds
