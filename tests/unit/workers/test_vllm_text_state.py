"""Text and logprobs made by two engines in turn are those of one. The reference is vLLM's own state
of a request, fed token by token. The first engine's state ends at the split; the second
continues from its tokens."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.tiny_models import EOS
from workers.engine import AggregatedPhase, Work

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TEXTS = {
    "plain": "the quick brown fox jumps over the lazy dog",
    "accents": "café naïve über jalapeño",
    "wide": "漢字 かな 東京 ok",
    "emoji": "a🙂🙃 🚀b 👩‍👩‍👧 c",
    "broken": "xé\x00y\x7fÿ done",
}


@dataclass(slots=True)
class Vllm:
    """vLLM's classes, imported late because they need its environment."""

    tokenizer: Any
    RequestState: Any
    EngineCoreRequest: Any

    def state(
        self,
        stop: Sequence[str],
        include: bool,
        min_tokens: int,
        prompt: Sequence[int] = (1, 2, 3),
    ) -> Any:
        from pdserve.types import SamplingParams
        from workers.vllm.step.sampling import to_vllm

        sampling = SamplingParams(
            max_tokens=1000,
            stop=tuple(stop),
            include_stop_str_in_output=include,
            min_tokens=min_tokens,
            logprobs=0,
        )
        work = Work(1, "r", tuple(prompt), sampling, AggregatedPhase())
        request = self.EngineCoreRequest(
            request_id="r-1",
            external_req_id="r",
            prompt_token_ids=list(prompt),
            mm_features=None,
            sampling_params=to_vllm(work, {}),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        return self.RequestState.from_new_request(
            tokenizer=self.tokenizer,
            request=request,
            prompt=None,
            parent_req=None,
            request_index=0,
            queue=None,
            log_stats=False,
            stream_interval=1,
        )


@pytest.fixture(scope="module")
def vllm(tiny_model: Path) -> Vllm:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.output_processor import RequestState
    tokenizer = AutoTokenizer.from_pretrained(tiny_model, local_files_only=True)
    return Vllm(tokenizer, RequestState, EngineCoreRequest)


@dataclass(slots=True)
class Output:
    """The deltas sent, and the end of the answer."""

    text: str = ""
    token_texts: list[str] = field(default_factory=list)
    stopped: str | None = None


def generate(state: Any, tokens: Sequence[int], *, goes_on: bool = False) -> Output:
    """Feeds `tokens` as an engine's steps do. With `goes_on` the request ends after them as prefill
    work ends: the answer goes on elsewhere."""
    import numpy as np
    from vllm.v1.outputs import LogprobsLists

    from workers.vllm.step import sampling as text_state

    out = Output()
    for index, token in enumerate(tokens):
        out.stopped = state.detokenizer.update([token], False)
        sampled = LogprobsLists(np.array([[token]]), np.array([[-0.5]]), np.array([1]), None)
        state.logprobs_processor._update_sample_logprobs(sampled)
        out.token_texts.append(state.logprobs_processor.logprobs[-1][token].decoded_token)
        finished = out.stopped is not None or index == len(tokens) - 1
        text = state.detokenizer.get_next_output_text(finished, True)
        if finished and out.stopped is None and goes_on:
            text = text_state.held_back(state, text)
        out.text += text
        if out.stopped is not None:
            break
    return out


def splits(vllm: Vllm, tokens: Sequence[int], settings: tuple[Any, ...]) -> None:
    """Asserts that every split of `tokens` gives what the whole gives."""
    from workers.vllm.step import sampling as text_state

    whole = generate(vllm.state(*settings), tokens)
    for cut in range(1, len(whole.token_texts)):
        for resumed in (False, True):
            head, tail = tokens[:cut], tokens[cut:]
            sent = sent_before(vllm, head, settings, cut_off=resumed)
            second = vllm.state(*settings)
            assert text_state.feed(second, head) is None
            rest = generate(second, tail)
            assert sent.text + rest.text == whole.text, (cut, resumed)
            assert sent.token_texts + rest.token_texts == whole.token_texts, (cut, resumed)
            assert rest.stopped == whole.stopped, (cut, resumed)


def sent_before(
    vllm: Vllm, head: Sequence[int], settings: tuple[Any, ...], *, cut_off: bool
) -> Output:
    """Return the first engine's part, which ended as a prefill does or broke off."""
    state = vllm.state(*settings)
    if not cut_off:
        return generate(state, head, goes_on=True)
    broken = generate(vllm.state(*settings), head)
    for token in head:
        state.detokenizer.update([token], False)
    broken.text = state.detokenizer.get_next_output_text(False, True)
    return broken


@pytest.mark.parametrize("name", list(TEXTS))
@pytest.mark.parametrize("min_tokens", [0, 4])
def test_two_parts_make_the_text_of_one(vllm: Vllm, name: str, min_tokens: int) -> None:
    tokens = vllm.tokenizer.encode(TEXTS[name])
    assert len(tokens) > 4
    splits(vllm, tokens, ((), False, min_tokens))


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("name", list(TEXTS))
def test_a_stop_string_is_found_across_the_seam(vllm: Vllm, name: str, include: bool) -> None:
    text = TEXTS[name]
    tokens = vllm.tokenizer.encode(text)
    middle = len(text) // 2
    for stop in ({text[middle : middle + 3]}, {text[3:9], "never"}, {text[-2:]}, {"nowhere"}):
        splits(vllm, tokens, (sorted(stop), include, 0))


def test_bytes_that_are_no_character_are_the_same_in_two_parts(vllm: Vllm) -> None:
    tokens = [*range(100, 200, 7), vllm.tokenizer.convert_tokens_to_ids(EOS), *range(30, 60, 5)]
    splits(vllm, tokens, (("zz", "e"), False, 0))
    splits(vllm, tokens, ((), False, 0))


def test_the_first_part_keeps_back_what_may_become_a_stop_string(vllm: Vllm) -> None:
    from workers.vllm.step import sampling as text_state

    tokens = vllm.tokenizer.encode("the quick brown fox")
    settings = (("quick brown",), False, 0)
    first = generate(vllm.state(*settings), tokens[:2], goes_on=True)
    whole = generate(vllm.state(*settings), tokens)
    assert (whole.stopped, whole.text) == ("quick brown", "the ")
    assert whole.text.startswith(first.text)
    assert text_state.feed(vllm.state(("quick",), False, 0), tokens) == "quick"


@pytest.mark.parametrize("name", list(TEXTS))
def test_a_character_that_the_prompt_begins_is_completed_by_the_answer(
    vllm: Vllm, name: str
) -> None:
    from workers.vllm.patches.detokenize import mend_start

    tokens = vllm.tokenizer.encode(TEXTS[name])
    for cut in range(1, len(tokens)):
        state = vllm.state((), False, 0, prompt=tokens[:cut])
        mend_start(state.detokenizer, vllm.tokenizer, tokens[:cut])
        begun = vllm.tokenizer.decode(tokens[:cut]).rstrip("\ufffd")
        assert begun + generate(state, tokens[cut:]).text == TEXTS[name], cut


def test_broken_bytes_of_the_prompt_are_not_repeated(vllm: Vllm) -> None:
    from workers.vllm.patches.detokenize import mend_start

    broken = [vllm.tokenizer.encode("漢")[-1]] * 6
    prompt = [*vllm.tokenizer.encode("a long prompt "), *broken]
    state = vllm.state((), False, 0, prompt=prompt)
    mend_start(state.detokenizer, vllm.tokenizer, prompt)
    assert generate(state, vllm.tokenizer.encode("ok then")).text == "ok then"
