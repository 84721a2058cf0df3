"""Real client packages with default settings, against the demo model on one prefill and one decode
worker. docs/clients.md says what each of them does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.patience import WAIT_S
from tests.up_process import ROOT, up

if TYPE_CHECKING:
    from collections.abc import Iterator

CLIENTS = ROOT / "tests" / "clients"
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
NODE = shutil.which("node")
ENV = {
    **os.environ,
    # No client reports home or asks a hub for a file while a test runs.
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with up(tmp_path_factory.mktemp("up"), "--engine", "vllm") as running:
        yield running.wait_until_serving()["http"]


def run(*words: str) -> None:
    done = subprocess.run(
        [*words, "pdserve-demo"],
        env=ENV,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(
    not (PYTHON.parents[1] / "installed").exists(),
    reason="needs the environment that `make test-tools` makes",
)
@pytest.mark.parametrize(
    "client",
    [
        "openai",
        "anthropic",
        "langchain",
        "pydantic_ai",
        "litellm",
        "llama_index",
        "openai_agents",
        "instructor",
        "lm_eval",
    ],
)
def test_python_client(client: str, url: str) -> None:
    run(str(PYTHON), str(CLIENTS / "clients.py"), client, url)


@pytest.mark.slow
def test_vllms_own_benchmark(url: str) -> None:
    # `vllm bench serve` without its command line, which the CPU build's package does not start.
    code = """
import sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
result = main(parser.parse_args(sys.argv[1:-1] + ["--model", sys.argv[-1]]))
assert result["completed"] == 8 and result["failed"] == 0, result
"""
    lengths = ["--random-input-len", "64", "--random-output-len", "16", "--num-prompts", "8"]
    tokenizer = ["--tokenizer", str(ROOT / "pdserve" / "demo" / "model")]
    options = ["--base-url", url, "--dataset-name", "random", *lengths, *tokenizer]
    run(sys.executable, "-c", code, *options)


@pytest.mark.slow
@pytest.mark.skipif(
    NODE is None or not (CLIENTS / "node_modules").exists(),
    reason="needs Node, and the packages that `make test-tools` installs",
)
@pytest.mark.parametrize("client", ["openai", "ai_sdk_openai", "ai_sdk_compatible"])
def test_node_client(client: str, url: str) -> None:
    assert NODE is not None
    run(NODE, str(CLIENTS / "clients.mjs"), client, url)
