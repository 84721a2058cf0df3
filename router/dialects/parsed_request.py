"""What every dialect that generates parses a body to."""

from __future__ import annotations

from collections.abc import Collection, Mapping  # noqa: TC003 - msgspec reads the annotations
from typing import Any

from msgspec import Struct, field

from pdserve.model.tokenizer import Conversation
from pdserve.types import SamplingParams, ServiceClass, StaleKv

# `max_tokens` of a request without a limit. It becomes the rest of the context once the prompt's
# length is known.
OPEN_ENDED = 1 << 30

# Text, token ids, or a conversation that the model's chat template renders.
Prompt = str | tuple[int, ...] | Conversation


class PromptText(Struct, frozen=True, eq=False):
    """A prompt to render and tokenise. `field`: its name in the client's API, for errors.
    `add_special_tokens`: by default for text, and not for conversations."""

    prompt: Prompt
    field: str
    add_special_tokens: bool | None = None


class ParsedRequest(Struct, frozen=True, eq=False):
    """One prompt of a body. Its fields are checked one by one, but not yet against the model.

    `given`: names of the sampling parameters that the client set. `sampling.max_tokens`: OPEN_ENDED
    if the client set no limit. `prompt_field`, `max_tokens_field`, `constraint_field`: names of
    these fields in the client's API, for errors. `session`: the session that the body names, or "";
    then a request that `starts_session` names one by its own id.
    """

    model: str
    prompt: Prompt
    sampling: SamplingParams
    prompt_field: str = "prompt"
    max_tokens_field: str = "max_tokens"
    default_tokens: int | None = None  # the API's own default of max_tokens
    constraint_field: str = "structured_output"
    priority: int = 0
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    resume: tuple[int, ...] = ()
    given: Collection[str] = ()
    add_special_tokens: bool | None = None  # as in PromptText
    cache_salt: str = ""
    stale_kv: StaleKv | None = None
    session: str = ""
    starts_session: bool = False
    echo: bool = False
    only_prompt: bool = False  # echo the prompt and generate nothing
    prompts: int = 1  # number of prompts in the client's request
    # Fields of vLLM's chat request that control how the answer is parsed: tool_choice, ...
    parsing_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def grammar_field(self) -> str:
        """The field from which the answer's grammar is built."""
        has_tools = isinstance(self.prompt, Conversation) and self.prompt.tools
        return "tools" if has_tools else self.constraint_field
