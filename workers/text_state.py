"""The text side of a request that another engine began.

vLLM makes text from tokens with per-request state: a detokeniser (incomplete characters, text held
back because a stop string may be forming) and the logprobs' context (texts of tokens that are parts
of a character). A request that goes on here has to stand where the other engine stood, without
saying again what was said. `state` is vLLM's `RequestState`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logprobs import Logprob

if TYPE_CHECKING:
    from collections.abc import Sequence


def feed(state: Any, token_ids: Sequence[int]) -> str | None:
    """Takes `token_ids` as generated and their text as sent.

    Returns the stop string that they complete, if they do: then the answer ended before it came
    here.
    """
    detokenizer = state.detokenizer
    stopped = None
    for token_id in token_ids:
        stopped = stopped or detokenizer.update([token_id], False)
    # The other engine sent all but what it held back; asking for it moves the mark of what is sent.
    detokenizer.get_next_output_text(finished=False, delta=True)
    _feed_logprobs(state.logprobs_processor, token_ids)
    return stopped


def _feed_logprobs(processor: Any, token_ids: Sequence[int]) -> None:
    # The texts of later tokens are made from the ids of the last few; nothing else of these entries
    # is read, and a delta's logprobs are cut from the end of the list.
    if processor.logprobs is not None:
        for token_id in token_ids:
            processor.logprobs.append({token_id: Logprob(logprob=0.0, rank=1, decoded_token="")})


def held_back(state: Any, text: str) -> str:
    """The part of a last delta's `text` that may be sent when the answer goes on elsewhere.

    vLLM lets go of everything at the end of a request. Here that end is only ours, so as many
    characters as may yet become a stop string stay behind: the next engine has them in its state.
    """
    keep = state.detokenizer.stop_buffer_length
    return text[: max(0, len(text) - keep)]
