"""Real Python clients, each with its default settings: `clients.py NAME URL MODEL`.

Runs in an environment of its own (`make test-tools`); it imports nothing of this project. A client
passes if its call returns and says what the model said.
"""

from __future__ import annotations

import asyncio
import os
import sys

ASK = "Count to five."


def openai(url: str, model: str) -> None:
    """Chat whole and streamed, Responses, two completions, the list of models."""
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


def anthropic(url: str, model: str) -> None:
    """Messages whole and streamed, and the count of tokens."""
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


def langchain(url: str, model: str) -> None:
    """invoke and stream."""
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=model)
    assert chat.invoke(ASK).content
    assert "".join(chunk.content for chunk in chat.stream(ASK))


def pydantic_ai(url: str, model: str) -> None:
    """A run of an agent."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    chat = OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    assert Agent(chat).run_sync(ASK).output


def litellm(url: str, model: str) -> None:
    """completion, whole and streamed."""
    import litellm as package

    options = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none"}
    asked = [{"role": "user", "content": ASK}]
    assert package.completion(messages=asked, **options).choices[0].message.content
    stream = package.completion(messages=asked, stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def llama_index(url: str, model: str) -> None:
    """chat and stream_complete."""
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    options = {"api_base": f"{url}/v1", "api_key": "none", "is_chat_model": True}
    client = OpenAILike(model=model, **options)
    assert client.chat([ChatMessage(role="user", content=ASK)]).message.content
    assert "".join(chunk.delta or "" for chunk in client.stream_complete(ASK))


def openai_agents(url: str, model: str) -> None:
    """One run of an agent over Responses (the default)."""
    from agents import Agent, Runner, set_tracing_disabled

    set_tracing_disabled(True)
    os.environ |= {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none"}
    agent = Agent(name="clock", model=model)
    assert asyncio.run(Runner.run(agent, ASK)).final_output


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
