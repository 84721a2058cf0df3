"""The demo model's tokenizer: byte-level pairs, so that every text can be read and written."""

import json
from itertools import islice
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pdserve.demo.corpus import Corpus
from pdserve.demo.documents import CHAT_TEMPLATE, END, PAD, ROLE_TOKENS, SPECIAL_TOKENS

_TRAINING_DOCUMENTS: Final = 6000


def train_tokenizer(seed: int, vocab_size: int) -> Tokenizer:
    """Learn the pairs from the corpus. Digits stay single, so that numbers can be copied."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        # A rare character stays in bytes: only frequent text deserves a token.
        min_frequency=8,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    markers = (END, *ROLE_TOKENS.values())
    texts = (
        span.text.removesuffix(END)
        for document in islice(Corpus(seed).documents(), _TRAINING_DOCUMENTS)
        for span in document.spans()
        if span.text not in markers
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"vocab_size: the corpus gives only {tokenizer.get_vocab_size()} tokens")
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that has to exist."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"token: the tokenizer has no {token!r}")
    return found


def save_tokenizer(tokenizer: Tokenizer, out: Path, max_length: int) -> None:
    """Write `tokenizer.json` and a `tokenizer_config.json` with the chat template."""
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "bos_token": None,
        "unk_token": None,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2) + "\n"
    (out / "tokenizer_config.json").write_text(text, "utf-8")
