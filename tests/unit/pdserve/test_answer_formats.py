"""Parsers are found by a model's chat template. The templates here are rebuilt: they have the
structure and the marks of published ones, and little of their text."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pdserve.model import answer_formats
from pdserve.model.answer_formats import parsers_of
from pdserve.model.chat_template import ChatTemplate, ParserNames

TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
TALK = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
BEGIN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
THOUGHT = (
    "{% for m in messages %}{% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}"
    "{% endfor %}"
)
OPENS = BEGIN + "{% if add_generation_prompt %}<think>\n{% endif %}"
ON_UNLESS = (
    BEGIN + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% endif %}"
)
OFF_UNLESS = (
    "{% if thinking is not defined %}{% set thinking = false %}{% endif %}"
    + BEGIN
    + "{{ '<think>' if thinking else '</think>' }}"
)
XML = (
    "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>"
)
GLM_XML = "<tool_call>NAME<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>"
HERMES = '<tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call>'
# A switch that is no variable of the template, but a word in a message.
SWITCHED_BY_WORD = (
    "{% set ns = namespace(enable_thinking=true) %}{% for m in messages %}"
    "{% if '/no_think' in m.content %}{% set ns.enable_thinking = false %}{% endif %}{% endfor %}"
    + TOOLS
    + "<TOOLCALL>[...]</TOOLCALL>"
    + TALK
    + "{{ '<think>\n\n' if ns.enable_thinking else '<think></think>' }}"
)
SUPER = (
    "{% set enable_thinking = true %}{% if '/no_think' in messages[0].content %}"
    "{% set enable_thinking = false %}{% endif %}"
    + TOOLS
    + "<TOOLCALL>"
    + TALK
    + "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
)

# Template, parser of tool calls, parser of reasoning, and whether the model reasons by default.
FAMILIES: dict[str, tuple[str, str, str, bool | None]] = {
    "Qwen2.5": (TOOLS + HERMES + TALK + BEGIN, "hermes", "", None),
    "Qwen3": (TOOLS + HERMES + THOUGHT + TALK + ON_UNLESS, "hermes", "qwen3", True),
    "QwQ": (TOOLS + HERMES + THOUGHT + TALK + OPENS, "hermes", "deepseek_r1", True),
    "reasoning in the history only": (
        TOOLS + HERMES + THOUGHT + TALK + BEGIN,
        "hermes",
        "deepseek_r1",
        False,
    ),
    "Qwen3-Coder": (TOOLS + XML + TALK + BEGIN, "qwen3_coder", "", None),
    "Qwen3.5": (TOOLS + XML + TALK + ON_UNLESS, "qwen3_coder", "qwen3", True),
    "Nemotron 3": (
        "{% set truncate_history_thinking = truncate_history_thinking | default(true) %}"
        + TOOLS
        + XML
        + TALK
        + ON_UNLESS,
        "qwen3_coder",
        "nemotron_v3",
        True,
    ),
    "Granite 4.2": (
        TOOLS + XML + "<|start_of_role|>user<|end_of_role|>" + ON_UNLESS,
        "qwen3_coder",
        "granite_thinking_parser",
        True,
    ),
    "MiMo": ("You are MiMo" + TOOLS + XML + TALK + ON_UNLESS, "mimo", "mimo", True),
    "Step 3.7": ("<im_patch>" + TOOLS + XML + TALK + OPENS, "step3p5", "step3p5", True),
    "Nemotron Nano 2": (SWITCHED_BY_WORD, "", "deepseek_r1", True),
    "Llama Nemotron Super": (SUPER, "", "deepseek_r1", True),
    "GLM 4.5": (TOOLS + GLM_XML + TALK + ON_UNLESS, "glm45", "glm45", True),
    "Ling 3": ("<role>HUMAN</role>" + TOOLS + GLM_XML + ON_UNLESS, "ling3", "ling3", True),
    "Laguna": ("<assistant>" + TOOLS + GLM_XML + ON_UNLESS, "poolside_v1", "poolside_v1", True),
    "Hunyuan 3": ("<tool_calls><tool_call>n<tool_sep><arg_key><think>", "hy_v3", "hy_v3", None),
    "Hunyuan 4": ("<tool_calls:6><tool_call:6>n<arg_key:6><think:6>", "hy_v4", "hy_v4", None),
    "Hunyuan A13B": (
        '<tool_calls>[{"name": N}]</tool_calls><answer>',
        "hunyuan_a13b",
        "hunyuan_a13b",
        None,
    ),
    "Jamba": ('<|bom|><tool_calls>[{"name": N}]</tool_calls>', "jamba", "", None),
    "Kimi K2": ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2", "", None),
    "Kimi K2 Thinking": (
        "<|tool_calls_section_begin|>" + THOUGHT + TALK + BEGIN,
        "kimi_k2",
        "kimi_k2",
        True,
    ),
    "Kimi K3": (
        (
            "{% macro tag(x) %}{{ '<|open|>' + x + '<|sep|>' }}{% endmacro %}<|close|>"
            "{{ tag('think' if thinking | default(true) else 'response') }}"
        ),
        "kimi_k3",
        "kimi_k3",
        None,
    ),
    "gpt-oss": (TOOLS + HARMONY + "<|channel|>analysis", "openai", "openai_gptoss", None),
    "Muse": ("to=self<|message|><atem:function_calls>", "muse_glimmer", "muse_glimmer", None),
    "Inkling": ("<|content_invoke_tool_json|><|content_thinking|>", "inkling", "inkling", None),
    "K2 Horizon": ("<ifm|tool_calls><ifm|think>", "k2_horizon", "k2_horizon", None),
    "PLaMo 3": (
        "<|plamo:begin_tool_requests:plamo|><|plamo:begin_think:plamo|>",
        "plamo3",
        "plamo3",
        None,
    ),
    "MiniMax M2": ("<minimax:tool_call>" + TALK + OPENS, "minimax_m2", "minimax_m2", True),
    "MiniMax M3": ("{% set ns = ']<]minimax[>[' %}<mm:think>", "minimax_m3", "minimax_m3", None),
    "MiniCPM 5": ('<function name="N"><param name="K">V</param></function>', "minicpm5", "", None),
    "Seed-OSS": ("<seed:tool_call><seed:think>", "seed_oss", "seed_oss", None),
    "Gemma 4": ("<|tool_call>call:N{}<tool_call|><|channel>thought", "gemma4", "gemma4", None),
    "FunctionGemma": ("<start_function_call>call:N{}", "functiongemma", "", None),
    "Command A": (
        "<|START_ACTION|>[]<|END_ACTION|><|START_THINKING|>",
        "cohere_command3",
        "cohere_command3",
        None,
    ),
    "Command A+": (
        "<|START_ACTION|>[]<|END_ACTION|><|START_THINKING|><|START_TEXT|>",
        "cohere_command4",
        "cohere_command4",
        None,
    ),
    "Apertus": ("<|tools_prefix|>[]<|tools_suffix|>", "apertus", "", None),
    "dots": ("<dots_function_call>", "dots", "", None),
    "LongCat": ("<longcat_tool_call>", "longcat", "", None),
    "LFM2": ("List of tools: <|tool_list_start|>[]<|tool_list_end|>", "lfm2", "", None),
    "LFM2.5": ("<|tool_call_start|>[f(a=1)]<|tool_call_end|>", "lfm2", "", None),
    "InternLM 2.5": ("<|action_start|><|plugin|>{}<|action_end|>", "internlm", "", None),
    "GigaChat 3": ("function call<|role_sep|>\n{}<|message_sep|>", "gigachat3", "", None),
    "Step 3": ('<steptml:invoke name="N">' + OPENS, "step3", "step3", True),
    "DeepSeek V3": (
        "<｜tool▁calls▁begin｜>function<｜tool▁sep｜>N\n```json",
        "deepseek_v3",
        "",
        None,
    ),
    "DeepSeek R1": ("<｜tool▁calls▁begin｜>```json" + OPENS, "deepseek_v3", "deepseek_r1", True),
    "DeepSeek V3.1": (
        "<｜tool▁calls▁begin｜>" + TALK + OFF_UNLESS,
        "deepseek_v31",
        "deepseek_v3",
        False,
    ),
    "DeepSeek V3.2": (
        "{% set dsml = '｜DSML｜' %}<{{ dsml }}function_calls>" + OFF_UNLESS,
        "deepseek_v32",
        "deepseek_v3",
        False,
    ),
    "DeepSeek V4": ("<｜DSML｜tool_calls>" + OPENS, "deepseek_v4", "deepseek_v4", True),
    "DeepSeek V4.1": ("<｜DSML｜ calls>" + OPENS, "deepseek_v41", "deepseek_v41", True),
    "ERNIE 4.5": (HERMES + "<response>" + OPENS, "ernie45", "ernie45", True),
    "Olmo 3": ("<function_calls>" + OPENS, "olmo3", "olmo3", True),
    "Granite 3": (
        (
            "<|start_of_role|>system<|end_of_role|>respond with <|tool_call|>"
            "{% if thinking %}Here is my thought process:{% endif %}"
        ),
        "granite",
        "granite",
        None,
    ),
    "Granite 4": ("<|start_of_role|>system<|end_of_role|>" + HERMES, "granite4", "", None),
    "Granite 20B": ("<function_call> {}", "granite-20b-fc", "", None),
    "Mistral": ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral", "", None),
    "Magistral": ("[AVAILABLE_TOOLS][TOOL_CALLS][THINK]", "mistral", "mistral", None),
    "Phi-4-mini": ("<|system|>{{ m['tools'] }}<|tool|>[]<|/tool|>", "phi4_mini_json", "", None),
    "xLAM 2": ("developed by Salesforce xLAM team", "xlam", "", None),
    "Llama 3.1": ("<|start_header_id|>ipython<|python_tag|>", "llama3_json", "", None),
    "Llama 3.2": (
        "<|start_header_id|>{{ '{\"name\": \"' + 'n' + '\", ' }}{{ '\"parameters\": ' }}",
        "llama3_json",
        "",
        None,
    ),
    "Llama 4": (
        '<|header_start|><|python_start|>{"name": N, "parameters": {}}',
        "llama4_json",
        "",
        None,
    ),
    "Llama 4, calls in Python": ("<|header_start|>[func_name1(a=1)]", "llama4_pythonic", "", None),
    "ToolACE": ("<|start_header_id|>[func_name1(params_name1=1)]", "pythonic", "", None),
    "SmolLM2": (TALK + BEGIN, "", "", None),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_parsers_are_those_of_the_family(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_formats, "_PACKAGES", {})
    source, *expected = FAMILIES[name]
    found = parsers_of(ChatTemplate(source, {}))
    assert [found.tool_calls, found.reasoning, found.thinks] == expected


def test_every_format_is_shown_by_a_family() -> None:
    shown = {x for _, *names, _ in FAMILIES.values() for x in names}
    assert {x for each in answer_formats._FORMATS for x in each[1:3]} <= shown


# Other names of parsers that are known, and parsers for formats that look like another one.
SAME = {"glm47", "qwen3_json", "qwen3_xml", "holo2", "minicpmv", "minimax_m2_append_think"}


def test_a_parser_is_known_for_every_format_of_vllm() -> None:
    spec = find_spec("vllm")
    assert spec is not None
    (folder,) = spec.submodule_search_locations or ()
    registered: set[str] = set()
    for registry in ("tool_parsers", "reasoning"):  # to import them would take seconds
        text = Path(folder, registry, "__init__.py").read_text("utf-8")
        registered |= {*re.findall(r'^    "([\w-]+)": \(', text, re.MULTILINE)}
    known = {x for each in answer_formats._FORMATS for x in each[1:3] if x}
    assert known | {"hf", "qwen3", "deepseek_v3", "deepseek_r1"} == registered - SAME


@pytest.mark.parametrize(
    ("family", "content", "variables", "expected"),
    [
        # What the prompt ends with decides, whatever names the template has.
        ("Nemotron Nano 2", "hi", {}, True),
        ("Nemotron Nano 2", "hi /no_think", {}, False),
        ("Nemotron Nano 2", "hi", {"enable_thinking": False}, True),
        ("Llama Nemotron Super", "hi", {}, True),
        ("Llama Nemotron Super", "hi", {"enable_thinking": False}, True),
        ("Llama Nemotron Super", "hi /no_think", {"enable_thinking": True}, False),
        ("Qwen3", "hi", {}, True),
        ("Qwen3", "hi", {"enable_thinking": False}, False),
        ("Qwen3", "hi", {"thinking": False}, True),  # no variable of this template
        ("DeepSeek V3.1", "hi", {}, False),
        ("DeepSeek V3.1", "hi", {"thinking": True}, True),
        ("Gemma 4", "hi", {"enable_thinking": True}, None),
    ],
)
def test_the_prompt_shows_whether_the_answer_begins_with_reasoning(
    family: str, content: str, variables: dict[str, Any], expected: bool | None
) -> None:
    template = ChatTemplate(FAMILIES[family][0], {})
    prompt = template.render([{"role": "user", "content": content}], variables)
    assert parsers_of(template).is_thinking(prompt[-16:], variables) is expected


def test_a_parser_without_its_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_formats, "find_spec", lambda _: None)
    found = parsers_of(ChatTemplate(FAMILIES["Command A"][0], {}))
    assert found == ParserNames(missing="cohere_melody")
    assert "needs the package cohere_melody" in found.lack
    assert "set router.parsers.tool_calls" in ParserNames().lack


def test_a_template_that_wants_other_messages_still_has_its_parsers() -> None:
    source = "{{ raise_exception('no') if messages | length < 2 }}" + FAMILIES["Qwen3"][0]
    assert parsers_of(ChatTemplate(source, {})).tool_calls == "hermes"
