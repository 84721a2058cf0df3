"""Tests and measures pdserve on a machine with GPUs, in 20 minutes without a network: `make
gpu-report`. Prints tables and writes one JSON file to send in. Each part runs in its own processes,
up to a deadline. A part that cannot run reports the reason, and the others continue. Without a GPU,
in the environment of `make gpu-shim`, the parts that need no kernels run on the CUDA shim, to try
the report itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from xml.etree import ElementTree as ET

from benchmarks.report.tables import print_line, print_table

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).resolve().parents[2]
LIMIT_S: Final = 1190.0
SHIM: Final = "on the CUDA shim: kernels and times are not real"
_INTERRUPT_S: Final = 20.0  # for the output of an interrupted process
_KEPT: Final = 4000  # kept characters at the end of a log
_NOT_MEASURED: Final = 2  # exit status of benchmarks.micro: the machine lacks something
_NO_TESTS: Final = 5  # exit status of pytest
# The KV of 8192 tokens on a rank of Llama-3-70B on four GPUs.
_PROMPT: Final = ("--blocks", "512", "--block-kib", "1280", "--cache-mib", "1600")
_SMALL: Final = ("--blocks", "64", "--block-kib", "64", "--cache-mib", "16")
_FEW_CHUNKS: Final = ("--chunks", "2", "--block-kib", "64", "--chunk-mib", "1")
# Each has a name, files and options of pytest, and a limit. A join of NCCL takes 6 s on an H200,
# and vLLM starts in half a minute.
_TESTS: Final[tuple[tuple[str, tuple[str, ...], float], ...]] = (
    ("copies", ("tests/gpu/test_copies.py",), 60.0),
    ("cuda_ipc", ("tests/gpu/test_single_gpu.py", "-k", "cuda-ipc"), 60.0),
    ("engines", ("tests/gpu/test_gpu_engines.py",), 200.0),
    ("nccl library", ("tests/gpu/test_nccl_library.py",), 30.0),
    ("nccl", ("tests/gpu/test_single_gpu.py", "-k", "not cuda-ipc"), 240.0),
)
_FIGURES: Final = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "e2e_p50")


@dataclass(slots=True)
class Outcome:
    """Result of a step. `status`: `ran`, `not run`, `failed` or `timed out`; `reason`: why. `log`:
    the end of its output, if it did not run to its end."""

    part: str
    step: str
    status: str
    reason: str = ""
    took_s: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    log: str = ""


@dataclass(frozen=True, slots=True)
class ReportStep:
    """One process. `kind`: the format of its output. `needs`: its requirements: "gpu", "gpus" (more
    than one), "vllm", or "kernels", which the shim lacks."""

    part: str
    name: str
    kind: str
    command: tuple[str, ...]
    limit_s: float
    needs: tuple[str, ...] = ()


_MICRO = ("-m", "benchmarks.micro")
_ROUNDS = ("--json", "--rounds", "3")
_COMPARE = (
    *("-m", "pdserve", "bench", "compare", "--variants", "1P1D,1A", "--baseline", "1A"),
    *(*_ROUNDS, "--requests", "24", "--rate", "4", "--engine"),
)
# Transport, busy worker ("" if none) and layout of the cache.
_TRANSPORTS = (
    ("cuda_ipc", "", "BLHNC"),
    ("cuda_ipc", "consumer", "BLHNC"),
    ("cuda_ipc", "producer", "BLHNC"),
    ("cuda_ipc", "", "LBNHC"),
    ("nccl", "", "BLHNC"),
    ("nccl", "consumer", "BLHNC"),
    ("nccl", "producer", "BLHNC"),
)


def steps_of(options: argparse.Namespace, *, is_shim: bool) -> list[ReportStep]:
    """Return the steps. On a GPU, the sum of their limits is below LIMIT_S."""
    limit_s = 120.0 if is_shim else 30.0  # a CPU does a GPU's work
    steps = [
        *(ReportStep("tests", name, "tests", words, s, ("gpu",)) for name, words, s in _TESTS),
        *_copy_steps(limit_s, is_shim=is_shim),
        *_transport_steps(_SMALL if is_shim else _PROMPT, limit_s, is_shim=is_shim),
        _engine_step(options),
    ]
    # What shows most comes first, because the time may not be enough for all.
    return sorted(steps, key=lambda step: "nccl" in step.name)


def _copy_steps(limit_s: float, *, is_shim: bool) -> list[ReportStep]:
    command = (*_MICRO, "gpu_copies", *_ROUNDS, *(("--blocks", "8") if is_shim else ()))
    chunks = (*_MICRO, "gpu_chunks", *_ROUNDS, *(_FEW_CHUNKS if is_shim else ()))
    return [
        ReportStep("copies", "idle", "micro", command, limit_s, ("gpu",)),
        ReportStep("copies", "busy", "micro", (*command, "--busy"), limit_s, ("gpu", "kernels")),
        ReportStep("copies", "chunks", "micro", chunks, limit_s, ("gpu",)),
    ]


def _transport_steps(sizes: tuple[str, ...], limit_s: float, *, is_shim: bool) -> list[ReportStep]:
    found = []
    for transport, busy, layout in _TRANSPORTS:
        name = f"{transport}, {layout}, {f'{busy} busy' if busy else 'idle'}"
        command = (*_MICRO, "kv", *_ROUNDS, "--only", transport, "--layout", layout, *sizes)
        command += ("--busy", busy) if busy else ()
        needs: tuple[str, ...] = ("gpu", "kernels") if busy else ("gpu",)
        # Kernels of two processes take turns on one GPU: an operation of NCCL takes 2 ms.
        needs += ("gpus",) if transport == "nccl" and not is_shim else ()
        found.append(ReportStep("transports", name, "micro", command, limit_s, needs))
    return found


def _engine_step(options: argparse.Namespace) -> ReportStep:
    name, needs = "1P1D beside one engine", ("vllm",) if options.engine == "vllm" else ()
    if options.engine == "fake":
        own: tuple[str, ...] = ("--differ", "kv_cache_tokens")
    else:
        # Three engines may share one GPU; vLLM checks that each share is free.
        own = ("--kv-cache-mib", "2048", "--set", "worker.engine_args.gpu_memory_utilization=0.28")
        own += ("--model", options.model)
    return ReportStep("engines", name, "compare", (*_COMPARE, options.engine, *own), 300.0, needs)


def missing(step: ReportStep, lacks: dict[str, str]) -> str:
    """Return why the step cannot run here, or ""."""
    return next((lacks[need] for need in step.needs if lacks.get(need)), "")


def run_step(step: ReportStep, python: str, end: float) -> Outcome:
    """Run a step in its own process group, up to its limit or `end`, by the monotonic clock."""
    limit_s, begun = min(step.limit_s, end - time.monotonic()), time.monotonic()
    if limit_s <= 0:
        return Outcome(step.part, step.name, "not run", "no time was left")
    with tempfile.TemporaryDirectory(prefix="pdserve-gpu-report-") as made:
        junit = Path(made, "junit.xml")
        command = step.command
        if step.kind == "tests":
            command = ("-m", "pytest", *command, "-p", "no:cacheprovider", f"--junit-xml={junit}")
        stdout, stderr, status = _run((python, *command), limit_s, Path(made))
        outcome = Outcome(step.part, step.name, "ran", took_s=round(time.monotonic() - begun, 1))
        try:
            _READERS[step.kind](outcome, junit.read_text() if step.kind == "tests" else stdout)
        except (OSError, ValueError, LookupError, ET.ParseError):
            outcome.status = "failed"
            outcome.reason = _last_line(stderr) or f"exit status {status}"
    if "No module named pytest" in stderr:
        outcome.status, outcome.reason = (
            "not run",
            "pytest is not installed: make gpu-install DEV=1",
        )
    elif status is None:
        outcome.status, outcome.reason = "timed out", f"after {limit_s:.0f} s"
    elif status == _NOT_MEASURED and step.kind == "micro":
        outcome.status = "not run"
        outcome.reason = next((x for x in stderr.splitlines() if x.startswith("error: ")), "")[7:]
    if outcome.status != "ran":
        outcome.log = stderr[-_KEPT:]
    return outcome


def _run(command: tuple[str, ...], limit_s: float, folder: Path) -> tuple[str, str, int | None]:
    """Return (stdout, stderr, exit status) of a process; the status is None if it was interrupted
    at its limit."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=stdout, stderr=stderr, start_new_session=True
        )
        status: int | None = None
        try:
            status = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGINT)
            try:
                child.wait(_INTERRUPT_S)
            except subprocess.TimeoutExpired:
                stderr.write(b"\nkilled: it did not end when it was interrupted\n")
        finally:
            if status is None:  # end its child processes, too
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    texts = [(folder / name).read_text("utf-8", "replace") for name in ("stdout", "stderr")]
    return texts[0], texts[1], status


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _read_micro(outcome: Outcome, stdout: str) -> None:
    found = json.loads(_last_line(stdout))
    outcome.rows, outcome.notes = found["rows"], found["notes"]


def _read_tests(outcome: Outcome, text: str) -> None:
    for case in ET.fromstring(text).iter("testcase"):
        ends = [(each.tag, each.get("message", "")) for each in case]
        result, reason = next(((a, b) for a, b in ends if a != "properties"), ("passed", ""))
        name = "::".join(x for x in (case.get("classname"), case.get("name")) if x)
        outcome.rows.append({"test": name, "result": result, "reason": reason[:_KEPT]})
    results = [row["result"] for row in outcome.rows]
    counts = {name: results.count(name) for name in dict.fromkeys(results)}
    outcome.notes.append(", ".join(f"{count} {name}" for name, count in counts.items()))
    if counts.get("failure") or counts.get("error"):
        outcome.status, outcome.reason = "failed", "see the rows"


def _read_compare(outcome: Outcome, stdout: str) -> None:
    found = json.loads(stdout)
    for arm in found["arms"]:
        row: dict[str, Any] = {"variant": arm["name"], "ok": f"{arm['ok']} of {arm['requests']}"}
        for figure in _FIGURES:
            row[f"{figure}, ms"] = _value(arm["figures"], figure, 1000)
        row |= {f"{x} ratio": _value(arm["ratios"], x, 1) for x in ("ttft_p50", "itl_p50")}
        outcome.rows.append(row)
    validity = found["validity"]
    outcome.notes += [*(f"invalid: {x}" for x in validity["invalid"]), *validity["cautions"]]


def _value(figures: dict[str, Any], name: str, factor: float) -> float | None:
    return figures[name]["value"] * factor if name in figures else None


_READERS: Final = {"micro": _read_micro, "tests": _read_tests, "compare": _read_compare}


def facts_of(python: str) -> dict[str, Any]:
    """Return the output of gpu_facts.py in this interpreter, or why there is none."""
    with tempfile.TemporaryDirectory(prefix="pdserve-gpu-report-") as made:
        stdout, stderr, _ = _run((python, "-m", "benchmarks.micro.gpu_facts"), 60.0, Path(made))
    try:
        found: dict[str, Any] = json.loads(_last_line(stdout))
    except ValueError:
        reason = f"{python}: {_last_line(stderr) or 'no answer within 60 s'}"
        return {"gpu": reason, "vllm": reason, "facts": {}}
    return found


def outcomes(
    options: argparse.Namespace, machine: dict[str, Any], python: str
) -> Iterator[Outcome]:
    """Run the steps one after the other."""
    is_shim = bool(machine["facts"].get("is_shim"))
    lacks = {
        "gpu": machine["gpu"],
        "vllm": machine["vllm"],
        "kernels": "needs kernels" if is_shim else "",
        "gpus": "" if len(machine["facts"].get("devices", ())) > 1 else "needs two GPUs",
    }
    end = time.monotonic() + options.limit_s
    only = options.only.split(",") if options.only else None
    for step in steps_of(options, is_shim=is_shim):
        if only is not None and step.part not in only:
            continue
        if reason := missing(step, lacks):
            yield Outcome(step.part, step.name, "not run", reason)
        else:
            # The shim's environment has only vLLM for CPUs, so the service runs as installed.
            yield run_step(step, sys.executable if step.part == "engines" else python, end)


def show(outcome: Outcome, *, is_shim: bool) -> None:
    mark = f" ({SHIM})" if is_shim and outcome.part != "engines" else ""
    reason = f": {outcome.reason}" if outcome.reason else ""
    print_line(f"{outcome.part}, {outcome.step}: {outcome.status}{reason}{mark}", "bold")
    columns = list(outcome.rows[0]) if outcome.rows else []
    shown = [row for row in outcome.rows if row.get("result") != "passed"]
    if shown:
        print_table(columns, [[_cell(row.get(x)) for x in columns] for row in shown])
    for note in outcome.notes:
        print_line(f"  {note}")


def _cell(value: object) -> object:
    return value.split("\n", 1)[0] if isinstance(value, str) else value


def main() -> int:
    """Return the exit status: 0, 1 if a part failed or took too long, 130 if interrupted."""
    parser = argparse.ArgumentParser(prog="make gpu-report", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("gpu-report.json"), help="file to send in (%(default)s)")
    add("--only", metavar="PART,...", help="tests, copies, transports, engines (default: all)")
    add("--model", default="demo", help="directory of the model that the engines serve (demo)")
    add("--engine", choices=("vllm", "fake"), default="vllm", help="fake: try it without vLLM")
    add(
        "--shim",
        type=Path,
        default=ROOT / ".venv-gpu-shim/bin/python",
        help="what make gpu-shim made",
    )
    add("--limit-s", type=float, default=LIMIT_S, help="of all parts together (%(default)g)")
    options = parser.parse_args()
    python = sys.executable
    machine = facts_of(python)
    if machine["gpu"] and options.shim.exists():
        shim = facts_of(str(options.shim))
        if not shim["gpu"]:
            # This environment's vLLM finds no GPU.
            python, machine = str(options.shim), {**shim, "vllm": machine["vllm"]}
    is_shim = bool(machine["facts"].get("is_shim"))
    for name, value in machine["facts"].items():
        print_line(f"{name}: {value}")
    if is_shim:
        print_line(f"There is no GPU. What follows ran {SHIM}.", "bold")
    report: dict[str, Any] = {
        "schema": 1,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine["facts"],
        "note": SHIM if is_shim else machine["gpu"],
        "steps": [],
    }
    status = 0
    try:
        for outcome in outcomes(options, machine, python):
            show(outcome, is_shim=is_shim)
            status |= outcome.status in ("failed", "timed out")
            report["steps"].append(asdict(outcome))
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    except KeyboardInterrupt:
        status = 130
    print_line(f"{options.out}: what to send in", "bold")
    return status


if __name__ == "__main__":
    sys.exit(main())
