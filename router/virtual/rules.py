"""Rules of a virtual model: which model answers a request. Nothing here waits or changes."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - hypothesis reads the hints of a Struct
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from pdserve.config import EscalateConfig, ModelRuleConfig
from pdserve.config.virtual_models import DEFAULT_RULE, OVERRIDE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.config import VirtualModelConfig


class ModelFacts(Struct, frozen=True):
    """A model, as this request would find it now. `ttft_s`, `cost`: predicted, None if not known.
    `cannot`: why it can never take the request. `busy`: why it takes none now."""

    ttft_s: float | None = None
    cost: float | None = None
    cannot: str = ""
    busy: str = ""


class RequestFacts(Struct, frozen=True):
    """Everything that the rules read. `answers`: number of answers requested. `budget_left`: share
    of the tenant's rates. `allowed`: models that the tenant may use, None for all. `models`: has
    each model of the virtual model. `label`: "" for none, None if it is not known yet. `override`:
    the model that the request's header names, or ""."""

    prompt_tokens: int
    models: Mapping[str, ModelFacts]
    answers: int = 1
    has_tools: bool = False
    has_images: bool = False
    tenant: str = ""
    budget_left: float = 1.0
    allowed: frozenset[str] | None = None
    label: str | None = ""
    override: str = ""


class ChosenModel(Struct, frozen=True):
    """The model that answers, and the name of the rule that chose it. `skipped`: the rules before
    it, with the reasons why they do not apply. `escalate`: the check of the answer, or None."""

    model: str
    rule: str
    skipped: tuple[str, ...] = ()
    escalate: EscalateConfig | None = None


class ModelsRefused(Struct, frozen=True):
    """No model answers. `kind`: the override is not a model of the virtual model; the tenant may
    not use the model; no model can take this request; or those that can are busy."""

    kind: Literal["not_listed", "not_allowed", "unfit", "busy"]
    reason: str


def choose(model: VirtualModelConfig, facts: RequestFacts) -> ChosenModel | ModelsRefused:
    """Return the model of the first rule that applies. An override replaces the rules, and chooses
    only among the models that the tenant may use."""
    assert facts.label is not None or facts.override, "the label is known"
    if facts.override and facts.override not in model.models:
        listed = ", ".join(model.models)
        return ModelsRefused(
            "not_listed", f"{facts.override!r} is no model of {model.name}: {listed}"
        )
    skipped: list[str] = []
    kinds: list[Literal["not_allowed", "unfit", "busy"]] = []
    for rule in _rules(model, facts.override):
        why_not = next(_unmet(rule, facts), "")
        if not why_not:
            if not (found := _unusable(rule.model, facts)):
                escalate = rule.escalate if rule.escalate.to else None
                return ChosenModel(rule.model, rule.name, tuple(skipped), escalate)
            kind, why_not = found
            kinds.append(kind)
            if kind == "busy" and not rule.next_if_busy:
                return ModelsRefused("busy", why_not)
        skipped.append(f"{rule.name}: {why_not}")
    # What may pass, or what a smaller request changes, is reported before what never changes.
    kind = min(kinds, key=("busy", "unfit", "not_allowed").index)
    return ModelsRefused(kind, "; ".join(skipped))


def wants_label(model: VirtualModelConfig, facts: RequestFacts) -> bool:
    """Return True if a rule's label decides. `facts` has none yet."""
    if facts.override or not model.classifier.model:
        return False
    for rule in model.rules:
        if not next(_unmet(rule, facts), "") and not _unusable(rule.model, facts):
            return bool(rule.labels)
    return False


def _rules(model: VirtualModelConfig, override: str) -> tuple[ModelRuleConfig, ...]:
    if override:
        return (ModelRuleConfig(name=OVERRIDE, model=override),)
    return (*model.rules, ModelRuleConfig(name=DEFAULT_RULE, model=model.default))


def _unusable(
    name: str, facts: RequestFacts
) -> tuple[Literal["not_allowed", "unfit", "busy"], str] | None:
    """Return why a model cannot answer now, None if it can."""
    if facts.allowed is not None and name not in facts.allowed:
        return "not_allowed", f"tenant {facts.tenant} may not use model {name}"
    if reason := facts.models[name].cannot:
        return "unfit", f"model {name}: {reason}"
    if reason := facts.models[name].busy:
        return "busy", f"model {name}: {reason}"
    return None


def _unmet(rule: ModelRuleConfig, facts: RequestFacts) -> Iterator[str]:
    """Yield the conditions of a rule that the request does not meet."""
    tokens, target = facts.prompt_tokens, facts.models[rule.model]
    if tokens <= rule.prompt_tokens_above and rule.prompt_tokens_above:
        yield f"{tokens} prompt tokens, not above {rule.prompt_tokens_above}"
    if 0 < rule.prompt_tokens_up_to < tokens:
        yield f"{tokens} prompt tokens, above {rule.prompt_tokens_up_to}"
    for what, wanted, has in (
        ("tools", rule.tools, facts.has_tools),
        ("images", rule.images, facts.has_images),
    ):
        if wanted != "any" and (wanted == "with") is not has:
            yield f"{'has' if has else 'no'} {what}"
    if rule.tenants and facts.tenant not in rule.tenants:
        yield f"tenant {facts.tenant or '(none)'}"
    if rule.budget_left_below and facts.budget_left >= rule.budget_left_below:
        yield f"{facts.budget_left:.0%} of the budget is left"
    if rule.max_ttft_s and (target.ttft_s or 0.0) > rule.max_ttft_s:
        yield f"predicted TTFT {target.ttft_s:.3f} s, above {rule.max_ttft_s:g}"
    if rule.max_cost and (target.cost or 0.0) > rule.max_cost:
        yield f"predicted price {target.cost:.3g}, above {rule.max_cost:g}"
    if (to := rule.escalate.to) and facts.answers > 1:
        yield f"{facts.answers} answers cannot be held back"
    elif to and (found := _unusable(to, facts)) and found[0] != "busy":
        yield f"escalation: {found[1]}"
    if rule.labels and facts.label is not None and facts.label not in rule.labels:
        yield f"label {facts.label or '(none)'}"
