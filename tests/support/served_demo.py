"""The demo model on real engines, served once for all tests that ask it."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from pdserve.demo import MODEL_DIR
from pdserve.model.tokenizer import Tokenizer, read_files
from tests.support.pdserve_up import UpProcess
from tests.support.served_up import ServedUp

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL, ALIAS = "pdserve-demo", "gpt-4"
LONG = "Prefill and decode are two phases of one request. " * 400
EXPLAIN = "Explain disaggregated serving in detail."


def prompts_as_logged() -> list[str]:
    """Return what long prompts would look like in a log: as text, and as lists of tokens."""
    encode, texts = Tokenizer.load(read_files(MODEL_DIR)).encode, [LONG[:49], EXPLAIN]
    return texts + [str(encode(x, add_special_tokens=False)[1:6])[1:-1] for x in texts]


@pytest.fixture(scope="session")
def served_demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedUp]:
    """Serve the demo model for all files that test it."""
    # With one worker of each role every policy places alike; this one asks what is cached.
    policy = ("--set", "router.policy=prefix_aware", "--set", "router.prices.cpu=3600")
    flags = ["--host", "127.0.0.1", "--port", "0", "--max-num-seqs", "32"]
    flags += ["--decode.max-num-seqs=48", "--pooling", "1"]
    names = ("--served-model-name", MODEL, ALIAS)
    directory = tmp_path_factory.mktemp("up")
    up = UpProcess(directory, "demo", *flags, *names, *policy, command="serve")
    try:
        yield ServedUp(up)
        up.send(signal.SIGINT)
        assert up.wait() == 0, up.output
        assert up.survivors() == []
        # Whatever was asked, and however it ended, no process has logged it.
        assert "decode-0" in up.output
        assert [x for x in prompts_as_logged() if x in up.output] == []
    finally:
        up.close()
