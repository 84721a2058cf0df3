"""Real client packages with default settings, against the demo model on one prefill and one decode
worker. docs/clients.md says what each of them does."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import jsonschema_rs
import openai
import pytest
from tokenizers import Tokenizer

from tests.support.cluster import Cluster
from tests.support.commands import ROOT, run
from tests.support.pdserve_up import up
from tests.support.timeouts import START_S, WAIT_S
from workers.fake import model as fake_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

# BFCL's names of types, and JSON Schema's.
TYPES = {"dict": "object", "float": "number", "tuple": "array"}
BFCL = ("simple_python", "live_simple", "multiple", "live_multiple")
MODEL = "pdserve-demo"
CLIENTS = ROOT / "tests" / "clients"
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
NODE = shutil.which("node")
LOAD_CLIENTS = ROOT / ".venv-load-clients"
CODEX = CLIENTS / "node_modules" / ".bin" / "codex"
DEMO = ROOT / "pdserve" / "demo" / "model"
ENV = {
    **os.environ,
    # No client reports home or asks a hub for a file while a test runs.
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


def needs(*found: object) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not all(found), reason="needs what `make test-tools` installs")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with up(tmp_path_factory.mktemp("up"), "--engine", "vllm") as running:
        yield running.wait_until_serving()["http"]


@needs((PYTHON.parents[1] / "installed").exists())
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
    run(PYTHON, CLIENTS / "clients.py", client, url, MODEL, env=ENV)


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
    tokenizer = ["--tokenizer", str(DEMO)]
    options = ["--base-url", url, "--dataset-name", "random", *lengths, *tokenizer]
    run(sys.executable, "-c", code, *options, MODEL, env=ENV)


@needs((LOAD_CLIENTS / "installed").exists())
def test_guidellm(url: str, tmp_path: Path) -> None:
    options = ["--backend", f"kind=openai_http,target={url}"]
    options += ["--profile", "kind=concurrent,streams=4"]
    options += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"]
    options += ["--tokenizer", f"kind=huggingface_auto,model={DEMO}"]
    options += ["--constraint", "kind=max_requests,count=16", "--disable-console"]
    guidellm = LOAD_CLIENTS / "bin" / "guidellm"
    run(guidellm, "run", *options, within_s=START_S, cwd=tmp_path, env=ENV)
    (benchmark,) = json.loads((tmp_path / "benchmarks.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals == {"successful": 16, "errored": 0, "incomplete": 0, "total": 16}


@needs((LOAD_CLIENTS / "installed").exists())
def test_aiperf(url: str, tmp_path: Path) -> None:
    options = ["--model", MODEL, "--url", url, "--endpoint-type", "chat", "--streaming"]
    options += ["--tokenizer", str(DEMO), "--request-count", "16", "--concurrency", "4"]
    options += ["--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "16"]
    options += ["--ui", "none", "--artifact-dir", str(tmp_path)]
    # It takes a tokenizer's directory for a name on the hub if it is told to be offline.
    online = {key: value for key, value in ENV.items() if key != "HF_HUB_OFFLINE"}
    # It starts many processes of its own.
    run(LOAD_CLIENTS / "bin" / "aiperf", "profile", *options, within_s=START_S, env=online)
    (found,) = tmp_path.rglob("profile_export_aiperf.json")
    result = json.loads(found.read_text())
    assert result["request_count"]["avg"] == 16
    assert result["error_summary"] == []


@needs(NODE, (CLIENTS / "node_modules").exists())
@pytest.mark.parametrize("client", ["openai", "ai_sdk_openai", "ai_sdk_compatible"])
def test_node_client(client: str, url: str) -> None:
    assert NODE is not None
    run(NODE, CLIENTS / "clients.mjs", client, url, MODEL, env=ENV)


def script(monkeypatch: pytest.MonkeyPatch, *answers: str) -> None:
    """Have fake engines say `answers` in the demo model's tokens: the n-th to a conversation with n
    results of tools. Their KV becomes n and a byte for each token said."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    result = tokenizer.token_to_id("<|tool|>")
    said = [[*tokenizer.encode(x).ids, fake_model.EOS] for x in answers]

    def kv_of(token_ids: Sequence[int], *_: object) -> bytes:
        return bytes([token_ids.count(result)])

    def extend(kv: bytes, token_ids: Sequence[int], *_: object) -> bytes:
        return kv + bytes(len(token_ids))

    def next_token(kv: bytes, *_: object) -> int:
        return said[kv[0]][len(kv) - 1]

    def text_of(token_id: int) -> str:
        text: str = tokenizer.decode([token_id], skip_special_tokens=False)
        return "" if token_id == fake_model.EOS else text

    for replacement in (kv_of, extend, next_token, text_of):
        monkeypatch.setattr(fake_model, replacement.__name__, replacement)


@needs(NODE, CODEX.exists())
async def test_a_turn_of_codex_runs_the_command_that_the_model_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its instructions and tools are longer than the demo model's context, so fake engines serve it.
    demo = tmp_path / "model"
    shutil.copytree(DEMO, demo)
    config = json.loads((demo / "config.json").read_text()) | {"max_position_embeddings": 1 << 16}
    (demo / "config.json").write_text(json.dumps(config))
    call = {"name": "exec_command", "arguments": {"cmd": "echo written by a tool > note"}}
    script(monkeypatch, f"<tool_call>{json.dumps(call)}</tool_call>", "The note is written.")
    worker = {"model": str(demo), "model_names": (MODEL,)}
    async with Cluster(prefill=1, decode=1, worker=worker) as cluster:
        provider = f'{{name="pdserve", base_url="http://{cluster.http}/v1", wire_api="responses"}}'
        settings = {
            "model": f'"{MODEL}"',
            "model_provider": '"pdserve"',
            "model_providers.pdserve": provider,
            "analytics.enabled": "false",
            "check_for_update_on_startup": "false",
        }
        options = [x for key, value in settings.items() for x in ("-c", f"{key}={value}")]
        # Without its sandbox, which not every container allows.
        options += ["--skip-git-repo-check", "--sandbox", "danger-full-access", "--json"]
        process = await asyncio.create_subprocess_exec(
            str(CODEX),
            "exec",
            *options,
            "Write a note.",
            cwd=tmp_path,
            env={**ENV, "CODEX_HOME": str(tmp_path)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), WAIT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            raise
    assert process.returncode == 0, output.decode()
    assert (tmp_path / "note").read_text() == "written by a tool\n", output.decode()
    assert "The note is written." in output.decode()


def json_schema(bfcl: dict[str, Any]) -> dict[str, Any]:
    """JSON Schema of a parameter as BFCL writes it. The demo model need not end a text or a list by
    itself, so both are short."""
    schema: dict[str, Any] = {
        name: bfcl[name] for name in ("type", "enum", "required", "maximum") if name in bfcl
    }
    kind: Any = TYPES.get(bfcl["type"], bfcl["type"])
    if kind == "any":
        kind = ["string", "integer", "boolean"]
    schema["type"] = kind
    if kind == "object":
        schema["properties"] = {k: json_schema(v) for k, v in bfcl.get("properties", {}).items()}
        schema["additionalProperties"] = False
    elif kind == "array":
        schema |= {"items": json_schema(bfcl["items"]), "maxItems": 3}
    elif "string" in kind and "enum" not in bfcl:
        schema["maxLength"] = 24
    return schema


def bfcl_functions() -> Iterator[tuple[str, dict[str, Any]]]:
    """Return questions with one of their functions, from some rows of each file."""
    (data,) = PYTHON.parents[1].glob("lib/python3*/site-packages/bfcl_eval/data")
    for name in BFCL:
        rows = (data / f"BFCL_v4_{name}.json").read_text().splitlines()
        for line in rows[:: len(rows) // 12]:
            row = json.loads(line)
            yield row["question"][0][-1]["content"], row["function"][-1]


@needs((PYTHON.parents[1] / "installed").exists())
def test_a_forced_call_of_a_function_of_bfcl_follows_its_schema(url: str) -> None:
    client: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def is_whole(asked: tuple[str, dict[str, Any]]) -> bool:
        question, found = asked
        name, schema = found["name"].replace(".", "_"), json_schema(found["parameters"])
        (choice,) = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": question[:400]}],
            tools=[{"type": "function", "function": {"name": name, "parameters": schema}}],
            tool_choice={"type": "function", "function": {"name": name}},
            temperature=0,
            max_tokens=400,
        ).choices
        (call,) = choice.message.tool_calls
        assert call.function.name == name
        # A small model may fill the space between two values until its answer is cut.
        if choice.finish_reason == "length":
            return False
        jsonschema_rs.validate(schema, json.loads(call.function.arguments))
        return True

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(is_whole, bfcl_functions()))
    assert sum(found) > len(found) / 2, f"{sum(found)} of {len(found)} calls were not cut"
