"""Selects vLLM's parsers for the answers of a model, by marks in its chat template."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from pdserve.errors import InvalidRequest
from pdserve.model.chat_template import ParserNames, begins_reasoning

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.model.chat_template import ChatTemplate


class _Format(NamedTuple):
    """The parsers for templates that contain all `marks`. `reasoning` is "" if the format does not
    determine it; it applies only if the template contains `thought`."""

    marks: tuple[str, ...]
    tool_calls: str
    reasoning: str = ""
    thought: str = "<think>"


# The first match applies, so a format whose marks include another's precedes it.
_FORMATS = (
    _Format(("<|open|>", "<|close|>", "<|sep|>"), "kimi_k3", "kimi_k3", "think"),
    _Format(("<|tool_calls_section_begin|>",), "kimi_k2", "kimi_k2"),
    _Format(("<atem:function_calls>",), "muse_glimmer", "muse_glimmer", "to=self"),
    _Format(("<|content_invoke_tool_json|>",), "inkling", "inkling", "<|content_thinking|>"),
    _Format(("<ifm|tool_calls>",), "k2_horizon", "k2_horizon", "<ifm|think"),
    _Format(("plamo:begin_tool_request",), "plamo3", "plamo3", "plamo:begin_think"),
    _Format(("<|channel|>", "<|message|>"), "openai", "openai_gptoss", "<|channel|>"),
    _Format(("]<]minimax[>[",), "minimax_m3", "minimax_m3", "<mm:think>"),
    _Format(("<minimax:tool_call>",), "minimax_m2", "minimax_m2"),
    _Format(("<seed:tool_call>",), "seed_oss", "seed_oss", "<seed:think>"),
    _Format(("<|tool_call>", "<tool_call|>"), "gemma4", "gemma4", "<|channel>"),
    _Format(("<start_function_call>",), "functiongemma"),
    _Format(
        marks=("<|START_ACTION|>", "<|START_TEXT|>"),
        tool_calls="cohere_command4",
        reasoning="cohere_command4",
        thought="<|START_THINKING|>",
    ),
    _Format(("<|START_ACTION|>",), "cohere_command3", "cohere_command3", "<|START_THINKING|>"),
    _Format(("<|tools_prefix|>",), "apertus"),
    _Format(("<dots_function_call>",), "dots"),
    _Format(("<longcat_tool_call>",), "longcat"),
    _Format(("<|tool_call_start|>",), "lfm2"),
    _Format(("<|tool_list_start|>",), "lfm2"),
    _Format(("<|action_start|>", "<|plugin|>"), "internlm"),
    _Format(("<|role_sep|>",), "gigachat3"),
    _Format(("<steptml:invoke",), "step3", "step3"),
    _Format(("｜DSML｜ ",), "deepseek_v41", "deepseek_v41"),
    _Format(("｜DSML｜", "function_calls>"), "deepseek_v32"),
    _Format(("｜DSML｜",), "deepseek_v4", "deepseek_v4"),
    _Format(("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    _Format(("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    _Format(("<tool_calls", "<tool_sep"), "hy_v3", "hy_v3", "<think"),
    _Format(("<tool_calls", "<arg_key"), "hy_v4", "hy_v4", "<think"),
    _Format(("<tool_calls>", "<|bom|>"), "jamba"),
    _Format(("<tool_calls>", "<answer>"), "hunyuan_a13b", "hunyuan_a13b", "<answer>"),
    _Format(("<assistant>", "<arg_key>"), "poolside_v1", "poolside_v1"),
    _Format(("<role>", "<arg_key>"), "ling3", "ling3"),
    _Format(("<tool_call>", "<arg_key>"), "glm45", "glm45"),
    _Format(("<function=", "MiMo"), "mimo", "mimo"),
    _Format(("<function=", "<|start_of_role|>"), "qwen3_coder", "granite_thinking_parser"),
    _Format(("<function=", "truncate_history_thinking"), "qwen3_coder", "nemotron_v3"),
    _Format(("<function=", "<im_patch>"), "step3p5", "step3p5"),
    _Format(("<tool_call>", "<function="), "qwen3_coder", "qwen3"),
    _Format(("<function name=", "<param name="), "minicpm5"),
    _Format(("<tool_call>", "<|start_of_role|>"), "granite4"),
    _Format(
        marks=("<|tool_call|>", "<|start_of_role|>"),
        tool_calls="granite",
        reasoning="granite",
        thought="Here is my thought process",
    ),
    _Format(("<function_call>",), "granite-20b-fc"),
    _Format(("<function_calls>",), "olmo3", "olmo3"),
    _Format(("<tool_call>", "<response>"), "ernie45", "ernie45"),
    _Format(("<tool_call>",), "hermes"),
    _Format(("[TOOL_CALLS]",), "mistral", "mistral", "[THINK]"),
    _Format(("<|tool|>",), "phi4_mini_json"),
    _Format(("xLAM",), "xlam"),
    _Format(("<|header_start|>", "func_name1("), "llama4_pythonic"),
    _Format(("<|header_start|>",), "llama4_json"),
    _Format(("func_name1(",), "pythonic"),
    _Format(("<|python_tag|>",), "llama3_json"),
    _Format(("<|start_header_id|>", '"parameters": '), "llama3_json"),
    _Format((), ""),
)
# Packages that vLLM does not install, by parser.
_PACKAGES = {"cohere_command3": "cohere_melody", "cohere_command4": "cohere_melody"}
_SWITCHES = ("enable_thinking", "thinking")  # variables that turn reasoning on or off
# A prompt without tools that is rendered to see whether the model reasons by default.
_ASKED = ({"role": "user", "content": "?"},)


def parsers_of(template: ChatTemplate) -> ParserNames:
    """Return the parsers that fit a template."""
    source = template.source
    fits = next(x for x in _FORMATS if all(mark in source for mark in x.marks))
    package = _PACKAGES.get(fits.tool_calls)
    if package and find_spec(package) is None:
        return ParserNames(missing=package)
    if fits.thought not in source:
        return ParserNames(fits.tool_calls)
    if fits.thought != "<think>":
        return ParserNames(fits.tool_calls, fits.reasoning)
    switches = [x for x in _SWITCHES if x in template.variables]
    default = _prompt(template)
    if switches:
        thinks = default != _prompt(template, {switches[0]: False})
        reasoning = fits.reasoning or ("qwen3" if thinks else "deepseek_v3")
    else:
        begun = begins_reasoning(default)
        # Without a sign in the prompt, a model reasons only if its format defines that, or if a
        # word in a message disables it. Other templates may contain the marks only to render
        # histories.
        tells = fits.reasoning not in ("", "qwen3") or "/no_think" in source
        thinks = tells if begun is None else begun
        reasoning = fits.reasoning or "deepseek_r1"
    return ParserNames(fits.tool_calls, reasoning, thinks, switches)


def _prompt(template: ChatTemplate, variables: Mapping[str, Any] | None = None) -> str:
    try:
        return template.render(_ASKED, variables or {})
    except InvalidRequest:  # it wants other messages
        return ""
