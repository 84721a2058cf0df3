"""What holds of the choice of every virtual model, for any rules and any request."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from pdserve.config import (
    ClassifierConfig,
    Config,
    EscalateConfig,
    ModelRuleConfig,
    RouterConfig,
    VirtualModelConfig,
    parse,
)
from pdserve.errors import ConfigError
from router.virtual.rules import (
    ChosenModel,
    ModelFacts,
    ModelsRefused,
    RequestFacts,
    choose,
    wants_label,
)

NAMES = ("small", "medium", "large")
LABELS = ("easy", "hard")
CLASSIFIER = ClassifierConfig(model="embedder", examples={x: (x,) for x in LABELS})

names = st.sampled_from(NAMES)
parts = st.sampled_from(["any", "with", "without"])


@st.composite
def rules(draw: st.DrawFn, number: int) -> ModelRuleConfig:
    model = draw(names)
    to = draw(st.sampled_from(["", "", *(x for x in NAMES if x != model)]))
    return ModelRuleConfig(
        name=f"rule-{number}",
        model=model,
        prompt_tokens_above=draw(st.sampled_from([0, 0, 10, 100])),
        prompt_tokens_up_to=draw(st.sampled_from([0, 0, 200])),
        tools=draw(parts),
        images=draw(parts),
        tenants=draw(st.sampled_from([(), (), ("a",)])),
        labels=draw(st.sampled_from([(), (), ("easy",), ("hard",)])),
        budget_left_below=draw(st.sampled_from([0.0, 0.0, 0.5])),
        max_ttft_s=draw(st.sampled_from([0.0, 0.0, 1.0])),
        max_cost=draw(st.sampled_from([0.0, 0.0, 1.0])),
        next_if_busy=draw(st.booleans()),
        escalate=EscalateConfig(to=to, min_mean_logprob=-1.0) if to else EscalateConfig(),
    )


virtual_models = st.integers(0, 4).flatmap(
    lambda count: st.builds(
        VirtualModelConfig,
        name=st.just("auto"),
        default=names,
        rules=st.tuples(*(rules(i) for i in range(count))),
        classifier=st.just(CLASSIFIER),
    )
)
amounts = st.sampled_from([None, 0.5, 2.0])
models = st.builds(
    ModelFacts,
    ttft_s=amounts,
    cost=amounts,
    cannot=st.sampled_from(["", "", "", "too short"]),
    busy=st.sampled_from(["", "", "", "queue is full"]),
)
facts = st.builds(
    RequestFacts,
    prompt_tokens=st.sampled_from([0, 10, 50, 300]),
    models=st.fixed_dictionaries(dict.fromkeys(NAMES, models)),
    answers=st.sampled_from([1, 1, 3]),
    has_tools=st.booleans(),
    has_images=st.booleans(),
    tenant=st.sampled_from(["", "a", "b"]),
    budget_left=st.sampled_from([0.1, 0.9]),
    allowed=st.none() | st.frozensets(names, min_size=1),
    label=st.sampled_from(["", *LABELS]),
    override=st.sampled_from([*[""] * 6, *NAMES, "unknown"]),
)


@settings(max_examples=100)
@given(virtual_models, facts)
def test_each_request_gets_one_usable_model_or_a_refusal_that_says_why(
    model: VirtualModelConfig, given_facts: RequestFacts
) -> None:
    found = choose(model, given_facts)
    assert choose(model, given_facts) == found
    if isinstance(found, ModelsRefused):
        assert found.reason
        return
    assert found.model in model.models
    assert given_facts.allowed is None or found.model in given_facts.allowed
    target = given_facts.models[found.model]
    assert not target.cannot
    assert not target.busy
    if found.escalate is not None:
        assert given_facts.answers == 1
        assert given_facts.allowed is None or found.escalate.to in given_facts.allowed
        assert not given_facts.models[found.escalate.to].cannot


@settings(max_examples=100)
@given(virtual_models, facts)
def test_the_first_rule_that_applies_decides(
    model: VirtualModelConfig, given_facts: RequestFacts
) -> None:
    given_facts = structs.replace(given_facts, override="")
    found = choose(model, given_facts)
    if isinstance(found, ChosenModel):
        # The rules before it are skipped, in order and with reasons, and those after it not asked.
        order = [x.name for x in model.rules] + ["default"]
        before = order[: order.index(found.rule)]
        assert [x.partition(": ")[0] for x in found.skipped] == before
        assert all(x.partition(": ")[2] for x in found.skipped)
        rest = tuple(x for x in model.rules if x.name not in before)
        assert choose(structs.replace(model, rules=rest), given_facts) == structs.replace(
            found, skipped=()
        )


@settings(max_examples=100)
@given(virtual_models, facts)
def test_an_override_never_widens(model: VirtualModelConfig, given_facts: RequestFacts) -> None:
    found = choose(model, given_facts)
    if given_facts.override and isinstance(found, ChosenModel):
        assert found.model == given_facts.override
        assert found.rule == "override"
        assert found.escalate is None
    if given_facts.override not in ("", *model.models):
        assert isinstance(found, ModelsRefused)
        assert found.kind == "not_listed"


@settings(max_examples=100)
@given(virtual_models, facts)
def test_a_label_that_is_not_asked_for_does_not_matter(
    model: VirtualModelConfig, given_facts: RequestFacts
) -> None:
    unknown = structs.replace(given_facts, label=None)
    if wants_label(model, unknown):
        return
    found = {choose(model, structs.replace(given_facts, label=x)).__class__ for x in ("", *LABELS)}
    assert len(found) == 1
    if found == {ChosenModel}:
        chosen = [choose(model, structs.replace(given_facts, label=x)) for x in ("", *LABELS)]
        assert len({x.model for x in chosen if isinstance(x, ChosenModel)}) == 1


def rule(**values: Any) -> dict[str, Any]:
    return {"name": "r", "model": "a", **values}


@pytest.mark.parametrize(
    ("virtual", "key", "reason"),
    [
        ({"default": ""}, "router.virtual_models[0].default", "is required"),
        ({"default": "c"}, "router.virtual_models[0].default", "'c' is not served; served: a, b"),
        ({"name": "b"}, "router.virtual_models[0].name", "the name of a served model"),
        ({"rules": [rule(model="auto")]}, "router.virtual_models[0].rules[0].model", "cycle"),
        ({"rules": [rule(name="default")]}, "router.virtual_models[0].rules", "reserved"),
        ({"rules": [rule(labels=["x"])]}, "router.virtual_models[0].rules[0].labels", "no label"),
        ({"rules": [rule(tenants=["x"])]}, "router.virtual_models[0].rules[0].tenants", "none of"),
        (
            {"rules": [rule(escalate={"to": "a", "valid_json": True})]},
            "router.virtual_models[0].rules[0].escalate.to",
            "another model",
        ),
        (
            {"rules": [rule(escalate={"to": "b"})]},
            "router.virtual_models[0].rules[0].escalate.to",
            "together with a check",
        ),
        (
            {"classifier": {"model": "c", "examples": {"x": ["y"]}}},
            "router.virtual_models[0].classifier.model",
            "is not served",
        ),
    ],
)
def test_rules_that_cannot_work_are_refused_at_start(
    virtual: dict[str, Any], key: str, reason: str
) -> None:
    served = [{"model": "demo", "model_names": [x]} for x in ("a", "b")]
    router = {"virtual_models": [{"name": "auto", "default": "a", **virtual}]}
    with pytest.raises(ConfigError, match=reason) as error:
        parse(Config, {"up": {"models": served}, "router": router})
    assert error.value.field == key


def test_an_allow_list_names_models_that_can_be_served() -> None:
    tenants = [{"name": "t", "allowed_models": ["auto"]}]
    virtual = [{"name": "auto", "default": "a"}]
    with pytest.raises(ConfigError, match="is a virtual model") as error:
        parse(RouterConfig, {"tenants": tenants, "virtual_models": virtual})
    assert error.value.field == "tenants[0].allowed_models"


def test_the_configuration_in_the_documentation_is_valid() -> None:
    text = (Path(__file__).parents[3] / "docs" / "model-tiers.md").read_text("utf-8")
    whole, classifier = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    config = yaml.safe_load(whole)
    (virtual,) = config["router"]["virtual_models"]
    assert parse(Config, config).router.virtual_models[0].models == ("smollm2", "pdserve-demo")
    # The second block goes below the first one's virtual model.
    virtual |= yaml.safe_load(classifier)
    with pytest.raises(ConfigError, match="'minilm' is not served"):
        parse(Config, config)
    config["up"]["models"].append({"model": "x", "model_names": ["minilm"]})
    assert parse(Config, config).router.virtual_models[0].classifier.examples["code"]
