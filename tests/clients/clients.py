"""Real Python clients, each with its default settings: `clients.py NAME URL MODEL`.

Runs in its own environment (`make test-tools`) and imports nothing of this project. A client passes
if its call returns the model's answer, and runs the tool that the model calls.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

ASK = "Count to five."
# The demo model is trained to call tools; it calls this one on this question.
TOOL_ASK = "What is the weather in Paris?"
WEATHER = {
    "name": "get_weather",
    "description": "The weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
CITIES = []  # arguments of the tool calls


def get_weather(city: str) -> str:
    """The weather."""
    CITIES.append(city)
    return '{"weather": "rain"}'


def openai(url: str, model: str) -> None:
    """Try chat (whole and streamed), a tool call and its result, Responses, two completions,
    models."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    asked = [{"role": "user", "content": ASK}]
    said = client.chat.completions.create(model=model, messages=asked, temperature=0)
    text = said.choices[0].message.content
    assert text
    stream = client.chat.completions.create(model=model, messages=asked, temperature=0, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == text
    assert client.responses.create(model=model, input=ASK, temperature=0).output_text == text
    both = client.completions.create(model=model, prompt=["One", "Two"], max_tokens=4)
    assert len(both.choices) == 2
    assert model in [m.id for m in client.models.list()]

    options = {
        "model": model,
        "temperature": 0,
        "tools": [{"type": "function", "function": WEATHER}],
    }
    chat = [{"role": "user", "content": TOOL_ASK}]
    message = client.chat.completions.create(messages=chat, **options).choices[0].message
    (call,) = message.tool_calls
    result = get_weather(**json.loads(call.function.arguments))
    chat += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    last = client.chat.completions.create(messages=chat, **options).choices[0].message
    assert "rain" in last.content


def anthropic(url: str, model: str) -> None:
    """Try messages (whole and streamed), the token count, a tool call and its result."""
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key="none")
    asked = [{"role": "user", "content": ASK}]
    said = client.messages.create(model=model, messages=asked, max_tokens=64)
    assert said.content[0].text
    with client.messages.stream(model=model, messages=asked, max_tokens=64) as stream:
        text = "".join(stream.text_stream)
    assert text
    counted = client.messages.count_tokens(model=model, messages=asked)
    assert counted.input_tokens == said.usage.input_tokens

    tool = {"name": "get_weather", "description": "The weather."}
    tool["input_schema"] = WEATHER["parameters"]
    options = {"model": model, "max_tokens": 64, "tools": [tool], "extra_body": {"temperature": 0}}
    chat = [{"role": "user", "content": TOOL_ASK}]
    answer = client.messages.create(messages=chat, **options)
    assert answer.stop_reason == "tool_use"
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": get_weather(**call.input)}
    chat += [
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    assert "rain" in client.messages.create(messages=chat, **options).content[0].text


def langchain(url: str, model: str) -> None:
    """Try invoke, stream, and a call of a bound tool."""
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=model, temperature=0)
    assert chat.invoke(ASK).content
    assert "".join(chunk.content for chunk in chat.stream(ASK))
    (call,) = chat.bind_tools([get_weather]).invoke(TOOL_ASK).tool_calls
    get_weather(**call["args"])


def pydantic_ai(url: str, model: str) -> None:
    """Run an agent that calls a tool."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    chat = OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    agent = Agent(chat, tools=[get_weather], model_settings={"temperature": 0})
    assert "rain" in agent.run_sync(TOOL_ASK).output


def litellm(url: str, model: str) -> None:
    """Try completion (whole and streamed) and a tool call."""
    import litellm as package

    options = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none"}
    asked = [{"role": "user", "content": ASK}]
    assert package.completion(messages=asked, **options).choices[0].message.content
    stream = package.completion(messages=asked, stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    options |= {"temperature": 0, "tools": [{"type": "function", "function": WEATHER}]}
    chat = [{"role": "user", "content": TOOL_ASK}]
    (call,) = package.completion(messages=chat, **options).choices[0].message.tool_calls
    get_weather(**json.loads(call.function.arguments))


def llama_index(url: str, model: str) -> None:
    """Try chat, stream_complete, and a tool call."""
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    options = {"api_base": f"{url}/v1", "api_key": "none", "is_chat_model": True, "temperature": 0}
    client = OpenAILike(model=model, is_function_calling_model=True, **options)
    assert client.chat([ChatMessage(role="user", content=ASK)]).message.content
    assert "".join(chunk.delta or "" for chunk in client.stream_complete(ASK))
    tool = FunctionTool.from_defaults(
        fn=get_weather, name="get_weather", description="The weather."
    )
    assert "rain" in str(client.predict_and_call([tool], TOOL_ASK).response)


def openai_agents(url: str, model: str) -> None:
    """Run an agent that calls a tool, over Responses (the default)."""
    from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    os.environ |= {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none"}
    settings = ModelSettings(temperature=0)
    agent = Agent(
        name="clock", model=model, tools=[function_tool(get_weather)], model_settings=settings
    )
    assert "rain" in asyncio.run(Runner.run(agent, TOOL_ASK)).final_output


def instructor(url: str, model: str) -> None:
    """Request an object, by a forced tool call (the default) and by a JSON schema."""
    import instructor as package
    from openai import OpenAI
    from pydantic import BaseModel, Field

    class City(BaseModel):
        name: str = Field(max_length=20)
        has_rain: bool

    raw = OpenAI(base_url=f"{url}/v1", api_key="none")
    for mode in (package.Mode.TOOLS, package.Mode.JSON_SCHEMA):
        client = package.from_openai(raw, mode=mode)
        found = client.chat.completions.create(
            model=model,
            response_model=City,
            messages=[{"role": "user", "content": TOOL_ASK}],
            temperature=0,
        )
        assert isinstance(found, City)


def lm_eval(url: str, model: str) -> None:
    """Run a task that generates, and one that compares the likelihood of two answers."""
    with tempfile.TemporaryDirectory() as directory:
        os.environ["HF_HOME"] = directory
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager

        Path(directory, "rows.jsonl").write_text('{"ask": "One, two,", "answer": " three"}\n')
        rows = {"data_files": str(Path(directory, "rows.jsonl"))}
        task = {"dataset_path": "json", "dataset_kwargs": rows, "test_split": "train"}
        task |= {"doc_to_text": "{{ask}}", "doc_to_target": "{{answer}}"}
        generates = {"task": "writes", "output_type": "generate_until", **task}
        generates["generation_kwargs"] = {"until": ["\n"], "max_gen_toks": 8}
        compares = {"task": "compares", "output_type": "multiple_choice", **task}
        compares |= {"doc_to_target": 0, "doc_to_choice": ["{{answer}}", " zebra zebra"]}
        found = simple_evaluate(
            model="local-completions",
            model_args={
                "base_url": f"{url}/v1/completions",
                "model": model,
                "tokenizer_backend": "remote",
            },
            tasks=[generates, compares],
            task_manager=TaskManager(include_defaults=False),
        )["samples"]
    assert found["writes"][0]["resps"][0][0]
    likelihoods = [float(resp[0][0]) for resp in found["compares"][0]["resps"]]
    assert likelihoods[1] < likelihoods[0] < 0


if __name__ == "__main__":
    client = sys.argv[1]
    globals()[client](*sys.argv[2:])
    assert client in ("instructor", "lm_eval") or CITIES == ["Paris"], CITIES
