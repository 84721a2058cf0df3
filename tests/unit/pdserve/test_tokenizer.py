"""Tokenizers and chat templates read from a model directory."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from pdserve.demo import MODEL_DIR
from pdserve.errors import ConfigError, InvalidRequest
from pdserve.model.tokenizer import (
    MAX_FILES_BYTES,
    ChatMessage,
    Conversation,
    Tokenizer,
    digest_of,
    read_files,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

BOS, EOS = "<s>", "</s>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
HI = (ChatMessage("user", "hi"),)


def fast_tokenizer() -> FastTokenizer:
    """Return a byte-level tokenizer, which has tokens for every text and puts BOS before it."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(["the cat sat on the mat"] * 9, trainer)
    fast.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, 0)]
    )
    return fast


def text_of(tokenizer: Tokenizer, token_ids: tuple[int, ...]) -> str:
    return tokenizer._fast.decode(list(token_ids), skip_special_tokens=False)


def write(directory: Path, config: Mapping[str, Any], fast: FastTokenizer | None = None) -> Path:
    (fast or fast_tokenizer()).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return directory


CONFIG = {"bos_token": BOS, "eos_token": {"content": EOS}, "chat_template": TEMPLATE}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(read_files(write(tmp_path_factory.mktemp("model"), CONFIG)))


@given(text=st.text())
def test_every_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text)
    assert token_ids[0] == 0
    assert text_of(tokenizer, token_ids[1:]) == text


def test_special_tokens_of_a_template_are_not_added_twice(tokenizer: Tokenizer) -> None:
    rendered = tokenizer.render_chat(Conversation(HI))
    assert rendered == "<s>[user]hi</s>[assistant]"
    token_ids = tokenizer.encode_chat(Conversation(HI))
    assert token_ids.count(0) == 1
    assert text_of(tokenizer, token_ids) == rendered


def test_saved_truncation_and_padding_do_not_touch_prompts(tmp_path: Path) -> None:
    fast = fast_tokenizer()
    fast.enable_truncation(4)
    fast.enable_padding(length=64)
    tokenizer = Tokenizer.load(read_files(write(tmp_path, CONFIG, fast)))
    assert text_of(tokenizer, tokenizer.encode("a long enough text")) == f"{BOS}a long enough text"
    assert tokenizer.encode("a") == (0, *tokenizer.encode("a", add_special_tokens=False))


@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_are_cut_as_the_library_cuts_them(side: Literal["left", "right"]) -> None:
    fast = fast_tokenizer()
    fast.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}",
        pair=f"{BOS} $A {EOS} $B:1 {EOS}:1",
        special_tokens=[(BOS, 0), (EOS, 1)],
    )
    cut = FastTokenizer.from_str(fast.to_str())
    tokenizer = Tokenizer(fast, None)
    tokenizer.files = {"tokenizer_config.json": json.dumps({"truncation_side": side}).encode()}
    short, long = "the cat", "the cat sat on a mat, and on another"
    for texts in ([long], [short, long], [long, short], [long, long]):
        whole = len(cut.encode(*texts))
        for most in range(len(texts) + 2, whole + 2):
            cut.enable_truncation(most, direction=side)
            expected = cut.encode(*texts)
            found, second_at = tokenizer.encode_within(texts, most)
            assert list(found) == expected.ids
            assert second_at == (expected.type_ids.index(1) if len(texts) > 1 else len(found))
        cut.no_truncation()


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode("a\ud800")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages[0].content | tojson }}", '"<é & \'>"'),
        ("{{ messages[0] | tojson(indent=1) }}", '{\n "role": "user",\n "content": "<é & \'>"\n}'),
        ("{{ strftime_now('%%') }}", "%"),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("{% for m in messages %}{% continue %}x{% endfor %}", ""),
        # Lines that hold only a block leave nothing behind.
        ("  {% if true %}\na\n  {% endif %}\nb", "a\nb"),
        ("{{ tools is none }}{{ documents is none }}", "TrueTrue"),
        ("{{ missing }}", ""),
    ],
)
def test_helpers_that_published_templates_count_on(
    tmp_path: Path, template: str, expected: str
) -> None:
    tokenizer = Tokenizer.load(read_files(write(tmp_path, {"chat_template": template})))
    assert tokenizer.render_chat(Conversation([ChatMessage("user", "<é & '>")])) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content.x.y }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ 1 / 0 }}",
        "{{ messages | sum }}",
    ],
)
def test_template_that_refuses_or_reaches_out_is_a_client_error(
    tmp_path: Path, template: str
) -> None:
    tokenizer = Tokenizer.load(read_files(write(tmp_path, {"chat_template": template})))
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.render_chat(Conversation(HI))
    assert caught.value.field == "messages"


def test_reason_of_a_template_reaches_the_client(tmp_path: Path) -> None:
    config = {"chat_template": "{{ raise_exception('roles must alternate') }}"}
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        Tokenizer.load(read_files(write(tmp_path, config))).render_chat(Conversation(HI))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages[0].role }}", "system"),
        ("{% if messages[0].role == 'developer' %}{{ messages[0].role }}{% endif %}", "developer"),
    ],
)
def test_developer_is_system_to_templates_that_do_not_know_it(
    tmp_path: Path, template: str, expected: str
) -> None:
    tokenizer = Tokenizer.load(read_files(write(tmp_path, {"chat_template": template})))
    assert tokenizer.render_chat(Conversation([ChatMessage("developer", "be brief")])) == expected


@pytest.mark.parametrize(
    ("in_config", "in_file", "expected"),
    [
        ("config", None, "config"),
        ("config", "file", "file"),
        (None, "file", "file"),
        ([{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}], None, "d"),
    ],
)
def test_where_the_template_is_taken_from(
    tmp_path: Path, in_config: object, in_file: str | None, expected: str
) -> None:
    if in_file is not None:
        (tmp_path / "chat_template.jinja").write_text(in_file, "utf-8")
    tokenizer = Tokenizer.load(read_files(write(tmp_path, {"chat_template": in_config})))
    assert tokenizer.render_chat(Conversation(HI)) == expected


@pytest.mark.parametrize("where", ["configuration", "file"])
def test_a_template_for_tools_renders_conversations_with_tools(tmp_path: Path, where: str) -> None:
    plain, tool_use = "plain", "with {{ tools[0].function.name }}"
    named = [{"name": "default", "template": plain}, {"name": "tool_use", "template": tool_use}]
    if where == "file":
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(tool_use, "utf-8")
    path = write(tmp_path, {"chat_template": named if where == "configuration" else plain})
    tokenizer = Tokenizer.load(read_files(path))
    tool = {"type": "function", "function": {"name": "f"}}
    assert tokenizer.render_chat(Conversation(HI)) == "plain"
    assert tokenizer.render_chat(Conversation(HI, tools=[tool])) == "with f"
    assert tokenizer.shows_tools


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("{{ '>' + arguments + '<' }}", '>{"city": "Århus"}<'),  # as DeepSeek's do
        ("{{ arguments + '<' }}", '{"city": "Århus"}<'),
        ("{{ '>' ~ arguments }}", '>{"city": "Århus"}'),
        ("{{ arguments }}", '{"city": "Århus"}'),
        ("{{ arguments | tojson }}", '{"city": "Århus"}'),
        ("{% for x, y in arguments.items() %}{{ x }}={{ y }}{% endfor %}", "city=Århus"),
        ("{{ arguments is string }} {{ arguments is mapping }}", "False True"),
    ],
)
def test_templates_may_take_arguments_as_text_or_object(
    tmp_path: Path, shown: str, expected: str
) -> None:
    source = "{% set arguments = messages[0].tool_calls[0].function.arguments %}" + shown
    tokenizer = Tokenizer.load(read_files(write(tmp_path, {"chat_template": source})))
    call = {"id": "c", "function": {"name": "f", "arguments": {"city": "Århus"}}}
    message = ChatMessage("assistant", "", tool_calls=[call])
    assert tokenizer.render_chat(Conversation([message])) == expected


def test_the_configuration_has_special_tokens_as_text_and_the_template(tmp_path: Path) -> None:
    write(tmp_path, {**CONFIG, "eos_token": {"content": EOS}})
    (tmp_path / "chat_template.jinja").write_text("in file", "utf-8")
    info = Tokenizer.load(read_files(tmp_path)).info
    assert info == {**CONFIG, "eos_token": EOS, "chat_template": "in file"}


@pytest.mark.parametrize("config", [{}, {"chat_template": [{"name": "rag", "template": "r"}]}])
def test_without_a_template_a_chat_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    tokenizer = Tokenizer.load(read_files(write(tmp_path, config)))
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        tokenizer.encode_chat(Conversation(HI))
    assert caught.value.field == "messages"


def test_a_digest_covers_the_tokenizer_files_and_their_size_is_bounded(tmp_path: Path) -> None:
    assert digest_of(read_files(tmp_path)) == ""
    files = read_files(write(tmp_path, CONFIG))
    (tmp_path / "model.safetensors").touch()
    assert read_files(tmp_path) == files
    changed = [{**files, name: b""} for name in files] + [dict([item]) for item in files.items()]
    assert len({digest_of(x) for x in [files, *changed]}) == 1 + len(changed)
    os.truncate(tmp_path / "tokenizer.json", MAX_FILES_BYTES)
    with pytest.raises(ConfigError, match=rf"has \d+ bytes; at most {MAX_FILES_BYTES} are sent"):
        read_files(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "{}", "is not a tokenizer"),
        ("tokenizer_config.json", "{", "cannot read"),
        ("tokenizer_config.json", "[]", "does not hold a JSON object"),
        ("tokenizer_config.json", '{"chat_template": 7}', "chat_template is not text"),
        ("chat_template.jinja", "{% if %}", "template is broken"),
    ],
)
def test_broken_files_are_named(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    write(tmp_path, CONFIG)
    path = tmp_path / name
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_text(content, "utf-8")
    with pytest.raises(ConfigError, match=message):
        Tokenizer.load(read_files(tmp_path))


@pytest.mark.parametrize(
    ("template", "content", "expected"),
    [
        ("{% for m in messages %}[{{ m.content }}]{% endfor %}", "so ", "[a][so "),
        ("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}", "so ", "[a][so"),
    ],
)
def test_a_continued_message_ends_where_its_text_does(
    tmp_path: Path, template: str, content: str, expected: str
) -> None:
    tokenizer = Tokenizer.load(read_files(write(tmp_path, {"chat_template": template})))
    messages = [ChatMessage("user", "a"), ChatMessage("assistant", content)]
    chat = Conversation(messages, add_generation_prompt=False, continue_final_message=True)
    assert tokenizer.render_chat(chat) == expected


def test_a_template_that_hides_the_last_message_cannot_continue_it(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(read_files(write(tmp_path, {"chat_template": "nothing"})))
    with pytest.raises(InvalidRequest, match="does not show the last message"):
        tokenizer.render_chat(Conversation(HI, continue_final_message=True))


@pytest.mark.parametrize("field", ["message['content']", "message.content"])
def test_calls_are_shown_by_templates_that_ask_for_content_none(tmp_path: Path, field: str) -> None:
    source = (
        "{% for message in messages %}{% if " + field + " is none %}"
        "{{ message.tool_calls[0].function.name }}{% else %}({{ message.content }}){% endif %}"
        "{% endfor %}"
    )
    tokenizer = Tokenizer.load(read_files(write(tmp_path, {"chat_template": source})))
    call = {"id": "c", "function": {"name": "f", "arguments": {}}}
    chat = [ChatMessage("assistant", "", tool_calls=[call]), ChatMessage("tool", "")]
    assert tokenizer.render_chat(Conversation(chat)) == "f()"


@pytest.mark.parametrize("parameters", [{}, {"parameters": {"type": "object"}}])
@pytest.mark.parametrize("is_demo", [True, False])
def test_tools_need_no_properties(
    tmp_path: Path, is_demo: bool, parameters: dict[str, Any]
) -> None:
    source = "{% for x in tools %}{{ x.function.parameters.properties.items() | list }}{% endfor %}"
    directory = MODEL_DIR if is_demo else write(tmp_path, {"chat_template": source})
    tokenizer = Tokenizer.load(read_files(directory))
    tools = [{"type": "function", "function": {"name": "f", **parameters}}]
    text = tokenizer.render_chat(Conversation([ChatMessage("user", "hi")], tools=tools))
    assert ('"parameters": {}' if is_demo else "[]") in text
