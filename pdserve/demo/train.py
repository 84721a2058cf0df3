"""Train the demo model from nothing: `python -m pdserve.demo.train --out DIR`.

One CPU thread and about a quarter of an hour. The same torch build on the
same kind of CPU gives the same bytes.
"""

import argparse
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from pdserve.demo.batches import Batch, Batches
from pdserve.demo.documents import END, PAD
from pdserve.demo.tokenizer import save_tokenizer, token_id, train_tokenizer

_log: Final = logging.getLogger("pdserve.demo.train")

VOCAB_SIZE: Final = 1536
MAX_POSITIONS: Final = 8192
SEED: Final = 20260


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
    """Train `model` in place."""
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
            elapsed_s = time.monotonic() - started
            _log.info(
                "step %d/%d  loss %.4f  %d tokens  %.0f s",
                step + 1,
                recipe.steps,
                mean_loss,
                tokens,
                elapsed_s,
            )
    model.eval()


def save(model: LlamaForCausalLM, out: Path, *, eos_token_id: int, pad_token_id: int) -> None:
    """Write the checkpoint in bfloat16, as Hugging Face lays it out."""
    model.generation_config = GenerationConfig(
        eos_token_id=eos_token_id, pad_token_id=pad_token_id, do_sample=False
    )
    model.to(torch.bfloat16).save_pretrained(out)


def main(argv: Sequence[str] | None = None) -> None:
    """Train the tokenizer and the model, and write both to `--out`."""
    recipe = Recipe()
    parser = argparse.ArgumentParser(description="Train the demo model of pdserve.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=recipe.steps, help="optimizer steps")
    args = parser.parse_args(argv)
    if args.steps <= recipe.warmup_steps:
        parser.error(f"--steps must be more than {recipe.warmup_steps}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)

    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(SEED, VOCAB_SIZE)
    save_tokenizer(tokenizer, args.out, MAX_POSITIONS)
    eos, pad = token_id(tokenizer, END), token_id(tokenizer, PAD)
    model = LlamaForCausalLM(model_config(eos, pad))
    _log.info("%d parameters", sum(p.numel() for p in model.parameters()))
    train(model, Batches(tokenizer, SEED, MAX_POSITIONS), replace(recipe, steps=args.steps))
    save(model, args.out, eos_token_id=eos, pad_token_id=pad)
    _log.info("saved to %s", args.out)


if __name__ == "__main__":
    main()
