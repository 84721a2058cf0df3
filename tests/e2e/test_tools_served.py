"""Forced tool calls through a service with one prefill and one decode worker, on real tokens."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from typing import TYPE_CHECKING, Any

import openai
import psutil
import pytest
from tokenizers import Tokenizer

from pdserve.demo import MODEL_DIR
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import WorkerStub
from tests.support.served_demo import MODEL
from tests.support.timeouts import WAIT_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.served_up import ServedUp


def tool(name: str, **properties: dict[str, Any]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TIME = tool("get_time", zone={"enum": ["utc", "cet"]}, hour={"type": "integer", "maximum": 23})
NOTE = tool("write_note", text={"type": "string", "minLength": 60, "maxLength": 80})
NAMED = {"type": "function", "function": {"name": "write_note"}}
ASKED = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is prefill?"}],
    "temperature": 0.0,
}


class Service:
    def __init__(self, stack: ServedUp) -> None:
        self.stack = stack
        self.client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)

    def ask(self, **values: Any) -> Any:
        return self.client.chat.completions.create(**{"tools": [TIME, NOTE], **ASKED, **values})


@pytest.fixture
def service(served_demo: ServedUp) -> Iterator[Service]:
    made = Service(served_demo)
    with made.client:
        yield made


def arguments_of(call: Any) -> Any:
    return json.loads(call.function.arguments)


def test_a_required_call_follows_its_schema_through_prefill_and_decode(service: Service) -> None:
    answer = service.ask(tool_choice="required", tools=[TIME])
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    for call in choice.message.tool_calls:
        assert call.function.name == "get_time"
        arguments = arguments_of(call)
        assert arguments["zone"] in {"utc", "cet"}
        assert arguments["hour"] <= 23
    assert answer.model_extra["pdserve"]["receipt"]["decode_worker"] == "decode-0"


def test_the_router_has_its_parser_process_forked(service: Service) -> None:
    """Its start need not import vLLM again."""
    assert service.ask(tool_choice="required", tools=[TIME]).choices[0].message.tool_calls
    (router,) = service.stack.ready["routers"]
    executed = [
        process.pid
        for process in psutil.process_iter(["ppid", "cmdline"])
        if process.info["ppid"] == router["pid"]
        and "workers.parser" in (process.info["cmdline"] or ())
    ]
    assert executed == []


def test_a_named_call_is_one_call_of_that_function(service: Service) -> None:
    (call,) = service.ask(tool_choice=NAMED).choices[0].message.tool_calls
    assert call.function.name == "write_note"
    assert 60 <= len(arguments_of(call)["text"]) <= 80


def test_a_forced_call_begins_after_the_reasoning_on_both_workers(service: Service) -> None:
    """The answer continues after reasoning tokens, inside the reasoning or after its end."""
    thoughts = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")).encode(
        "<think>I need the time.</think>", add_special_tokens=False
    )

    def ask(tokens: list[int]) -> Any:
        more = {"resume_token_ids": tokens, "chat_template_kwargs": {"enable_thinking": True}}
        answer = service.ask(tool_choice=NAMED, max_tokens=150, extra_body=more)
        assert answer.model_extra["pdserve"]["receipt"]["decode_worker"] == "decode-0"
        return answer.choices[0].message

    (call,) = ask(thoughts.ids).tool_calls
    assert 60 <= len(arguments_of(call)["text"]) <= 80
    # The model ends its thoughts by itself; its call is held to the schema then.
    thinking = ask(thoughts.ids[:3])
    assert thinking.reasoning
    (call,) = thinking.tool_calls
    assert 60 <= len(arguments_of(call)["text"]) <= 80


async def test_a_forced_call_continues_when_its_decode_worker_is_killed(service: Service) -> None:
    expected = service.ask(tool_choice=NAMED).choices[0].message.tool_calls[0].function.arguments
    (pid,) = [x["pid"] for x in service.stack.ready["workers"] if x["role"] == "decode"]
    found, receipt = "", None
    # Stopped, it does not end the answer before it is killed, however fast the machine is.
    os.kill(pid, signal.SIGSTOP)
    async with service.stack.client() as client:
        asked: Any = {"tools": [TIME, NOTE], **ASKED, "tool_choice": NAMED, "stream": True}
        stream = await client.chat.completions.create(**asked)
        await wait_until(partial(holds_kv, service.stack, "prefill-0"))
        os.kill(pid, signal.SIGKILL)
        async for chunk in stream:
            for call in chunk.choices[0].delta.tool_calls or ():
                found += call.function.arguments or ""
            receipt = (chunk.model_extra or {}).get("pdserve", receipt)
    assert found == expected
    assert receipt is not None
    assert receipt["receipt"]["fallbacks"], "the worker died in the middle"


async def holds_kv(stack: ServedUp, name: str) -> bool:
    """Return True if a worker holds KV for another one: it has computed a prompt."""
    (address,) = [x["address"] for x in stack.ready["workers"] if x["worker_id"] == name]
    async with stack.operator.open_channel(address) as channel:
        status = await WorkerStub(channel).GetStatus(
            w.GetStatusRequest(), timeout=WAIT_S, metadata=stack.operator.metadata
        )
    return bool(status.ledger.pinned_blocks)
