"""The router, without vLLM, makes the tokens that vLLM makes, whatever files a model has."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mistral_common
import pytest

from pdserve.errors import InvalidRequest
from pdserve.model.tokenizer import ChatMessage, Conversation, Tokenizer, read_files

DATA = Path(mistral_common.__file__).parent / "data"
TEMPLATE = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "chat_template": TEMPLATE}
TEXTS = ("hi", " two  spaces", "café 漢字 🙂\n", "")
SYSTEM = ("system", "developer")
# The file of the library's data, its name in a model, and the configuration beside it.
KINDS = {
    "sentencepiece": ("tokenizer.model.v1", "tokenizer.model", LLAMA),
    "tekken": ("tekken_240911.json", "tekken.json", None),
    "mistral's sentencepiece": (
        "mistral_instruct_tokenizer_240323.model.v3",
        "tokenizer.model.v3",
        None,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_router_and_vllm_make_the_same_tokens(kind: str, tmp_path: Path) -> None:
    from vllm.tokenizers import get_tokenizer

    from workers.vllm.start.tokenizer_files import path_for_router

    source, name, config = KINDS[kind]
    model, made = tmp_path / "model", tmp_path / "made"
    model.mkdir()
    shutil.copy(DATA / source, model / name)
    if config is None:
        (model / "consolidated.safetensors").touch()  # by this vLLM knows Mistral's format
    else:
        (model / "tokenizer_config.json").write_text(json.dumps(config))
        (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    theirs = get_tokenizer(str(model))
    files = read_files(path_for_router(theirs, model, made))
    # Workers of one model must send the same, each from a directory of its own.
    assert files == read_files(path_for_router(get_tokenizer(str(model)), model, tmp_path / "new"))
    ours = Tokenizer.load(files)
    for text in TEXTS:
        for special in (True, False):
            found = ours.encode(text, add_special_tokens=special)
            assert list(found) == theirs.encode(text, add_special_tokens=special)
    chat = [{"role": "user", "content": "What is prefill?"}]
    wanted = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    asked = [ChatMessage(**x) for x in chat]
    assert list(ours.encode_chat(Conversation(asked))) == wanted
    if config is None:
        with_role = {
            x: ours.encode_chat(Conversation([ChatMessage(x, "a"), *asked])) for x in SYSTEM
        }
        assert with_role["developer"] == with_role["system"]
        with pytest.raises(InvalidRequest, match="Mistral's tokenizer refuses") as caught:
            ours.encode_chat(
                Conversation([ChatMessage("user", "a"), ChatMessage("assistant", "b")])
            )
        assert caught.value.field == "messages"


def test_a_model_with_tokenizer_json_is_read_where_it_is(tmp_path: Path) -> None:
    from workers.vllm.start.tokenizer_files import path_for_router

    (tmp_path / "tokenizer.json").touch()
    assert path_for_router(object(), tmp_path, tmp_path / "made") == tmp_path
