"""Train the demo model from scratch: `python examples/demo_model/train.py --out DIR`.

Takes about 15 minutes on one CPU thread. The same torch build on the same kind of CPU gives the
same bytes.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random

import torch
from corpus import CHAT_TEMPLATE, END, PAD, ROLE_TOKENS, SPECIAL_TOKENS, Corpus, Document
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

_log = logging.getLogger("train")

VOCAB_SIZE = 1536
MAX_POSITIONS = 8192
SEED = 20260
TOKENIZER_DOCUMENTS = 6000
TOKENS_PER_BATCH = 4096
QUESTION_WEIGHT = 0.05  # of a token that the model reads but never has to write
ROW_LENGTHS, ROW_SHARES = (256, 512, 2048), (0.65, 0.25, 0.10)
JUMP_SHARE = 0.5
LONG_ROW, LONG_SENTENCES = 2048, 60


def train_tokenizer(seed: int, vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer. Digits stay single, so that numbers can be copied."""
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
        # A rare character stays in bytes.
        min_frequency=8,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    markers = (END, *ROLE_TOKENS.values())
    texts = (
        text.removesuffix(END)
        for document in islice(Corpus(seed).documents(), TOKENIZER_DOCUMENTS)
        for text, _ in document.spans()
        if text not in markers
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"vocab_size: the corpus gives only {tokenizer.get_vocab_size()} tokens")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, out: Path, max_length: int) -> None:
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


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one length. All three tensors have the shape (rows, length)."""

    tokens: torch.Tensor
    positions: torch.Tensor
    weights: torch.Tensor


class Batches:
    """Packs documents into rows of tokens, with positions spread over the context.

    Most rows are short, which is cheap. So that the model still works far into its context, some
    rows are long, and in half of the short ones the positions jump between documents (PoSE,
    arXiv:2309.10400).
    """

    def __init__(self, tokenizer: Tokenizer, seed: int, max_positions: int) -> None:
        self._tokenizer = tokenizer
        self._rng = Random(seed)
        self._max_positions = max_positions
        self._short = Corpus(seed + 1).documents()
        self._long = Corpus(seed + 2).long_documents(LONG_SENTENCES)

    def draw(self) -> Batch:
        """Return the next batch, of about `TOKENS_PER_BATCH` tokens."""
        length = self._rng.choices(ROW_LENGTHS, ROW_SHARES)[0]
        rows = [self._row(length) for _ in range(TOKENS_PER_BATCH // length)]
        return Batch(*(torch.tensor([row[part] for row in rows]) for part in range(3)))

    def _row(self, length: int) -> tuple[list[int], list[int], list[float]]:
        """Concatenate documents until the row is full. The last one is cut."""
        documents = self._long if length >= LONG_ROW else self._short
        jumping = self._rng.random() < JUMP_SHARE
        room = self._max_positions - length
        tokens: list[int] = []
        positions: list[int] = []
        weights: list[float] = []
        while len(tokens) < length:
            ids, learned = self._encode(next(documents))
            jump = 0
            if jumping and tokens and self._rng.random() < 0.5:
                jump = self._rng.randint(0, room)
                room -= jump
            start = positions[-1] + 1 + jump if positions else 0
            tokens += ids
            weights += learned
            positions += range(start, start + len(ids))
        return tokens[:length], positions[:length], weights[:length]

    def _encode(self, document: Document) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        weights: list[float] = []
        for text, is_learned in document.spans():
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            tokens += ids
            weights += [1.0 if is_learned else QUESTION_WEIGHT] * len(ids)
        return tokens, weights


@dataclass(frozen=True, slots=True)
class Recipe:
    """How long and how fast to train."""

    steps: int = 1300
    warmup_steps: int = 60
    peak_lr: float = 4e-3
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    report_every_steps: int = 50


def model_config(eos_token_id: int, pad_token_id: int) -> LlamaConfig:
    """The shape of the model: 64-wide heads, and two KV heads so that it splits in two."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        dtype="bfloat16",
    )


def learning_rate(step: int, recipe: Recipe) -> float:
    """Linear warm-up, then a cosine down to zero."""
    if step < recipe.warmup_steps:
        return recipe.peak_lr * (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / (recipe.steps - recipe.warmup_steps)
    return recipe.peak_lr * 0.5 * (1 + math.cos(math.pi * done))


def weighted_loss(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Mean cross entropy of the next token over `batch`, each target by its weight."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(
            input_ids=batch.tokens[:, :-1], position_ids=batch.positions[:, :-1], use_cache=False
        ).logits
    losses = functional.cross_entropy(
        logits.float().flatten(0, 1), batch.tokens[:, 1:].flatten(), reduction="none"
    )
    weights = batch.weights[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()


def optimizers_for(model: LlamaForCausalLM, recipe: Recipe) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the matrices between the layers, AdamW for the embedding and the norms.

    With so few steps Muon is what makes the model learn to copy from its prompt.
    """
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.dim() == 2 and p is not embedding]
    others = [p for p in model.parameters() if p.dim() != 2 or p is embedding]
    muon = torch.optim.Muon(
        matrices,
        lr=recipe.peak_lr,
        weight_decay=recipe.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    adam = torch.optim.AdamW(others, lr=recipe.peak_lr, betas=(0.9, 0.97), weight_decay=0.0)
    return muon, adam


def train(model: LlamaForCausalLM, batches: Batches, recipe: Recipe) -> None:
    optimizers = optimizers_for(model, recipe)
    started = time.monotonic()
    tokens, loss_sum = 0, 0.0
    model.train()
    for step in range(recipe.steps):
        batch = batches.draw()
        for group in (g for optimizer in optimizers for g in optimizer.param_groups):
            group["lr"] = learning_rate(step, recipe)
        loss = weighted_loss(model, batch)
        model.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
        tokens += batch.tokens.numel()
        loss_sum += loss.item()
        if (step + 1) % recipe.report_every_steps == 0:
            mean_loss, loss_sum = loss_sum / recipe.report_every_steps, 0.0
            seconds = time.monotonic() - started
            values = (step + 1, recipe.steps, mean_loss, tokens, seconds)
            _log.info("step %d/%d  loss %.4f  %d tokens  %.0f s", *values)
    model.eval()


def main() -> None:
    recipe = Recipe()
    parser = argparse.ArgumentParser(description="Train the demo model of pdserve.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=recipe.steps, help="optimizer steps")
    args = parser.parse_args()
    if args.steps <= recipe.warmup_steps:
        parser.error(f"--steps must be more than {recipe.warmup_steps}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)

    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(SEED, VOCAB_SIZE)
    save_tokenizer(tokenizer, args.out, MAX_POSITIONS)
    eos, pad = tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)
    model = LlamaForCausalLM(model_config(eos, pad))
    _log.info("%d parameters", sum(p.numel() for p in model.parameters()))
    train(model, Batches(tokenizer, SEED, MAX_POSITIONS), replace(recipe, steps=args.steps))
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=pad, do_sample=False)
    model.to(torch.bfloat16).save_pretrained(args.out)
    _log.info("saved to %s", args.out)


if __name__ == "__main__":
    main()
