"""What spoils a comparison, and what a reader should know of it. Pure functions of the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from benchmarks.bootstrap import MIN_ROUNDS
from benchmarks.compare.settings import differences
from benchmarks.metrics import summarise

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.compare.result import CompareResult, Measurement

# Of a core, what each waiting arm may use; what all do, each arm has beside it alike.
IDLE_ARM_CORES: Final = 0.06
# The share of the cores that other processes may use before it is said, and before it spoils a run:
# then arms do not have the cores that they are said to have.
OTHERS_SHARE: Final = 0.1
OTHERS_SHARE_LIMIT: Final = 0.25


@dataclass(frozen=True, slots=True)
class Validity:
    """``invalid`` has the reasons why the figures must not be compared; ``cautions`` what bears on
    them."""

    invalid: tuple[str, ...]
    cautions: tuple[str, ...]


def judge(result: CompareResult) -> Validity:
    """All reasons, worst first."""
    return Validity(tuple(_reasons(result)), tuple(_cautions(result)))


def _reasons(result: CompareResult) -> Iterator[str]:
    settings = {arm.name: arm.settings for arm in result.arms}
    for difference in differences(settings, result.meant_to_differ):
        yield f"the arms differ in {difference}"
    for measurement in result.measurements:
        where = _where(measurement)
        for note in measurement.notes:
            yield f"{where}: {note}"
        degraded = summarise(measurement.records).degraded
        if degraded is not None:
            yield f"{where}: {degraded}"
        use = measurement.processor
        if use.idle_arms_s > IDLE_ARM_CORES * max(1, len(result.arms) - 1) * use.window_s:
            cores = use.idle_arms_s / use.window_s
            yield f"{where}: arms that should have waited used {cores:.2f} cores"
    share = _others_share(result)
    if share > OTHERS_SHARE_LIMIT:
        yield (
            f"other processes used {share:.0%} of the cores, so that the arms did not have theirs; "
            "measure on a quieter machine"
        )
    yield from _unequal_rounds(result)
    for arm in result.arms:
        records = [r for m in result.of(arm.name, "round") for r in m.records]
        if records and not any(record.status == "ok" for record in records):
            yield f"{arm.name} answered no request of any round"


def _unequal_rounds(result: CompareResult) -> Iterator[str]:
    """Arms must have been sent the same requests; a smaller context may have dropped some."""
    sent: dict[int, set[tuple[tuple[int, int, int], ...]]] = {}
    for measurement in result.measurements:
        if measurement.kind == "round":
            rows = tuple((r.index, r.input_tokens, r.output_tokens) for r in measurement.records)
            sent.setdefault(measurement.number, set()).add(rows)
    for number, rows_sent in sent.items():
        if len(rows_sent) > 1:
            yield (
                f"round {number + 1}: the arms were not sent the same requests; "
                "give --max-total-tokens that every arm takes"
            )


def _cautions(result: CompareResult) -> Iterator[str]:
    for difference in differences({arm.name: arm.settings for arm in result.arms}):
        if difference.name in result.meant_to_differ:
            yield f"meant to differ: {difference}"
    for arm in result.arms:
        if arm.kind == "endpoint":
            yield f"{arm.name}: settings unknown; nothing shows that it is set as the others are"
    rounds = max((m.number + 1 for m in result.measurements if m.kind == "round"), default=0)
    if rounds < MIN_ROUNDS:
        yield f"no intervals: they take at least {MIN_ROUNDS} rounds"
    repeated = sum(m.repeated for m in result.measurements)
    if repeated:
        total = len(result.measurements)
        yield f"{repeated} of {total} replays were repeated because the client had been late"
    share = _others_share(result)
    if OTHERS_SHARE < share <= OTHERS_SHARE_LIMIT:
        yield f"other processes used {share:.0%} of the cores meanwhile"
    yield from _shared_cores(result)


def _others_share(result: CompareResult) -> float:
    """The share of this process's cores that neither an arm nor this client used, on average."""
    cores = result.host.get("cores")
    window_s = sum(m.processor.window_s for m in result.measurements)
    if not isinstance(cores, int) or not cores or not window_s:
        return 0.0
    return sum(m.processor.others_s for m in result.measurements) / window_s / cores


def _shared_cores(result: CompareResult) -> Iterator[str]:
    cores = result.host.get("cores")
    used = max((arm.settings.cores for arm in result.arms if arm.settings is not None), default=0)
    if isinstance(cores, int) and 0 < cores <= used:
        yield f"workers have all {cores} cores: router and client take their time from them"


def _where(measurement: Measurement) -> str:
    kind = "round" if measurement.kind == "round" else "probe"
    return f"{kind} {measurement.number + 1} of {measurement.arm}"
