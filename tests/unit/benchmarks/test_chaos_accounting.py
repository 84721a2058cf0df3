"""`pdserve chaos` without a service: what counts as wrong, lost or left, and what is kept of it."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata

from benchmarks.chaos import keep
from benchmarks.chaos.answers import Choice, Outcome, wrong_tokens
from benchmarks.chaos.asks import KINDS, kinds_of, make_asks
from benchmarks.chaos.faults.by_name import FAULTS, changes_of
from benchmarks.chaos.figures import ROOM, Figures, grown
from benchmarks.chaos.flood import Fate, Met
from benchmarks.chaos.load import REPEATED, Load
from benchmarks.chaos.orders import Order, Orders, give, hits
from benchmarks.chaos.overload import NORMAL_S, normal_after_s
from benchmarks.chaos.refusals import Refused, code_of
from benchmarks.chaos.result import MatrixResult, RowResult, from_json, joined, read, to_json
from benchmarks.chaos.scene import Scene
from benchmarks.chaos.settings import ChaosSettings
from benchmarks.errors import BenchError
from pdserve import rpc
from pdserve.cli import main
from pdserve.config import load_config
from pdserve.errors import WorkerFailed
from tests.patience import WAIT_S

if TYPE_CHECKING:
    from benchmarks.chaos.answers import Ending
    from benchmarks.chaos.asks import Ask

ROOT = Path(__file__).resolve().parents[3]
ROW = RowResult(
    name="kill_decode",
    what="a worker dies",
    hit=True,
    requests=9,
    failed=0,
    excused=0,
    wrong_tokens=0,
    leaked_blocks=0,
    left=[],
    pause_s=1.25,
    whole_s=9.5,
    fallbacks={"same_prefill:worker_failed": 2},
    notes=["decode-0 with 2 in hand"],
    errors=[],
)
RUN = MatrixResult(
    created="2026-01-02T03:04:05+00:00",
    engine="vllm",
    workers="2P2D",
    model="m",
    trace="chat",
    host={"cores": 2},
    settings={"requests": 9},
    rows=[ROW],
    left=[],
)


def outcome(
    tokens: list[int], text: str = "abc", *, ending: Ending = "ok", finish: str = "length"
) -> Outcome:
    made = Outcome(1, 0.0)
    made.choices[0] = Choice(tokens, text, finish, [(t, -0.5) for t in tokens])
    made.completion_tokens = len(tokens)
    made.ending = ending
    return made


RIGHT = outcome([1, 2, 3])


@pytest.mark.parametrize(
    ("got", "wrong"),
    [
        (outcome([1, 2, 3]), 0),
        (outcome([1, 2, 3], "abd"), 1),
        (outcome([1, 2, 3], finish="stop"), 1),
        # Each also stands in the logprobs, and what is missing or too much in the usage.
        (outcome([1, 9, 3]), 2),
        (outcome([1, 2]), 3),
        (outcome([1, 2, 3, 3]), 3),
        (outcome([1, 2], "ab", ending="failed", finish=""), 0),
        (outcome([1, 9], "ab", ending="aborted", finish=""), 2),
        (outcome([1], "x", ending="aborted", finish=""), 1),
        (outcome([], "", ending="failed", finish=""), 0),
    ],
)
def test_every_difference_is_counted_and_what_never_came_only_where_it_should(
    got: Outcome, wrong: int
) -> None:
    assert wrong_tokens(got, RIGHT) == wrong


def test_an_answer_that_was_not_asked_for_or_a_wrong_usage_is_wrong() -> None:
    got = outcome([1, 2, 3])
    got.choice(1).text = "more"
    assert wrong_tokens(got, RIGHT) == 1
    got = outcome([1, 2, 3])
    got.completion_tokens = 5
    assert wrong_tokens(got, RIGHT) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"hit": False},
        {"failed": 1},
        {"wrong_tokens": 1},
        {"leaked_blocks": 1},
        {"left": ["a process"]},
    ],
)
def test_a_row_passes_only_where_all_is_well(change: dict[str, object]) -> None:
    assert RUN.passed
    assert replace(ROW, excused=3).passed
    bad = replace(ROW, **change)  # type: ignore[arg-type]
    assert not bad.passed
    assert not replace(RUN, rows=[ROW, bad]).passed
    assert not replace(RUN, left=["process 7"]).passed


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(to_json(RUN), encoding="utf-8")
    assert read(path) == RUN
    assert json.loads(path.read_text())["passed"] is True
    for text in ("{}", "[", '{"schema": "other"}'):
        with pytest.raises(BenchError, match="not a result"):
            from_json(text)


def test_the_readme_shows_the_kept_run() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == keep.with_matrix(readme, read(ROOT / keep.KEPT))


def test_keeping_a_run_puts_it_into_the_readme(tmp_path: Path) -> None:
    (tmp_path / keep.KEPT).parent.mkdir(parents=True)
    (tmp_path / "README.md").write_text(f"before\n{keep.BEGIN}\n{keep.END}\nafter\n")
    source = tmp_path / "r.json"
    source.write_text(to_json(RUN), encoding="utf-8")
    keep.keep([source], tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "| a worker dies | 9 | 0 | 0 | 0 | 0 | 1.2 s | 9.5 s |" in text
    assert "1 of 1 rows passed." in text
    assert read(tmp_path / keep.KEPT) == RUN


def test_rows_of_runs_that_are_alike_are_put_together() -> None:
    other = replace(ROW, name="other")
    later = replace(RUN, created="2027-01-01T00:00:00", rows=[replace(ROW, requests=8), other])
    both = joined([RUN, later])
    assert (both.runs, both.created, both.passed) == (2, later.created, True)
    assert [(row.name, row.requests) for row in both.rows] == [(ROW.name, 8), ("other", 9)]
    assert not joined([RUN, replace(later, left=["process 7"])]).passed
    with pytest.raises(BenchError, match="differ in settings"):
        joined([RUN, replace(later, settings={"requests": 8})])


def test_no_two_requests_share_a_prompt_and_each_feature_is_asked_for() -> None:
    first = make_asks(20, seed=3, vocab_size=1536, kinds=kinds_of("vllm"))
    again = make_asks(20, seed=3, vocab_size=1536, kinds=kinds_of("vllm"))
    later = make_asks(20, seed=3, vocab_size=1536, kinds=kinds_of("vllm"), first=20)
    assert first == again
    assert {ask.kind for ask in first} == set(KINDS)
    assert len({ask.prompt[:8] for ask in (*first, *later)}) == 40
    assert "structured" not in kinds_of("fake")


def test_a_process_follows_its_orders_and_counts_what_it_did(tmp_path: Path) -> None:
    give(tmp_path, "w", Order("drop"))
    orders = Orders(tmp_path, "w")
    assert orders.now == Order("drop")
    give(tmp_path, "w", Order(clock_s=5.0))
    assert orders.follows(Order(clock_s=5.0), WAIT_S)
    assert hits(tmp_path, "w") == 0
    orders.did()
    orders.did()
    assert hits(tmp_path, "w") == 2


def test_what_a_process_has_open_beyond_what_pools_take_is_told() -> None:
    calm = Figures(tasks=10, threads=5, fds=30)
    most = Figures(10 + ROOM.tasks, 5 + ROOM.threads, 30 + ROOM.fds)
    assert grown(calm, most) == ""
    assert grown(calm, replace(most, tasks=most.tasks + 1)) == "19 tasks (10 when calm)"
    both = replace(most, threads=most.threads + 1, fds=most.fds + 1)
    assert grown(calm, both) == "30 threads (5 when calm), 71 descriptors (30 when calm)"


def refused(code: str, *, sent_s: float = 5.0, ended_s: float = 20.0) -> Outcome:
    made = Outcome(7, sent_s)
    made.end("failed", ended_s, "said so", code)
    return made


@pytest.mark.parametrize(
    ("failed", "excused"),
    [
        (refused("unavailable"), True),
        (refused("worker_failed", sent_s=14.0), True),
        (refused(""), False),  # the connection broke, or nothing came any more
        (refused("internal_error"), False),
        (refused("unavailable", sent_s=15.0), False),  # when there were workers again
        (refused("unavailable", ended_s=9.0), False),  # before anything was done
        (refused("unavailable", ended_s=40.0), False),  # too late
    ],
)
def test_without_workers_an_error_is_excused_where_it_is_clean(
    failed: Outcome, excused: bool
) -> None:
    load = Load([], None, 1.0)  # type: ignore[arg-type]
    scene = Scene(None, load, random.Random(1), struck_s=10.0)  # type: ignore[arg-type]
    assert not scene.excuses(failed, within_s=30.0)
    scene.workers_s = 15.0
    assert scene.excuses(failed, within_s=30.0) == excused
    scene.excused.add(7)
    assert scene.excuses(failed, within_s=30.0)


def test_an_error_is_known_by_who_made_it_up() -> None:
    said = AioRpcError(
        StatusCode.UNAVAILABLE, Metadata(), Metadata((rpc.ERROR_METADATA_KEY, b"")), details=""
    )
    for cause, code in ((said, "worker_failed"), (OSError(), "")):
        error = WorkerFailed("x")
        error.__context__ = cause
        assert code_of(error) == code
    assert code_of(Refused("x", "unavailable")) == "unavailable"
    assert code_of(TimeoutError()) == ""


async def test_what_is_asked_again_keeps_its_number_apart() -> None:
    class Silent:
        async def ask(self, ask: Ask, outcome: Outcome, *, slow_s: float) -> None:
            outcome.end("ok", 1.0)

    asks = make_asks(2, seed=3, vocab_size=1536, kinds=["greedy"])
    load = Load(asks, Silent(), 1.0)  # type: ignore[arg-type]
    load.send(asks[0])
    for _ in range(2):
        load.repeat(asks[0].number)
    load.repeat(asks[0].number + REPEATED, slow_s=0.1)
    assert [*load.outcomes] == [asks[0].number + i * REPEATED for i in range(4)]
    assert load.slow == {asks[0].number + 3 * REPEATED}
    assert load.unsent == 1
    await load.run()
    assert load.is_over
    assert not load.open()


@pytest.mark.parametrize("engine", ["vllm", "fake"])
def test_both_services_have_a_configuration_that_is_valid(engine: str, tmp_path: Path) -> None:
    settings = ChaosSettings(engine=engine, changes=(("router.request_timeout_s", 3.0),))
    own = [settings.with_changes(changes_of(fault)).config() for fault in FAULTS.values()]
    assert {whole["up"].get("routers", 1) for whole in own} == {1, 2}
    for whole in (settings.config(), settings.reference(), *own):
        path = tmp_path / "c.yaml"
        path.write_text(json.dumps(whole), encoding="utf-8")
        config = load_config(path, {})
        assert config.router.request_timeout_s == 3.0
        assert config.worker.engine == engine
    assert settings.workers == "2P2D"


def test_rows_are_listed_and_unknown_ones_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in FAULTS)
    for more in (
        ["--rows", "nothing"],
        ["--rows", "corrupt_transfers", "--engine", "fake"],
        ["--decode", "0"],
        ["--rate", "0"],
        ["--soak", "0"],
        ["--set", "nonsense"],
    ):
        assert main(["chaos", *more]) == 2
        assert "pdserve chaos: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fates", "expected"),
    [
        ("ssssssssssssssssssss", 0.0),
        ("rrlsssssssssssssssss", 3.0),
        ("rsssssssssssssssssss", 0.0),  # one of twenty
        ("ssssssssssssssssrrrr", None),
        ("llllllllllllllllllll", None),
        ("", None),
    ],
)
def test_service_is_normal_from_where_nearly_all_are_served_in_time(
    fates: str, expected: float | None
) -> None:
    names: dict[str, Fate] = {"s": "served", "l": "served", "r": "refused"}
    late_s = 2 * NORMAL_S
    mets = [
        Met(100.0 + at, names[fate], ttft_s=late_s if fate == "l" else 0.01)
        for at, fate in enumerate(fates)
    ]
    assert normal_after_s(mets, 100.0, 0.01) == expected
