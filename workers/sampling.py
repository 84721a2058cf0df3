"""Sampling parameters to vLLM's, and vLLM's logprobs to ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.sampling_params import SamplingParams as VllmSamplingParams

from pdserve.errors import InvalidRequest
from pdserve.types import Constraint, PositionLogprobs, TokenLogprob
from workers.engine import PrefillPhase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.logprobs import Logprob

    from pdserve.types import SamplingParams, StructuredOutput
    from workers.engine import Work


def token_limits(work: Work) -> tuple[int, int]:
    """(min_tokens, max_tokens) of this phase. Resumed tokens count as generated, so prefill work
    stops one token after them."""
    sampling, resumed = work.sampling, len(work.resume_token_ids)
    if resumed >= sampling.max_tokens:
        raise InvalidRequest(
            f"resume_token_ids has {resumed} tokens, and max_tokens is {sampling.max_tokens}",
            field="resume_token_ids",
        )
    if isinstance(work.phase, PrefillPhase):
        return min(sampling.min_tokens, resumed + 1), resumed + 1
    return sampling.min_tokens, sampling.max_tokens


def to_vllm(work: Work, transfer: Mapping[str, Any]) -> VllmSamplingParams:
    """`transfer` is what the connector is told (workers/kv_params.py). Raises InvalidRequest, or
    vLLM's validation error, for values that vLLM does not take."""
    sampling = work.sampling
    if sampling.n != 1:
        raise InvalidRequest(f"n must be 1 on a worker, not {sampling.n}", field="n")
    min_tokens, max_tokens = token_limits(work)
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
        logit_bias=dict(sampling.logit_bias) or None,
        skip_special_tokens=sampling.skip_special_tokens,
        structured_outputs=_structured(sampling),
        detokenize=True,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"kv_transfer_params": dict(transfer)} if transfer else None,
        skip_clone=True,
    )


def _structured(sampling: SamplingParams) -> StructuredOutputsParams | None:
    wanted: StructuredOutput | None = sampling.structured_output
    if wanted is None:
        return None
    match wanted.kind:
        case Constraint.JSON_SCHEMA:
            return StructuredOutputsParams(json=wanted.value)
        case Constraint.JSON_OBJECT:
            return StructuredOutputsParams(json_object=True)
        case Constraint.REGEX:
            return StructuredOutputsParams(regex=wanted.value)
        case Constraint.CHOICE:
            return StructuredOutputsParams(choice=list(wanted.choices))
        case Constraint.GRAMMAR:
            return StructuredOutputsParams(grammar=wanted.value)


def from_vllm_logprobs(
    token_ids: Sequence[int], positions: Sequence[Mapping[int, Logprob]] | None, count: int
) -> tuple[PositionLogprobs, ...]:
    """The logprobs of a delta; `count` alternatives were asked for.

    vLLM gives one mapping a position: the sampled token first, then the best `count`, in which the
    sampled one may be.
    """
    if not positions:
        return ()
    return tuple(
        _position(token_id, entries, count)
        for token_id, entries in zip(token_ids, positions, strict=True)
    )


def _position(token_id: int, entries: Mapping[int, Any], count: int) -> PositionLogprobs:
    sampled = _token(token_id, entries[token_id])
    every = [_token(other, entry) for other, entry in entries.items()]
    best = every if len(every) <= count else every[1:]
    return PositionLogprobs(sampled, tuple(sorted(best, key=lambda t: t.rank)))


def _token(token_id: int, entry: Any) -> TokenLogprob:
    return TokenLogprob(token_id, entry.decoded_token or "", entry.logprob, entry.rank)
