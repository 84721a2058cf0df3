"""`pdserve up` as real processes: what it starts, how it stops, and that nothing outlives it."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from pdserve.net.rpc import authorization
from pdserve.security.local import admin_key
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import RegistryStub
from tests.support.commands import run_cli
from tests.support.pdserve_up import ask, up
from tests.support.timeouts import WAIT_S

# One worker, for tests to which it does not matter what the workers do.
ONE = ("--prefill", "0", "--decode", "0", "--aggregated", "1")


def workers_of(ready: dict[str, Any], address: str = "") -> list[w.WorkerEntry]:
    """Return the workers of the router at `address`, by default of the first one."""
    token = authorization(admin_key(Path(ready["run_dir"])))
    with grpc.insecure_channel(address or ready["grpc"]) as channel:
        listed = RegistryStub(channel).ListWorkers(
            w.ListWorkersRequest(), timeout=WAIT_S, metadata=token, wait_for_ready=True
        )
    return list(listed.workers)


def until_states(ready: dict[str, Any], **wanted: str) -> None:
    """Wait until the router's workers are in these states."""
    ends_at = time.monotonic() + WAIT_S
    while (found := {x.info.worker_id: x.state for x in workers_of(ready)}) != wanted:
        assert time.monotonic() < ends_at, found
        time.sleep(0.02)


def test_it_serves_models_and_stops_without_a_trace_when_told(tmp_path: Path) -> None:
    """Each of several models has workers of its own."""
    alone = "prefill: {workers: 0}, decode: {workers: 0}, aggregated: {workers: 1}"
    file = tmp_path / "models.yaml"
    file.write_text(f"up: {{models: [{{model_names: [a, gpt]}}, {{model_names: [b], {alone}}}]}}")
    with up(tmp_path, "--config", str(file), "--run-dir", "") as running:
        ready = running.wait_until_serving()
        assert ready["pid"] == running.process.pid
        found = {x.info.worker_id: x.info.model.name for x in workers_of(ready)}
        assert found == {"prefill-0": "a", "decode-0": "a", "aggregated-0": "b"}
        assert {worker["worker_id"] for worker in ready["workers"]} == found.keys()
        for name, model in (("gpt", b'"model":"a"'), ("b", b'"model":"b"')):
            with ask(ready["http"], model=name) as response:
                said = response.read()
                assert model in said
                assert said.endswith(b"data: [DONE]\n\n")
        assert f"Console  {ready['http']}/console\n" in running.output
        running.send(signal.SIGTERM)
        assert running.wait() == 0, running.output
        assert running.survivors() == []
        assert not running.ready_path.exists()
        assert not Path(ready["run_dir"]).exists()


def test_several_routers_share_a_port_and_up_prints_the_command(tmp_path: Path) -> None:
    """All routers share the port, and each can answer."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    shared = ("--routers", "2", "--shared-http-port", str(port), "--model-name", "chatty")
    with up(tmp_path, *shared) as running:
        line = running.wait_for_line("curl")
        assert '"model": "chatty"' in line
        ready = running.wait_until_serving()
        first, second = ready["routers"]
        assert (first["http"], first["pid"]) == (ready["http"], ready["router"]["pid"])
        for router in (first, second):
            assert {x.state for x in workers_of(ready, router["grpc"])} == {"ready"}
            connections = psutil.Process(router["pid"]).net_connections(kind="tcp")
            assert port in [x.laddr.port for x in connections if x.status == psutil.CONN_LISTEN]
        running.wait_for_line("pdserve chat", f"{first['grpc']},{second['grpc']}")
        for _ in range(8):  # a new connection each
            with ask(f"http://127.0.0.1:{port}", model="chatty", max_tokens=2) as response:
                assert response.read().endswith(b"data: [DONE]\n\n")
        running.send(signal.SIGTERM)
        assert running.wait() == 0, running.output
        assert running.survivors() == []


def test_ctrl_c_on_a_terminal_is_the_supervisors_alone_to_act_on(tmp_path: Path) -> None:
    with up(tmp_path, *ONE, terminal=True) as running:
        ready = running.wait_until_serving()
        running.press_ctrl_c()
        assert running.wait() == 0, running.output
        assert running.survivors() == []
        # Each process was told to stop in its turn: none was interrupted by the terminal.
        assert "died" not in running.output
        assert "killed" not in running.output
        for name in ("router", *(worker["worker_id"] for worker in ready["workers"])):
            log = (tmp_path / "run" / f"{name}.log").read_text()
            assert "KeyboardInterrupt" not in log
            assert "Traceback" not in log


def test_a_running_answer_is_finished_before_the_stop(tmp_path: Path) -> None:
    settings = ("--set", "worker.engine_args={step_s: 0.02}", "--set", "router.stop_grace_s=600")
    with up(tmp_path, *ONE, *settings) as running:
        ready = running.wait_until_serving()
        with ask(ready["http"], max_tokens=40) as response:
            first = response.readline()
            running.send(signal.SIGINT)
            running.wait_for_line("stopping")
            rest = response.read()
        assert first.startswith(b"data:")
        assert b'"finish_reason":"length"' in rest.replace(b" ", b"")
        assert rest.endswith(b"data: [DONE]\n\n")
        assert running.wait() == 0
        assert running.survivors() == []


def test_a_second_ctrl_c_ends_it_at_once(tmp_path: Path) -> None:
    settings = ("--set", "worker.engine_args={step_s: 30}", "--set", "router.stop_grace_s=600")
    with up(tmp_path, *ONE, *settings) as running:
        ready = running.wait_until_serving()
        with socket.create_connection(ready["http"].removeprefix("http://").split(":")) as client:
            body = b'{"model": "pdserve-demo", "prompt": "x", "max_tokens": 9}'
            head = (
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
            )
            client.sendall(head % len(body) + body)
            while not any(x.outstanding_requests for x in workers_of(ready)):
                pass
            running.send(signal.SIGINT)
            running.wait_for_line("stopping: running requests")
            running.send(signal.SIGINT)
            assert running.wait() == 130
        assert running.survivors() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_a_supervisor_that_ends_while_workers_start(
    tmp_path: Path, number: signal.Signals
) -> None:
    with up(tmp_path, "--set", "worker.engine_args={start_s: 600.0}") as running:
        running.wait_for_line("prefill-0", "loading")
        running.wait_for_line("decode-0", "loading")
        assert len(running.watch_children()) == 3
        running.send(number)
        assert running.wait() == (0 if number == signal.SIGINT else -signal.SIGKILL)
        assert running.survivors() == []


def test_a_worker_that_dies_at_its_start_ends_everything_with_its_reason(tmp_path: Path) -> None:
    with up(tmp_path, *ONE, "--set", "worker.engine_args={start_s: -1.0}") as running:
        assert running.wait() == 2
        assert "died (exit code 2)" in running.output
        assert "start_s" in running.output
        assert f"{tmp_path}/run/" in running.output
        assert not running.ready_path.exists()


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("--model", "/nowhere"), "worker.model: /nowhere is not a model directory"),
        (("--set", "worker.prot=1"), "worker.prot: unknown key"),
    ],
)
def test_a_configuration_that_cannot_start_is_refused_by_key(
    args: tuple[str, ...], reason: str
) -> None:
    ended = run_cli("up", "--engine", "fake", *args)
    assert ended.returncode == 2
    assert reason in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(("taken", "other"), [("http", "grpc"), ("grpc", "http")])
def test_a_port_in_use_is_named_with_its_option(taken: str, other: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        ports = (f"--{taken}-port={port}", f"--{other}-port=0")
        ended = run_cli("up", "--engine", "fake", *ONE, *ports)
    assert ended.returncode == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in ended.stdout
    assert f"--{taken}-port" in ended.stdout


def test_a_process_that_dies_while_serving_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with up(tmp_path, *ONE, "--run-dir", "") as running:
        before = running.wait_until_serving()
        pids = {worker["worker_id"]: worker["pid"] for worker in before["workers"]}
        pids["router"] = before["router"]["pid"]
        for victim in ("aggregated-0", "router"):
            signal.pidfd_send_signal(running._pidfds[pids[victim]], signal.SIGKILL)
            running.wait_for_line(victim, "is back")
            after = json.loads(running.ready_path.read_text())
            assert (after["http"], after["grpc"]) == (before["http"], before["grpc"])
            running.watch_children()
        # A router that is back waits for its workers to notice.
        until_states(after, **{"aggregated-0": "ready"})
        answered = run_cli("generate", "--grpc", after["grpc"], "--max-tokens", "4", "x")
        assert answered.returncode == 0, answered.stderr
        running.send(signal.SIGTERM)
        assert running.wait() == 0, running.output
        assert running.survivors() == []
        assert Path(before["run_dir"], "aggregated-0.log").exists(), "it may say why"


def test_a_worker_that_keeps_dying_never_ends_the_service(tmp_path: Path) -> None:
    """The worker is shown as crash-looping with the reason until it is ready; others serve."""
    pause = ("--set", "up.max_restart_pause_s=0.1")
    with up(tmp_path, "--prefill", "1", "--decode", "2", *pause) as running:
        ready = running.wait_until_serving()

        def kill() -> str:
            now = json.loads(running.ready_path.read_text())["workers"]
            os.kill({x["worker_id"]: x["pid"] for x in now}["decode-0"], signal.SIGKILL)
            return running.wait_for_line("decode-0 is", "restarted in")

        def until(state: str) -> w.WorkerEntry:
            while True:
                seen = {x.info.worker_id: x for x in workers_of(ready)}
                assert seen["decode-1"].state == seen["prefill-0"].state == "ready"
                if seen["decode-0"].state == state:
                    return seen["decode-0"]
                time.sleep(0.02)

        for deaths in (1, 2):
            assert (f"crash-looping ({deaths} deaths)" in kill()) == (deaths > 1)
            running.wait_for_line("decode-0 is back")
        # From now on it cannot start.
        config = tmp_path / "run" / "decode-0.yaml"
        config.unlink()
        config.mkdir()
        kill()
        while "cannot start" not in until("crash-looping").reason:
            pass  # the reason is the signal until the first restart has failed
        with urllib.request.urlopen(f"{ready['http']}/metrics", timeout=WAIT_S) as metrics:
            labels = b'model="pdserve-demo",role="decode",state="crash-looping"'
            assert b"pdserve_workers{%s} 1.0" % labels in metrics.read()
        with ask(ready["http"]) as response:
            assert response.read().endswith(b"data: [DONE]\n\n")
        config.rmdir()
        until("ready")
        running.send(signal.SIGTERM)
        assert running.wait() == 0, running.output
        assert running.survivors() == []


def test_decode_workers_follow_the_load_and_no_answer_is_lost(tmp_path: Path) -> None:
    seats = "worker.engine_args={step_s: 0.02, max_num_seqs: 4}"
    times = ("--set", "up.scaling.up_after_s=0.5", "--set", "up.scaling.down_after_s=1")
    warm = ("--set", "up.decode.warm_workers=1")
    scaled = ("--max-decode", "2", *warm, "--set", seats, *times)
    with up(tmp_path, *scaled) as running, ThreadPoolExecutor(16) as pool:
        ready = running.wait_until_serving()
        assert [x["worker_id"] for x in ready["workers"]] == ["prefill-0", "decode-0"]
        both = {"prefill-0": "ready", "decode-0": "ready"}
        until_states(ready, **both, **{"decode-1": "draining"})

        def whole(_: int) -> bytes:
            with ask(ready["http"], max_tokens=200) as response:
                return response.read()

        answers = [pool.submit(whole, number) for number in range(12)]
        running.wait_for_line("decode-1 was loaded, and takes requests")
        names = [x["worker_id"] for x in json.loads(running.ready_path.read_text())["workers"]]
        assert names == ["prefill-0", "decode-0", "decode-1"]
        for answer in answers:
            assert b'"finish_reason":"length"' in answer.result(WAIT_S)
        running.wait_for_line("1 decode workers instead of 2")
        running.wait_for_line("has ended and is restarted")  # as a warm one
        with ask(ready["http"]) as response:
            assert response.read().endswith(b"data: [DONE]\n\n")
        running.send(signal.SIGINT)
        assert running.wait() == 0, running.output
        assert running.survivors() == []


def test_a_model_without_requests_stops_and_the_next_one_starts_it(tmp_path: Path) -> None:
    idle = ("--set", "up.scaling.to_zero_after_s=1")
    with up(tmp_path, *idle) as running:
        ready = running.wait_until_serving()
        workers = [psutil.Process(x["pid"]) for x in ready["workers"]]
        running.wait_for_line("0 decode workers instead of 1")
        assert not psutil.wait_procs(workers, WAIT_S)[1]
        with urllib.request.urlopen(f"{ready['http']}/v1/models", timeout=WAIT_S) as listed:
            assert b"pdserve-demo" in listed.read()
        with urllib.request.urlopen(f"{ready['http']}/ready", timeout=WAIT_S) as answer:
            assert answer.status == 200
        with ask(ready["http"]) as response:
            assert response.read().endswith(b"data: [DONE]\n\n")
        running.send(signal.SIGINT)
        assert running.wait() == 0, running.output
        assert running.survivors() == []
