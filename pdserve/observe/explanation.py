"""Placement decisions as text, for `pdserve explain` and the console."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.v1 import admin_pb2 as a
    from pdserve.v1 import common_pb2 as c


def outcome(decision: a.PlacementDecision) -> str:
    if decision.refused:
        return f"rejected: {decision.refused}"
    if decision.forwarded_to:
        return f"forwarded to region {decision.forwarded_to}"
    if not decision.decode:
        return "waits for capacity"
    if decision.prefill:
        encode = f"images on {decision.encoder}, " if decision.encoder else ""
        return f"{encode}prefill on {decision.prefill}, decode on {decision.decode}"
    return f"aggregated on {decision.decode}"


def chosen(choice: c.ModelChoice) -> str:
    """Return a sentence on the choice of a virtual model."""
    text = f"{choice.virtual_model} chose {choice.model} (rule {choice.rule})"
    if choice.discarded_model:
        text += f"; {choice.discarded_model} did not pass: {choice.discarded_reason}"
    return text + (f"; skipped: {'; '.join(choice.skipped)}" if choice.skipped else "")


def details(decision: a.PlacementDecision) -> list[str]:
    """Return lines with the cause of a repeated placement, the request's needs and exclusions."""
    found = [f"placed again: {decision.cause}"] if decision.cause else []
    if decision.peers:
        found = [f"not served here: {decision.cause}"]
        found += [f"region {x}: {reason}" for x, reason in sorted(decision.peers.items())]
    more = ", one token requested" if decision.prefill_only else ""
    more += f", adapter {decision.adapter}" if decision.adapter else ""
    more += f", {decision.images} image(s)" if decision.images else ""
    kv = f", KV {decision.kv_tokens} tokens" if decision.kv_tokens else ""
    found.append(f"prompt {decision.prompt_tokens} tokens{kv}{more}")
    if decision.encoder_reason:
        encoder = decision.encoder or decision.prefill or decision.decode
        found.append(f"images are encoded by {encoder}: {decision.encoder_reason}")
    if decision.session:
        last = ", ".join(decision.session_workers)
        found.append(f"session {decision.session}: {f'last on {last}' if last else 'first turn'}")
    if decision.HasField("revision"):
        cohort = f"workers of revision {decision.revision or '(none)'} only"
        if decision.HasField("spilled_from"):
            cohort += f": revision {decision.spilled_from or '(none)'} has none for it"
        found.append(cohort)
    if decision.not_drawn:
        found.append(
            f"compared {len(decision.candidates)} drawn workers; {decision.not_drawn} were not"
        )
    if decision.avoid or decision.excluded:
        pairs = [f"{pair.prefill} with {pair.decode}" for pair in decision.excluded]
        found.append(f"excluded: {', '.join([*decision.avoid, *pairs])}")
    return found


def total(candidate: a.PlacementCandidate) -> float | None:
    """Return the worker's total score, or else its score of the prefill phase. None: it was not
    scored."""
    totals = candidate.totals
    return totals["total"] if "total" in totals else totals.get("prefill")


def scores(candidate: a.PlacementCandidate) -> str:
    """Return the weighted scores of a worker by phase, or the reason why it has none."""
    if candidate.why_not or not candidate.scores:
        return candidate.why_not or "all candidates are equal"
    parts: dict[str, list[str]] = {}
    for score in candidate.scores:
        text = f"{score.weight:g}×{score.scorer} {score.score:.3f}"
        parts.setdefault(score.phase, []).append(text)
    return "; ".join(f"{phase}: {' + '.join(texts)}" for phase, texts in parts.items())


def cached(candidate: a.PlacementCandidate) -> str:
    """Return the number of prompt tokens in a worker's prefix cache and in its host memory, and the
    copy that was considered, with predicted times."""
    tiers = f" ({candidate.tier_tokens} in host memory)" if candidate.tier_tokens else ""
    if candidate.HasField("fetch"):
        fetch = candidate.fetch
        times = f"copied in {fetch.copy_s * 1e3:.1f} ms, computed in {fetch.compute_s * 1e3:.1f} ms"
        sign = "+" if fetch.pays else "not copied: "
        tiers += f" ({sign}{fetch.tokens} of {fetch.holder}, {times})"
    return f"{candidate.cached_tokens}{tiers}"


def said(verdict: a.GuardVerdict) -> str:
    """Return what a guard said of a request."""
    times = f" {verdict.count} times" if verdict.count > 1 else ""
    took = f" in {verdict.seconds * 1e3:.1f} ms" if verdict.seconds else ""
    reason = f": {verdict.reason}" if verdict.reason else ""
    return f"guard {verdict.guard}, {verdict.place}: {verdict.verdict}{times}{took}{reason}"


def predicted(prediction: a.PlacementPrediction) -> str:
    where = f"aggregated on {prediction.decode}"
    if prediction.prefill:
        where = f"{prediction.prefill} → {prediction.decode}"
    seconds = sorted(prediction.seconds.items())
    figures = ", ".join(f"{name.removesuffix('_s')} {x * 1e3:.1f} ms" for name, x in seconds)
    return f"predicted {where}: {figures}"
