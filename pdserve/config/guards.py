"""The items of `router.guards`: what is checked in prompts and answers, by whom."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from pdserve.config.fields import Duration, Positive, Section, Text, about, is_address, refuse
from pdserve.security.patterns import Patterns

_Share = Annotated[float, Meta(ge=0, le=1)]
_Url = Annotated[str, Meta(pattern="^(https?://.*)?$")]


class GuardClassifierConfig(Section, frozen=True):
    """Compares texts with examples, by the embeddings of a pooling worker. A text matches if its
    nearest example is one of `flagged`."""

    model: Annotated[str, about("Name of the embedding model. Empty: no classifier.")] = ""
    flagged: Annotated[tuple[Text, ...], about("Examples of texts that match.")] = ()
    harmless: Annotated[tuple[Text, ...], about("Examples of texts that do not.")] = ()
    threshold: Annotated[_Share, about("Least cosine similarity with an example of `flagged`.")] = (
        0.8
    )


class GuardConfig(Section, frozen=True):
    """A guard. It has `patterns` and `words`, or one of `url`, `ext_proc` and `classifier`."""

    name: Annotated[
        str,
        Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z"),
        about("Name of the guard in metrics, errors and logs."),
    ]
    patterns: Annotated[
        tuple[Text, ...],
        about(r"""Regular expressions in Python's syntax, without lookaround, references and
        possessive quantifiers, such as `\bsk-[A-Za-z0-9]{20,48}\b`. A match has at most
        `hold_back_chars` characters."""),
    ] = ()
    words: Annotated[
        tuple[Text, ...], about("Words or phrases, found in upper and lower case as whole words.")
    ] = ()
    words_file: Annotated[str, about("File of further words, one on each line.")] = ""
    url: Annotated[
        _Url, about("HTTP service that gets texts as JSON by POST, and answers with a verdict.")
    ] = ""
    ext_proc: Annotated[
        str,
        about("""Address (`host:port`) of a gRPC service in the form of Envoy's external processing
        (`envoy.service.ext_proc.v3.ExternalProcessor`), without TLS unless `ca_file` is set."""),
    ] = ""
    ca_file: Annotated[
        str,
        about("""PEM file of the CAs of a service's certificate. `ext_proc` is then called over
        TLS. Empty: for `https` the CAs of the system."""),
    ] = ""
    region: Annotated[
        str,
        about("""Region of `router.residency.regions` where a service runs. Texts of requests that
        may not be there are not sent, and count as not checked (`on_failure`). Empty: where the
        router is."""),
    ] = ""
    classifier: GuardClassifierConfig = GuardClassifierConfig()
    verdict: Annotated[
        Literal["redact", "refuse", "log"],
        about("""What follows a match of patterns, words or the classifier: replace the match (of
        the classifier, the whole text), refuse prompt or answer, or only count and log it."""),
    ] = "refuse"
    replacement: Annotated[
        str, Meta(pattern=r'^[^"\\\x00-\x1f]*\Z'), about("What stands in place of a match.")
    ] = "[redacted]"
    places: Annotated[
        tuple[Literal["prompt", "answer"], ...],
        about("What is checked: prompts before they are placed, answers before they leave."),
    ] = ("prompt", "answer")
    tenants: Annotated[
        tuple[Text, ...], about("Tenants whose requests are checked. Empty: all.")
    ] = ()
    models: Annotated[
        tuple[Text, ...], about("Models and adapters whose requests are checked. Empty: all.")
    ] = ()
    pieces: Annotated[
        Literal["sentences", "whole"],
        about("""How answers go to services and classifiers: sentence by sentence, or whole, which
        holds back a stream until its end."""),
    ] = "sentences"
    hold_back_chars: Annotated[
        int,
        Meta(ge=1, le=4096),
        about("""Most characters of an answer that are held back for the end of a match or of a
        sentence."""),
    ] = 256
    hold_back_s: Annotated[
        Duration, about("Seconds after which a part of a sentence goes to a service as it is.")
    ] = 1.0
    timeout_s: Annotated[
        Duration, about("Seconds that a service or classifier has for one verdict.")
    ] = 1.0
    max_calls: Annotated[
        Positive, about("Calls of this guard at a time. Others wait, within `timeout_s`.")
    ] = 64
    on_failure: Annotated[
        Literal["closed", "open"],
        about("""A service or classifier that fails or is late. `closed`: the request ends with 503.
        `open`: the text passes."""),
    ] = "closed"

    def __post_init__(self) -> None:
        is_built_in = bool(self.patterns or self.words or self.words_file)
        kinds = [is_built_in, bool(self.url), bool(self.ext_proc)]
        kinds.append(bool(self.classifier.model))
        if sum(kinds) != 1:
            refuse("name", "needs one of patterns or words, url, ext_proc and classifier.model")
        if self.ext_proc and not is_address(self.ext_proc):
            refuse("ext_proc", f"must be host:port, not {self.ext_proc!r}")
        if self.ca_file and not (self.ext_proc or self.url.startswith("https:")):
            refuse("ca_file", "needs ext_proc, or a url that begins with https")
        if self.region and not (self.ext_proc or self.url):
            refuse("region", "needs url or ext_proc: other guards run in the router or its workers")
        if self.classifier.model and not self.classifier.flagged:
            refuse("classifier.flagged", "needs an example")
        if not self.places:
            refuse("places", "needs prompt or answer")
        for i, pattern in enumerate(self.patterns):
            try:
                Patterns([pattern], longest=self.hold_back_chars)
            except ValueError as error:
                refuse(f"patterns[{i}]", str(error))
        for i, word in enumerate(self.words):
            if len(word) > self.hold_back_chars:
                refuse(f"words[{i}]", "is longer than hold_back_chars")
