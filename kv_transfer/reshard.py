"""Which part of whose KV goes where, when prefill and decode pools differ in tensor-parallel size,
pipeline stages or block size. Pure: both ends compute the same plan from the two pools' layouts.

A pool's ranks hold rectangles of layers × KV heads. A decode rank's rectangle is covered, once, by
pieces of prefill ranks' rectangles. Where several prefill ranks hold the same heads (fewer KV heads
than ranks, or MLA's one latent on every rank), one is chosen for each transfer and decode rank, so
that replicas share the work. Pieces count tokens, not blocks: the two block sizes need no relation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_transfer.errors import KvTransferError, UnsupportedLayout

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Span:
    """[start, end), never empty."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise KvTransferError(f"[{self.start}, {self.end}) is no span")

    def __len__(self) -> int:
        return self.end - self.start

    def meet(self, other: Span) -> Span | None:
        """What both have, or None."""
        start, end = max(self.start, other.start), min(self.end, other.end)
        return Span(start, end) if start < end else None

    def within(self, other: Span) -> slice:
        """This span as a slice of a holder that begins at `other`. Raises KvTransferError where it
        is not inside."""
        if not (other.start <= self.start and self.end <= other.end):
            raise KvTransferError(f"{self} is not inside {other}")
        return slice(self.start - other.start, self.end - other.start)


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """How the workers of one pool share a model's KV. Checked at birth: UnsupportedLayout names the
    field."""

    tp: int
    # Layers of each pipeline stage, in order.
    stage_layers: tuple[int, ...]
    # Of the model; with MLA there is one latent, which every rank holds.
    num_kv_heads: int
    # K and V of one head and token in one layer; with MLA the latent of one token.
    head_bytes: int
    # Tokens of a block.
    block_size: int
    dtype: str = "bfloat16"
    is_latent: bool = False

    def __post_init__(self) -> None:
        for name in ("tp", "num_kv_heads", "head_bytes", "block_size"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UnsupportedLayout(f"{name} is {value!r}, not a whole number above 0")
        if not self.stage_layers or any(type(n) is not int or n < 1 for n in self.stage_layers):
            raise UnsupportedLayout(f"stage_layers {self.stage_layers} has a stage without layers")
        if self.is_latent and self.num_kv_heads != 1:
            raise UnsupportedLayout(f"num_kv_heads is {self.num_kv_heads} where a latent has one")
        if self.num_kv_heads % self.tp and self.tp % self.num_kv_heads:
            raise UnsupportedLayout(f"num_kv_heads {self.num_kv_heads} over tp {self.tp}")

    @property
    def num_ranks(self) -> int:
        """Over all stages; rank = stage * tp + tensor-parallel rank."""
        return self.tp * len(self.stage_layers)

    @property
    def num_layers(self) -> int:
        """Of the model."""
        return sum(self.stage_layers)

    def layers(self, rank: int) -> Span:
        """The layers that the rank holds."""
        stage = self._checked(rank) // self.tp
        start = sum(self.stage_layers[:stage])
        return Span(start, start + self.stage_layers[stage])

    def heads(self, rank: int) -> Span:
        """The KV heads that the rank holds, as vLLM deals them out: neighbours share a head where
        there are fewer heads than ranks."""
        tp_rank = self._checked(rank) % self.tp
        count = max(1, self.num_kv_heads // self.tp)
        start = tp_rank * self.num_kv_heads // self.tp
        return Span(start, start + count)

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.num_ranks:
            raise KvTransferError(f"rank {rank} of a pool of {self.num_ranks}")
        return rank


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of layers × heads × tokens (all counted over the whole model and prompt) that one
    prefill rank sends to one decode rank. On the wire: [layer][K|V][token][head][channel]."""

    source_rank: int
    target_rank: int
    layers: Span
    heads: Span
    tokens: Span

    def size_bytes(self, head_bytes: int) -> int:
        """On the wire."""
        return len(self.layers) * len(self.heads) * len(self.tokens) * head_bytes


def check_pools(prefill: PoolLayout, decode: PoolLayout) -> None:
    """Raises UnsupportedLayout, naming the field, where the pools hold KV of different meaning."""
    for name in ("is_latent", "num_layers", "num_kv_heads", "head_bytes", "dtype"):
        ours, theirs = getattr(prefill, name), getattr(decode, name)
        if ours != theirs:
            raise UnsupportedLayout(f"{name} is {ours} in prefill, {theirs} in decode")


def first_token(cached_tokens: int, block_size: int) -> int:
    """Where to begin when the decode side has a prefix already: it takes whole blocks only."""
    return cached_tokens // block_size * block_size


def plan(
    prefill: PoolLayout, decode: PoolLayout, *, target_rank: int, tokens: Span, spread: int
) -> tuple[Piece, ...]:
    """What a decode rank receives, each part of its rectangle once. `spread` is a number that both
    ends derive from the transfer alike; it chooses among replicas. Raises UnsupportedLayout."""
    check_pools(prefill, decode)
    layers, heads = decode.layers(target_rank), decode.heads(target_rank)
    holders: dict[tuple[Span, Span], list[int]] = {}
    for rank in range(prefill.num_ranks):
        holders.setdefault((prefill.layers(rank), prefill.heads(rank)), []).append(rank)
    pieces = []
    for (held_layers, held_heads), ranks in holders.items():
        common_layers, common_heads = layers.meet(held_layers), heads.meet(held_heads)
        if common_layers is None or common_heads is None:
            continue
        source = ranks[(target_rank + spread) % len(ranks)]
        pieces.append(Piece(source, target_rank, common_layers, common_heads, tokens))
    return tuple(pieces)


def plan_all(
    prefill: PoolLayout, decode: PoolLayout, *, tokens: Span, spread: int
) -> tuple[Piece, ...]:
    """The pieces of every decode rank; a prefill rank sends those that name it."""
    return tuple(
        piece
        for rank in range(decode.num_ranks)
        for piece in plan(prefill, decode, target_rank=rank, tokens=tokens, spread=spread)
    )


def split(piece: Piece, *, head_bytes: int, slot_bytes: int) -> Iterator[Piece]:
    """The piece in parts that fit a staging slot, in the order of tokens, then layers: a part's
    tokens can go as soon as they are computed. Whole layers go together where they fit. Raises
    KvTransferError where not even one token of one layer fits."""
    token_bytes = len(piece.heads) * head_bytes
    if token_bytes > slot_bytes:
        raise KvTransferError(f"a slot of {slot_bytes} bytes holds no token of {token_bytes}")
    tokens_in_slot = slot_bytes // token_bytes
    token_step = min(len(piece.tokens), tokens_in_slot)
    layer_step = max(1, tokens_in_slot // token_step)
    for token in range(piece.tokens.start, piece.tokens.end, token_step):
        tokens = Span(token, min(token + token_step, piece.tokens.end))
        for layer in range(piece.layers.start, piece.layers.end, layer_step):
            layers = Span(layer, min(layer + layer_step, piece.layers.end))
            yield Piece(piece.source_rank, piece.target_rank, layers, piece.heads, tokens)
