"""How a service under test is set up, and what it is asked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

# What differs from the defaults, so that a row is over soon: leases and times apart are shorter,
# KV caches small, prompts computed in several chunks. Weights and KV are float32, so that no tie
# is broken otherwise in a batch of another shape.
_CHANGES: Final[dict[str, Any]] = {
    "router.http_port": 0,
    "router.grpc_port": 0,
    "router.quarantine_s": 5.0,
    "router.detection.suspend_s": 3.0,
    "router.stop_grace_s": 5.0,
    # A row asks what is lost, on a machine that may be slow: nobody is refused for being late.
    "router.slo.refuse_beyond": 0.0,
    "worker.drain_timeout_s": 10.0,
    "worker.kv.lease_s": 8.0,
    "worker.kv.receive_timeout_s": 8.0,
    "up.max_restarts": 100000,
}
_ENGINE_ARGS: Final[dict[str, dict[str, Any]]] = {
    "vllm": {
        "dtype": "float32",
        "kv_cache_memory_bytes": 96 << 20,
        "max_num_batched_tokens": 256,
    },
    "fake": {"step_s": 0.01, "prefill_s": 0.0005, "transfer_s": 0.02},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosSettings:
    """``changes`` are dotted configuration keys that go over those of the matrix."""

    engine: str = "vllm"
    prefill: int = 2
    decode: int = 2
    requests: int = 24
    rate_per_s: float = 6.0
    seed: int = 1
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def workers(self) -> str:
        """Such as 2P2D."""
        return f"{self.prefill}P{self.decode}D"

    def with_changes(self, changes: tuple[tuple[str, Any], ...]) -> ChaosSettings:
        """The same with these over them."""
        return replace(self, changes=self.changes + changes)

    def with_default(self, key: str, value: Any) -> ChaosSettings:
        """The same with this under its changes."""
        return replace(self, changes=((key, value), *self.changes))

    def config(self) -> dict[str, Any]:
        """Of the service under test."""
        return self._config({"up.prefill": self.prefill, "up.decode": self.decode})

    def reference(self) -> dict[str, Any]:
        """Of the one engine that nothing happens to."""
        # One core, as a worker of the service has: two threads would wait for each other where the
        # machine is busy.
        changes: dict[str, Any] = {
            "up.routers": 1,
            "up.prefill": 0,
            "up.decode": 0,
            "up.aggregated": 1,
            "up.cores_per_worker": 1,
            # Nothing is done to it: however slow, it is not to be given up.
            "router.lease_s": 600.0,
            "router.detection.stall_s": 0.0,
            "router.detection.failures": 1000,
        }
        if self.engine == "fake":
            changes["worker.engine_args"] = {"step_s": 0.0005}
        return self._config(changes)

    def _config(self, workers: dict[str, Any]) -> dict[str, Any]:
        whole: dict[str, Any] = {"up": {}, "router": {}, "worker": {}}
        engine = {"worker.engine": self.engine, "worker.engine_args": _ENGINE_ARGS[self.engine]}
        for dotted, value in {**_CHANGES, **engine, **dict(self.changes), **workers}.items():
            at = whole
            *sections, key = dotted.split(".")
            for name in sections:
                at = at.setdefault(name, {})
            at[key] = value
        return whole
