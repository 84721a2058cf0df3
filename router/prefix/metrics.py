"""The prefix index in figures, and how its predictions fared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from router.counts import Counts
from router.placement.values import NO_TOKENS_CACHED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from pdserve.types import Receipt
    from router.prefix.watch import CacheWatches


class _Watched(Collector):
    def __init__(self, watches: CacheWatches) -> None:
        self._watches = watches

    def collect(self) -> Iterator[Metric]:
        watches, index = self._watches, self._watches.index
        for name, text, value in (
            ("blocks", "KV blocks in the prefix index.", index.blocks),
            ("sets", "Distinct sets of workers in it.", index.distinct_sets),
            ("synced_workers", "Workers whose prefix cache it has whole.", watches.synced),
            (
                "truncated_workers",
                "Workers of whose prefix cache blocks were refused, for want of room.",
                index.truncated_workers,
            ),
        ):
            yield GaugeMetricFamily(f"pdserve_prefix_{name}", text, value)
        yield CounterMetricFamily(
            "pdserve_prefix_refused_blocks",
            "KV blocks that the prefix index had no room for.",
            index.refused_blocks,
        )
        resyncs = CounterMetricFamily(
            "pdserve_prefix_resyncs",
            "Watches of prefix caches that began anew, by reason.",
            labels=("reason",),
        )
        for reason, count in sorted(watches.resyncs.items()):
            resyncs.add_metric((reason,), count)
        yield resyncs


class PrefixMetrics:
    """Counters of predictions, by how they compare to what the engine reported; with `watch`, the
    index beside them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        predictions = Counts(
            "pdserve_prefix_predictions",
            "Answers by whether the engine had as many prompt tokens cached as was predicted "
            "(exact), or more, or fewer.",
            ("model", "engine_had"),
        )
        tokens = Counts(
            "pdserve_prefix_tokens",
            "Prompt tokens cached where they were computed: predicted, and reported by the engine.",
            ("model", "source"),
        )
        registry.register(predictions)
        registry.register(tokens)
        # See RouterMetrics.
        self._predictions = predictions.of
        self._tokens = tokens.of

    def watch(self, watches: CacheWatches) -> None:
        """Report the index from now on."""
        self._registry.register(_Watched(watches))

    def judge(self, model: str, cached: Mapping[str, int], receipt: Receipt) -> None:
        """An answer was placed knowing `cached`, by worker id; nothing where nobody had asked."""
        if cached is NO_TOKENS_CACHED or receipt.fallbacks:
            return
        predicted, had = cached.get(receipt.prefill_worker, 0), receipt.cached_tokens
        verdict = "exact" if had == predicted else "more" if had > predicted else "fewer"
        self._predictions(model, verdict).inc()
        self._tokens(model, "predicted").inc(predicted)
        self._tokens(model, "reported").inc(had)
