"""A worker has its cores, and as many threads as those."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pdserve.errors import ConfigError
from workers.main import pin, thread_environment


@pytest.mark.parametrize(("cores", "threads"), [((3,), "1"), ((0, 1, 5), "3")])
def test_every_thread_pool_has_one_thread_a_core(cores: tuple[int, ...], threads: str) -> None:
    environment = thread_environment(cores)
    assert environment["OMP_NUM_THREADS"] == threads
    assert set(environment.values()) == {threads}


def test_no_cores_change_nothing() -> None:
    assert thread_environment(()) == {}
    before = os.sched_getaffinity(0)
    pin(())
    assert os.sched_getaffinity(0) == before


def test_a_pinned_process_and_its_children_have_those_cores() -> None:
    core = min(os.sched_getaffinity(0))
    script = (
        "import os, subprocess, sys; from workers.main import pin; pin([int(sys.argv[1])]);"
        "ask = 'import os; print(os.sched_getaffinity(0), os.environ[\"OMP_NUM_THREADS\"])';"
        "subprocess.run([sys.executable, '-c', ask], check=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(core)], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == f"{{{core}}} 1"


def test_cores_that_are_not_ours_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for name in thread_environment([0]):
        monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError) as caught:
        pin([1 << 12])
    assert caught.value.field == "cores"


def test_pinning_after_torch_is_a_bug_that_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(RuntimeError):
        pin([0])
