"""Virtual models: names for which ordered rules choose a model for each request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, field

from pdserve.config.fields import Amount, Count, Duration, Section, Text, about, refuse

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

# A body may be read once for each model, and each rule is evaluated for each request.
MAX_MODELS, MAX_RULES = 8, 32
MAX_EXAMPLES, MAX_EXAMPLE_CHARS = 256, 2000
_Part = Literal["any", "with", "without"]
DEFAULT_RULE, OVERRIDE = "default", "override"


class ClassifierConfig(Section, frozen=True):
    """Labels a request by its last user message: the label of the nearest example, by the cosine of
    their embeddings. Bodies over 64 KiB get no label."""

    model: Annotated[str, about("Model with pooling workers. Empty: no classifier.")] = ""
    examples: Annotated[
        dict[Text, tuple[Text, ...]],
        about("Example messages by label. They are embedded once."),
    ] = field(default_factory=dict)
    min_similarity: Annotated[
        float,
        Meta(ge=-1, le=1),
        about("A message that is less similar to every example gets no label."),
    ] = 0.0
    timeout_s: Annotated[
        Duration,
        about("""Seconds for the label. After that, and after a failure, the request has no
        label."""),
    ] = 0.25

    def __post_init__(self) -> None:
        texts = [x for each in self.examples.values() for x in each]
        if bool(self.model) != bool(texts):
            refuse("examples" if self.model else "model", "model and examples must be set together")
        if len(texts) > MAX_EXAMPLES or any(len(x) > MAX_EXAMPLE_CHARS for x in texts):
            text = f"at most {MAX_EXAMPLES} texts of {MAX_EXAMPLE_CHARS} characters are possible"
            refuse("examples", text)


class EscalateConfig(Section, frozen=True):
    """A check of the answer, which is held back until it passes. If it fails, another model answers
    from the beginning. The rule then applies only to requests with one answer."""

    to: Annotated[str, about("The model that answers then. Empty: answers are not checked.")] = ""
    tokens: Annotated[
        int, Meta(ge=1, le=4096), about("Number of tokens that are held back at most.")
    ] = 64
    timeout_s: Annotated[
        Duration, about("An answer that is held back for this many seconds fails.")
    ] = 10.0
    min_mean_logprob: Annotated[
        float,
        Meta(ge=-100, le=0),
        about("""The mean logprob of the held tokens must reach this. 0: not checked. Tokens of
        tool calls and reasoning do not count."""),
    ] = 0.0
    valid_json: Annotated[
        bool,
        about("""If the request asks for JSON, the whole answer must be JSON, and end within
        `tokens`."""),
    ] = False
    valid_tool_calls: Annotated[
        bool,
        about("""Tool calls must name a tool of the request, with arguments that fit its schema, and
        an answer to a request with tools must end within `tokens`."""),
    ] = False

    def __post_init__(self) -> None:
        checks = self.min_mean_logprob or self.valid_json or self.valid_tool_calls
        if bool(self.to) != bool(checks):
            keys = "min_mean_logprob, valid_json or valid_tool_calls"
            refuse("to", f"must be set together with a check: {keys}")


class ModelRuleConfig(Section, frozen=True):
    """A rule: it applies to a request that meets all its conditions."""

    name: Annotated[str, about("Name of the rule in receipts and metrics.")] = ""
    model: Annotated[str, about("Model or LoRA adapter that answers.")] = ""
    prompt_tokens_above: Annotated[Count, about("The prompt has more tokens. 0: any prompt.")] = 0
    prompt_tokens_up_to: Annotated[
        Count, about("The prompt has at most this many tokens. 0: any prompt.")
    ] = 0
    tools: Annotated[_Part, about("Whether the request has tools.")] = "any"
    images: Annotated[_Part, about("Whether the prompt has images.")] = "any"
    tenants: Annotated[tuple[Text, ...], about("The tenant is one of these. Empty: any.")] = ()
    labels: Annotated[
        tuple[Text, ...], about("The classifier's label is one of these. Empty: any.")
    ] = ()
    budget_left_below: Annotated[
        float,
        Meta(ge=0, le=1),
        about("""Less than this share of the tenant's rates, `requests_per_minute` and
        `tokens_per_minute`, is left. 0: any."""),
    ] = 0.0
    max_ttft_s: Annotated[
        Amount,
        about("""The TTFT that is predicted for `model` under its load is at most this, or not known
        yet. 0: any."""),
    ] = 0.0
    max_cost: Annotated[
        Amount,
        about("""The price that is predicted for `model` under its load is at most this, in the
        currency of `router.prices`, or not known yet. 0: any."""),
    ] = 0.0
    next_if_busy: Annotated[
        bool,
        about("""If the model has no ready worker, or refuses the request with 429 or 503 before its
        first token, the next rule that applies decides. Otherwise the request is refused."""),
    ] = True
    escalate: EscalateConfig = EscalateConfig()

    def __post_init__(self) -> None:
        if not self.model:
            refuse("model", "is required")
        if 0 < self.prompt_tokens_up_to <= self.prompt_tokens_above:
            refuse("prompt_tokens_up_to", "must be above prompt_tokens_above")
        if self.escalate.to == self.model:
            refuse("escalate.to", "must be another model than the rule's")


class VirtualModelConfig(Section, frozen=True):
    """A virtual model. The first rule that applies chooses the model of a request."""

    name: Annotated[str, about("Name that requests give as `model`.")] = ""
    default: Annotated[
        str,
        about("""Model of requests to which no rule applies. Its tokenizer counts the prompt tokens
        if it has workers, and the context for the prompt."""),
    ] = ""
    rules: Annotated[tuple[ModelRuleConfig, ...], about("Rules, in order.")] = ()
    classifier: ClassifierConfig = ClassifierConfig()

    def __post_init__(self) -> None:
        if not self.name:
            refuse("name", "must not be empty")
        if not self.default:
            refuse("default", "is required: the model of requests to which no rule applies")
        names = [x.name for x in self.rules]
        if not all(names) or len({*names, DEFAULT_RULE, OVERRIDE}) != len(names) + 2:
            reserved = f"{DEFAULT_RULE} and {OVERRIDE} are reserved"
            refuse("rules", f"each rule needs a name of its own; {reserved}")
        if len(self.rules) > MAX_RULES:
            refuse("rules", f"at most {MAX_RULES} rules are possible")
        if len(self.models) > MAX_MODELS:
            refuse(
                "rules", f"they name {len(self.models)} models; at most {MAX_MODELS} are possible"
            )
        for i, rule in enumerate(self.rules):
            if unknown := [x for x in rule.labels if x not in self.classifier.examples]:
                refuse(f"rules[{i}].labels", f"{unknown[0]!r} is no label of classifier.examples")

    @property
    def models(self) -> tuple[str, ...]:
        """The models that may answer, the default first."""
        named = [y for x in self.rules for y in (x.model, x.escalate.to) if y]
        return tuple(dict.fromkeys((self.default, *named)))

    def named(self) -> Iterator[tuple[str, str]]:
        """Yield each key that names a model, and the name, "" for none."""
        yield "default", self.default
        yield "classifier.model", self.classifier.model
        for i, rule in enumerate(self.rules):
            yield f"rules[{i}].model", rule.model
            yield f"rules[{i}].escalate.to", rule.escalate.to


def check_virtual_models(
    virtual_models: tuple[VirtualModelConfig, ...], served: Collection[str]
) -> None:
    """Refuse the key of a name that is not among the `served` ones, of all models and adapters."""
    known = ", ".join(sorted(served))
    for i, model in enumerate(virtual_models):
        at = f"router.virtual_models[{i}]"
        if model.name in served:
            refuse(f"{at}.name", f"{model.name!r} is the name of a served model")
        for key, name in model.named():
            if name and name not in served:
                refuse(f"{at}.{key}", f"model {name!r} is not served; served: {known}")
