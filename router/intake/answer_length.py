"""How long a prompt and its answer may be, and which sampling parameters the answer gets."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pdserve.errors import ContextLengthExceeded, InvalidRequest
from router.dialects.parsed_request import OPEN_ENDED
from router.intake.tokenise import check_context, check_ids

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.types import ModelInfo, SamplingParams
    from router.dialects.parsed_request import ParsedRequest

# Logprobs of one prompt, including alternatives: more would delay the tokens of other streams.
MAX_PROMPT_LOGPROBS = 1 << 15
# Sum of tokens and logprobs of all answers to a request. An answer that is not streamed is kept in
# memory until all are complete.
MAX_ANSWER_TOKENS = 1 << 18


def fitted_sampling(parsed: ParsedRequest, prompt_tokens: int, model: ModelInfo) -> SamplingParams:
    """Return the sampling parameters of a request whose prompt has `prompt_tokens` tokens, with the
    model's defaults. Raises InvalidRequest naming the field that the model or a limit does not
    allow."""
    sampling = _with_defaults(parsed, model.sampling_defaults)
    check_ids(sampling.stop_token_ids, model, field="stop_token_ids")
    check_ids(tuple(sampling.logit_bias), model, field="logit_bias")
    _check_scores(parsed, sampling, prompt_tokens)
    sampling = _fit(parsed, sampling, prompt_tokens, model)
    _check_resume(parsed.resume, sampling, model)
    return sampling


def _with_defaults(parsed: ParsedRequest, defaults: Mapping[str, float]) -> SamplingParams:
    """Return the sampling parameters, with the model's defaults where the client set none."""
    missing: dict[str, Any] = {
        name: int(value) if name == "top_k" else value
        for name, value in defaults.items()
        if name not in parsed.given and name != "max_tokens"  # `_fit` applies this one
    }
    return replace(parsed.sampling, **missing) if missing else parsed.sampling


def _check_scores(parsed: ParsedRequest, sampling: SamplingParams, prompt_tokens: int) -> None:
    if sampling.prompt_logprobs is None:
        return
    if parsed.resume:
        raise InvalidRequest(
            "'resume_token_ids' cannot be combined with logprobs of the prompt",
            field="resume_token_ids",
        )
    most = MAX_PROMPT_LOGPROBS // (sampling.prompt_logprobs + 1)
    if prompt_tokens > most:
        field = parsed.prompt_field
        raise InvalidRequest(
            f"'{field}' has {prompt_tokens} tokens; with logprobs of it and "
            f"{sampling.prompt_logprobs} alternatives it may have {most}",
            field=field,
        )


def _check_resume(resume: tuple[int, ...], sampling: SamplingParams, model: ModelInfo) -> None:
    field = "resume_token_ids"
    check_ids(resume, model, field=field)
    if resume and sampling.n > 1:
        raise InvalidRequest(f"'{field}' requires n to be 1, not {sampling.n}", field=field)
    if len(resume) > sampling.max_tokens:
        raise InvalidRequest(
            f"'{field}' has {len(resume)} tokens; the answer may have {sampling.max_tokens}",
            field=field,
        )


def _fit(
    parsed: ParsedRequest, sampling: SamplingParams, prompt_tokens: int, model: ModelInfo
) -> SamplingParams:
    """Return the sampling parameters with a `max_tokens` that fits the context."""
    left = check_context(prompt_tokens, model, field=parsed.prompt_field)
    longest = _longest_answer(parsed, sampling)
    if sampling.max_tokens == OPEN_ENDED:
        most = parsed.default_tokens or int(model.sampling_defaults.get("max_tokens", left))
        return replace(sampling, max_tokens=min(left, most, longest))
    if sampling.max_tokens > left:
        field = parsed.max_tokens_field
        raise ContextLengthExceeded(
            f"'{parsed.prompt_field}' has {prompt_tokens} tokens and '{field}' is "
            f"{sampling.max_tokens}; the model's context is {model.max_model_len} tokens",
            field=field,
        )
    if sampling.max_tokens > longest:
        field = parsed.max_tokens_field
        raise InvalidRequest(
            f"'{field}' is {sampling.max_tokens}; with {parsed.prompts * sampling.n} answers and "
            f"{sampling.logprobs or 0} logprobs a token it may be {longest}",
            field=field,
        )
    return sampling


def _longest_answer(parsed: ParsedRequest, sampling: SamplingParams) -> int:
    """Return the longest answer that a request may ask for, in tokens. Only the context limits a
    single answer without logprobs."""
    answers = parsed.prompts * sampling.n
    if answers == 1 and sampling.logprobs is None:
        return OPEN_ENDED
    return MAX_ANSWER_TOKENS // (answers * ((sampling.logprobs or 0) + 1))
