"""Conversion of sampling parameters and logprobs, and the text state of continued requests.

vLLM keeps state to convert tokens to text (`RequestState`): a detokeniser (incomplete characters,
text held back because a stop string may be forming) and the context of logprobs. For a request that
continues here, this state must equal the other engine's, and no text may be repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logprobs import Logprob
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.sampling_params import SamplingParams as VllmSamplingParams

from pdserve.types import Constraint, PositionLogprobs, TokenLogprob
from workers.engine import PrefillPhase
from workers.vllm.step.routed_experts import WANTED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.types import StructuredOutput
    from workers.engine import Work


def to_vllm(work: Work, transfer: Mapping[str, Mapping[str, Any]]) -> VllmSamplingParams:
    """Convert the sampling parameters. `transfer` has the parameters of connectors, by vLLM's
    names. Raises vLLM's validation error for values that it refuses."""
    sampling, extra = work.sampling, {name: dict(values) for name, values in transfer.items()}
    if sampling.routed_experts:
        extra[WANTED] = {}
    min_tokens, max_tokens = sampling.min_tokens, sampling.max_tokens
    if isinstance(work.phase, PrefillPhase):  # it samples one token after the resumed ones
        max_tokens = len(work.resume_token_ids) + 1
        min_tokens = min(min_tokens, max_tokens)
    return VllmSamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        ignore_eos=sampling.ignore_eos,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logprobs=sampling.logprobs,
        prompt_logprobs=work.prompt_logprobs,
        skip_reading_prefix_cache=True if work.needs_whole_prompt else None,
        logit_bias=dict(sampling.logit_bias) or None,
        skip_special_tokens=sampling.skip_special_tokens,
        structured_outputs=structured_to_vllm(sampling.structured_output),
        detokenize=True,
        output_kind=RequestOutputKind.DELTA,
        extra_args=extra or None,
        skip_clone=True,
    )


def structured_to_vllm(wanted: StructuredOutput | None) -> StructuredOutputsParams | None:
    if wanted is None:
        return None
    values: dict[Constraint, dict[str, Any]] = {
        Constraint.JSON_SCHEMA: {"json": wanted.value},
        Constraint.JSON_OBJECT: {"json_object": True},
        Constraint.REGEX: {"regex": wanted.value},
        Constraint.CHOICE: {"choice": list(wanted.choices)},
        Constraint.GRAMMAR: {"grammar": wanted.value},
        Constraint.STRUCTURAL_TAG: {"structural_tag": wanted.value},
    }
    return StructuredOutputsParams(**values[wanted.kind])


def from_vllm_logprobs(
    positions: Sequence[Mapping[int, Logprob]] | None, count: int
) -> tuple[PositionLogprobs, ...]:
    """Return the logprobs of a delta, with `count` alternatives.

    vLLM has one mapping per position: the sampled token first, then the best `count` tokens, which
    may include it.
    """
    found = []
    for entries in positions or ():
        every = [
            TokenLogprob(token_id, entry.decoded_token or "", entry.logprob, entry.rank)
            for token_id, entry in entries.items()
        ]
        best = every if len(every) <= count else every[1:]
        found.append(PositionLogprobs(every[0], tuple(sorted(best, key=lambda t: t.rank))))
    return tuple(found)


def feed(state: Any, token_ids: Sequence[int]) -> str | None:
    """Record `token_ids` as generated and their text as sent.

    Return the stop string that they complete, or None. With a stop string, the answer has ended.
    """
    detokenizer = state.detokenizer
    stopped = None
    for token_id in token_ids:
        stopped = stopped or detokenizer.update([token_id], False)
    # Mark the text as sent, except the part that the other engine also held back.
    detokenizer.get_next_output_text(finished=False, delta=True)
    # vLLM needs the last few ids for the texts of later tokens. It reads nothing else of these
    # entries, and takes a delta's logprobs from the end of the list.
    logprobs = state.logprobs_processor.logprobs
    if logprobs is not None:
        for token_id in token_ids:
            logprobs.append({token_id: Logprob(logprob=0.0, rank=1, decoded_token="")})
    return stopped


def held_back(state: Any, text: str) -> str:
    """Return the part of a last delta's `text` that may be sent if the answer continues elsewhere.

    vLLM releases all text at the end of a request. Characters that may become a stop string must
    not be sent here, because the next engine has them in its state.
    """
    keep = state.detokenizer.stop_buffer_length
    return text[: max(0, len(text) - keep)]
