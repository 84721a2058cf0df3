"""A request that kills every worker that computes it, with real processes. It ends at most two
workers, and every other answer is complete."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from tests.support.pdserve_up import ask, up
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.pdserve_up import UpProcess

DEADLY = 77  # a token; the engine's process gets SIGKILL when it computes a prompt with it


def completion(prompt: list[int]) -> dict[str, Any]:
    return {"model": "pdserve-demo", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}


def complete(url: str, prompt: list[int]) -> tuple[int, dict[str, Any]]:
    """Return status and body of a completion."""
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps(completion(prompt)).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def deaths(running: UpProcess) -> int:
    return running.output.count("restarted in")


def test_a_deadly_request_ends_two_workers_and_no_answer_of_others(tmp_path: Path) -> None:
    faults = f"worker.engine_args={{step_s: 0.02, kill_on_token: {DEADLY}}}"
    # The others wait for as long as a busy machine needs to start two workers again.
    options = ("--set", faults, "--set", "up.max_restart_pause_s=0.1")
    options += ("--set", "router.queue.timeout_s=120")
    with up(tmp_path, *options) as running, ThreadPoolExecutor(8) as pool:
        url = running.wait_until_serving()["http"]

        def whole(_: int) -> bytes:
            with ask(url, max_tokens=150) as response:
                return response.read()

        bystanders = [pool.submit(whole, number) for number in range(4)]
        status, body = complete(url, [5, DEADLY, 6])
        assert (status, body["error"]["code"]) == (422, "poison_request")
        for answer in bystanders:
            assert b'"finish_reason":"length"' in answer.result(WAIT_S)
        assert deaths(running) == 2
        # Sent again, it is refused before a worker sees it; and others are served.
        assert complete(url, [5, DEADLY, 6])[0] == 422
        assert complete(url, [5, 6])[0] == 200
        assert deaths(running) == 2
        running.send(signal.SIGTERM)
        assert running.wait() == 0, running.output
        assert running.survivors() == []
