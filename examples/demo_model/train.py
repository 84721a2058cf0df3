"""Train the demo model from scratch: `python examples/demo_model/train.py --out DIR`.

Takes about 36 minutes on one CPU thread of a busy machine. The same torch build on the same kind of
CPU gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import re
import time
from itertools import islice
from pathlib import Path
from random import Random

import torch
from corpus import CHAT_TEMPLATE, END, PAD, SPECIAL_TOKENS, Corpus, Document, spans
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

_log = logging.getLogger("train")

VOCAB_SIZE = 1536
MAX_POSITIONS = 8192
SEED = 20260
TOKENIZER_DOCUMENTS = 6000
TOKENS_PER_BATCH = 4096
QUESTION_WEIGHT = 0.05  # loss weight of tokens that the model reads but never has to write
ROW_LENGTHS, ROW_SHARES = (256, 512, 2048), (0.65, 0.25, 0.10)
JUMP_SHARE = 0.5
LONG_ROW, LONG_SENTENCES = 2048, 60
STEPS, WARMUP_STEPS, REPORT_STEPS = 2000, 60, 50
PEAK_LR, WEIGHT_DECAY, MAX_GRAD_NORM = 4e-3, 0.1, 1.0


def train_tokenizer() -> Tokenizer:
    """Train a byte-level BPE tokenizer. Each digit is one token, so that the model can copy
    numbers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        # Rare characters remain byte tokens.
        min_frequency=8,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    markers = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
    texts = (
        part
        for document in islice(Corpus(SEED).documents(), TOKENIZER_DOCUMENTS)
        for text, _ in spans(document)
        for part in markers.split(text)
        if part
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"vocab_size: the corpus gives only {tokenizer.get_vocab_size()} tokens")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "bos_token": None,
        "unk_token": None,
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2) + "\n"
    (out / "tokenizer_config.json").write_text(text, "utf-8")


class PackedBatches:
    """Packs documents into rows of tokens, with positions spread over the context.

    Most rows are short, because these are cheap. To train positions far into the context, some rows
    are long, and in half of the short rows positions jump between documents (PoSE,
    arXiv:2309.10400).
    """

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._rng = Random(seed)
        self._short = Corpus(seed + 1).documents()
        self._long = Corpus(seed + 2).long_documents(LONG_SENTENCES)

    def draw(self) -> list[torch.Tensor]:
        """Return tensors of tokens, positions and weights, each with one row per sequence and about
        `TOKENS_PER_BATCH` elements."""
        length = self._rng.choices(ROW_LENGTHS, ROW_SHARES)[0]
        rows = [self._row(length) for _ in range(TOKENS_PER_BATCH // length)]
        return [torch.tensor(part) for part in zip(*rows, strict=True)]

    def _row(self, length: int) -> tuple[list[int], list[int], list[float]]:
        """Concatenate documents until the row is full. The last document is truncated."""
        documents = self._long if length >= LONG_ROW else self._short
        jumping = self._rng.random() < JUMP_SHARE
        room = MAX_POSITIONS - length
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
        for text, is_learned in spans(document):
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            tokens += ids
            weights += [1.0 if is_learned else QUESTION_WEIGHT] * len(ids)
        return tokens, weights


def learning_rate(step: int, steps: int) -> float:
    """Return the learning rate at a step: linear warm-up, then cosine decay to 0."""
    if step < WARMUP_STEPS:
        return PEAK_LR * (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / (steps - WARMUP_STEPS)
    return PEAK_LR * 0.5 * (1 + math.cos(math.pi * done))


def weighted_loss(model: LlamaForCausalLM, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the weighted mean cross entropy of the next tokens in `batch`."""
    tokens, positions, weights = batch
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(
            input_ids=tokens[:, :-1], position_ids=positions[:, :-1], use_cache=False
        ).logits
    losses = functional.cross_entropy(
        logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    weights = weights[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()


def optimizers_for(model: LlamaForCausalLM) -> tuple[torch.optim.Optimizer, ...]:
    """Return Muon for the weight matrices of the layers, and AdamW for the embedding and the norms.

    In so few steps, the model learns to copy from its prompt only with Muon.
    """
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.dim() == 2 and p is not embedding]
    others = [p for p in model.parameters() if p.dim() != 2 or p is embedding]
    muon = torch.optim.Muon(
        matrices, lr=PEAK_LR, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(others, lr=PEAK_LR, betas=(0.9, 0.97), weight_decay=0.0)
    return muon, adam


def train(model: LlamaForCausalLM, batches: PackedBatches, steps: int) -> None:
    optimizers = optimizers_for(model)
    started = time.monotonic()
    tokens, loss_sum = 0, 0.0
    model.train()
    for step in range(steps):
        batch = batches.draw()
        for group in (g for optimizer in optimizers for g in optimizer.param_groups):
            group["lr"] = learning_rate(step, steps)
        loss = weighted_loss(model, batch)
        model.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        for optimizer in optimizers:
            optimizer.step()
        tokens += batch[0].numel()
        loss_sum += loss.item()
        if (step + 1) % REPORT_STEPS == 0:
            values = (step + 1, steps, loss_sum / REPORT_STEPS, tokens, time.monotonic() - started)
            _log.info("step %d/%d  loss %.4f  %d tokens  %.0f s", *values)
            loss_sum = 0.0
    model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model of pdserve.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps")
    args = parser.parse_args()
    if args.steps <= WARMUP_STEPS:
        parser.error(f"--steps must be more than {WARMUP_STEPS}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)

    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer()
    save_tokenizer(tokenizer, args.out)
    eos, pad = tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)
    # Heads have 64 dimensions. Two KV heads allow a tensor-parallel size of 2.
    config = LlamaConfig(
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
        eos_token_id=eos,
        pad_token_id=pad,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config)
    _log.info("%d parameters", sum(p.numel() for p in model.parameters()))
    train(model, PackedBatches(tokenizer, SEED), args.steps)
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=pad, do_sample=False)
    model.to(torch.bfloat16).save_pretrained(args.out)
    _log.info("saved to %s", args.out)


if __name__ == "__main__":
    main()
