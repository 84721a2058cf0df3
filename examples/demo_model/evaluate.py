"""Count the held-out turns that a demo model answers exactly: `evaluate.py --model DIR`.

Decoding is greedy. An answer counts only if every character is correct.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from corpus import END, PAD, ROLE_TOKENS, Corpus, spans
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from corpus import Document

SEED = 999_983  # differs from the seeds of training, so that the turns are held out
TURNS = 84
MAX_NEW_TOKENS = 160


def turns(documents: Iterator[Document]) -> Iterator[tuple[Document, str]]:
    """Yield (messages before it, text) of each assistant turn."""
    for document in documents:
        for i, (role, text) in enumerate(document):
            if role == "assistant":
                yield document[:i], text


class Judge:
    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._end = self._tokenizer.token_to_id(END)
        self._pad = self._tokenizer.token_to_id(PAD)

    def answer(self, before: Document) -> str:
        texts = [text for text, _ in spans(before)] + [ROLE_TOKENS["assistant"]]
        ids = [i for text in texts for i in self._tokenizer.encode(text).ids]
        prompt = torch.tensor([ids])
        found = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
            eos_token_id=self._end,
            pad_token_id=self._pad,
        )[0, len(ids) :].tolist()
        said = [i for i in found if i != self._end]
        return self._tokenizer.decode(said, skip_special_tokens=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Count what a demo model answers exactly.")
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--show", action="store_true", help="print the wrong answers")
    args = parser.parse_args()
    torch.set_num_threads(1)
    judge = Judge(args.model)
    for name, documents in Corpus(SEED).kinds().items():
        exact = 0
        for _, (before, expected) in zip(range(TURNS), turns(documents), strict=False):
            said = judge.answer(before)
            exact += said == expected
            if args.show and said != expected:
                sys.stdout.write(f"  expected {expected!r}\n  got      {said!r}\n")
        sys.stdout.write(f"{name}: {exact} of {TURNS}\n")


if __name__ == "__main__":
    main()
