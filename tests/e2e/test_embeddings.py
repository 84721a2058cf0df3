"""Embeddings, scores and ranks of pooling workers on real vLLM, beside workers that generate."""

from __future__ import annotations

import json
import math
import signal
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
import torch
from tokenizers import Tokenizer, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast
from vllm.config import ModelConfig

from pdserve.errors import ConfigError
from tests.support.commands import ROOT
from tests.support.pdserve_up import up
from tests.support.timeouts import START_S, WAIT_S
from workers.vllm.start.args import is_cross_encoder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.served_up import ServedUp

TEXTS = ["What is prefill?", "Why do leaves turn red?"]
DOCUMENTS = [TEXTS[0], TEXTS[1] * 6]  # for the cross-encoder: the second has more than one block


@pytest.fixture
def ready(served_demo: ServedUp) -> dict[str, Any]:
    return served_demo.ready


@pytest.fixture
def client(ready: dict[str, Any]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{ready['http']}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(ready: dict[str, Any], path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(ready["http"] + path, json=body, timeout=WAIT_S)


def test_equal_texts_have_equal_embeddings_in_both_formats(
    client: openai.OpenAI, ready: dict[str, Any]
) -> None:
    name = client.models.list().data[0].id
    # OpenAI's client asks for base64 by itself.
    found = client.embeddings.create(model=name, input=[*TEXTS, TEXTS[0]])
    first, other, again = (x.embedding for x in found.data)
    assert (len(first), [x.index for x in found.data]) == (256, [0, 1, 2])
    assert first == again != other
    assert math.isclose(math.hypot(*first), 1.0, rel_tol=1e-3)
    plain = post(ready, "/v1/embeddings", {"input": TEXTS[0]}).json()["data"][0]["embedding"]
    assert plain == pytest.approx(first, abs=1e-6)
    assert found.usage.prompt_tokens == found.usage.total_tokens > 3
    # The same model generates beside it.
    assert client.completions.create(model=name, prompt="What is", max_tokens=3).choices[0].text


def test_scores_and_ranks_follow_the_embeddings(ready: dict[str, Any]) -> None:
    documents = [TEXTS[1], TEXTS[0], "prefill"]
    scored = post(ready, "/v1/score", {"text_1": TEXTS[0], "text_2": documents}).json()
    scores = [x["score"] for x in scored["data"]]
    assert scores[1] == pytest.approx(1.0, abs=1e-3)
    ranked = post(ready, "/v1/rerank", {"query": TEXTS[0], "documents": documents, "top_n": 2})
    results = ranked.json()["results"]
    assert [x["relevance_score"] for x in results] == pytest.approx(sorted(scores)[:0:-1], abs=1e-6)
    assert results[0] == results[0] | {"index": 1, "document": {"text": TEXTS[0]}}


def test_an_input_may_fill_the_context(client: openai.OpenAI, ready: dict[str, Any]) -> None:
    longest = (client.models.list().data[0].model_extra or {})["max_model_len"]
    ids = [20 + i % 1000 for i in range(longest + 1)]
    for body in ({"input": ids[:-1]}, {"input": ids, "truncate_prompt_tokens": -1}):
        found = post(ready, "/v1/embeddings", body).json()
        assert found["usage"]["prompt_tokens"] == longest
        assert len(found["data"][0]["embedding"]) == 256
    assert post(ready, "/v1/embeddings", {"input": ids}).status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("embeddings", {"input": []}, "input"),
        ("embeddings", {"input": [""]}, "input"),
        ("embeddings", {"input": [1, "a"]}, "input[1]"),
        ("embeddings", {"input": "a " * 9000}, "input"),
        ("embeddings", {"input": "a", "dimensions": 8}, "dimensions"),
        ("score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("rerank", {"query": "a", "documents": []}, "documents"),
        ("rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    ],
)
def test_invalid_values_are_refused_by_field(
    ready: dict[str, Any], path: str, body: dict[str, Any], field: str
) -> None:
    answer = post(ready, f"/v1/{path}", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def make_cross_encoder(folder: Path) -> list[float]:
    """Save a small BERT with one label. Return its scores of the first text with DOCUMENTS."""
    fast = Tokenizer.from_file(str(ROOT / "pdserve/demo/model/tokenizer.json"))
    end, pair = "<|end|>", "$A <|end|> $B:1 <|end|>:1"
    special = [(end, fast.token_to_id(end))]
    fast.post_processor = processors.TemplateProcessing("$A", pair, special_tokens=special)
    names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token=end, model_input_names=names
    )
    tokenizer.save_pretrained(folder)
    sizes = {"vocab_size": 1536, "hidden_size": 64, "intermediate_size": 64}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.5}
    config = BertConfig(num_labels=1, max_position_embeddings=128, **sizes, **layers)
    torch.manual_seed(0)
    model = BertForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    pairs = tokenizer([TEXTS[0]] * 2, DOCUMENTS, return_tensors="pt", padding=True)
    with torch.no_grad():
        scores: list[float] = torch.sigmoid(model(**pairs).logits).flatten().tolist()
    return scores


def test_a_cross_encoder_scores_pairs_and_embeds_nothing(tmp_path: Path) -> None:
    model = tmp_path / "model"
    expected = make_cross_encoder(model)
    pools = ("--engine", "vllm", "--prefill", "0", "--decode", "0", "--pooling", "1")
    exact = ("--set", "worker.engine_args={dtype: float32}")
    with up(tmp_path, *pools, "--model", str(model), *exact) as running:
        ready = running.wait_until_serving(within_s=START_S)
        scored = post(ready, "/v1/score", {"text_1": TEXTS[0], "text_2": DOCUMENTS}).json()
        assert [x["score"] for x in scored["data"]] == pytest.approx(expected, rel=1e-3)
        ranked = post(ready, "/v1/rerank", {"query": TEXTS[0], "documents": DOCUMENTS}).json()
        found = [x["relevance_score"] for x in ranked["results"]]
        assert found == pytest.approx(sorted(expected, reverse=True), rel=1e-3)
        refused = post(ready, "/v1/embeddings", {"input": "a"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
        running.send(signal.SIGINT)
        assert running.wait() == 0


@pytest.mark.parametrize("changes", [{"num_labels": 3}, {"use_sep_token": False}])
def test_other_classifiers_are_refused_by_name(changes: dict[str, object], tmp_path: Path) -> None:
    make_cross_encoder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="BertForSequenceClassification is not supported"):
        is_cross_encoder(ModelConfig(str(tmp_path), runner="pooling"))
