"""Single tokens out of and into the pages of a KV cache in host memory, for workers whose blocks
differ in size. Between the two the tokens lie as [layer][token][head][content], whatever the pages
look like.

A page is head behind head. What one head has of it is in an order of the attention kernel's own:
vLLM's CPU kernels turn keys over the whole block, so a token's place depends on the block's size
(kv_transfer/vllm_packing.py finds out how).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kv_transfer.errors import KvTransferError, UnsupportedLayout
from kv_transfer.reshard import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kv_transfer.layout import KvGeometry

# The widest element that is moved as one.
_MAX_ITEM_BYTES = 8
_MAX_STRIPES = 8


@dataclass(frozen=True, slots=True)
class Stripe:
    """Elements [first, end) of each token, which lie at start + token * by_token + element *
    by_element of the head's part of a page, the element counted from `first`."""

    first: int
    end: int
    start: int
    by_token: int
    by_element: int

    def places(self, tokens: int) -> NDArray[np.int64]:
        """Of so many tokens."""
        elements = np.arange(self.end - self.first) * self.by_element
        return np.arange(tokens)[:, None] * self.by_token + elements + self.start


@dataclass(frozen=True, slots=True, eq=False)
class TokenOrder:
    """Where the elements of a block's tokens are in what one head has of a page. Checked at birth:
    UnsupportedLayout where they do not fill it, each once."""

    # [token of the block, element of the token] → element of the head's part of the page.
    places: NDArray[np.int64]
    item_bytes: int
    # The same of blocks of another size. May raise UnsupportedLayout.
    remake: Callable[[int], TokenOrder]
    inverse: NDArray[np.int64] = field(init=False)
    # Where strides say it all, which is quicker than looking each element up.
    stripes: tuple[Stripe, ...] = field(init=False)

    def __post_init__(self) -> None:
        flat = self.places.ravel()
        inverse = np.argsort(flat)
        if self.places.ndim != 2 or not np.array_equal(flat[inverse], np.arange(flat.size)):
            raise UnsupportedLayout("the tokens of a block do not fill its page")
        if self.item_bytes not in (1, 2, 4, _MAX_ITEM_BYTES):
            raise UnsupportedLayout(f"elements of {self.item_bytes} bytes")
        object.__setattr__(self, "inverse", inverse)
        object.__setattr__(self, "stripes", _stripes(self.places))

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return int(self.places.shape[0])

    @property
    def content(self) -> int:
        """Elements of one token and head."""
        return int(self.places.shape[1])

    def resized(self, block_size: int) -> TokenOrder:
        """Of a cache that differs in nothing but its block size. Raises UnsupportedLayout."""
        return self if block_size == self.block_size else self.remake(block_size)


def _stripes(places: NDArray[np.int64]) -> tuple[Stripe, ...]:
    """A token's elements cut where their strides change; none where that is often."""
    by_token = places[-1] - places[0]
    along = np.diff(places[0])
    cuts = np.flatnonzero((np.diff(by_token) != 0) | (np.diff(along, append=along[-1:]) != 0)) + 1
    edges = [0, *(int(cut) for cut in cuts), places.shape[1]]
    if len(edges) > _MAX_STRIPES:
        return ()
    found = tuple(_stripe(places, first, end) for first, end in itertools.pairwise(edges))
    ours = np.concatenate([stripe.places(places.shape[0]) for stripe in found], axis=1)
    return found if np.array_equal(ours, places) else ()


def _stripe(places: NDArray[np.int64], first: int, end: int) -> Stripe:
    start = int(places[0, first])
    by_token = int(places[1, first]) - start if places.shape[0] > 1 else 0
    by_element = int(places[0, first + 1]) - start if end - first > 1 else 0
    return Stripe(first, end, start, by_token, by_element)


@dataclass(frozen=True, slots=True)
class TokenPages:
    """The pages of a cache that lies in `memory`, by token."""

    memory: memoryview
    geometry: KvGeometry
    order: TokenOrder

    def take(self, block_ids: Sequence[int], tokens: Span) -> memoryview:
        """The tokens of these blocks, counted from the first block's first; the caller has checked
        the ids. Raises KvTransferError where the blocks have no such tokens."""
        size, content = self.order.block_size, self.order.content
        if tokens.end > len(block_ids) * size:
            raise KvTransferError(f"{tokens} is not in {len(block_ids)} blocks of {size}")
        first, end = tokens.start // size, -(-tokens.end // size)
        pages = self._heads()
        layers, blocks, heads = pages.shape[0], end - first, pages.shape[2]
        if self.order.stripes:
            found = np.empty((layers, len(tokens), heads, content), pages.dtype)
            self._each(block_ids, tokens, found, is_put=False)
            return found.view(np.uint8).reshape(-1).data
        pages = pages[:, list(block_ids[first:end])]
        split = np.take(pages, self.order.places.ravel(), axis=3, mode="clip")
        split = split.reshape(layers, blocks, heads, size, content).transpose(0, 1, 3, 2, 4)
        flat = split.reshape(layers, blocks * size, heads, content)
        start = tokens.start - first * size
        found = np.ascontiguousarray(flat[:, start : start + len(tokens)])
        return found.view(np.uint8).reshape(-1).data

    def put(self, block_ids: Sequence[int], tokens: int, data: memoryview) -> None:
        """The reverse, into the first `tokens` of the blocks; what comes behind them in the last
        block stays as it is. Raises KvTransferError, having written nothing."""
        order, size, content = self.order, self.order.block_size, self.order.content
        if -(-tokens // size) != len(block_ids):
            raise KvTransferError(f"{tokens} tokens for {len(block_ids)} blocks of {size}")
        pages = self._heads()
        layers, _, heads, elements = pages.shape
        if data.nbytes != layers * tokens * heads * content * order.item_bytes:
            raise KvTransferError(f"{data.nbytes} bytes are not {tokens} tokens")
        given = np.frombuffer(data, f"u{order.item_bytes}").reshape(layers, tokens, heads, content)
        if order.stripes:
            self._each(block_ids, Span(0, tokens), given, is_put=True)
            return
        full, rest = divmod(tokens, size)
        if full:
            whole = given[:, : full * size].reshape(layers, full, size, heads, content)
            whole = whole.transpose(0, 1, 3, 2, 4).reshape(layers, full, heads, elements)
            pages[:, list(block_ids[:full])] = np.take(whole, order.inverse, axis=3, mode="clip")
        if rest:
            last = given[:, full * size :].transpose(0, 2, 1, 3)
            last = last.reshape(layers, heads, rest * content)
            pages[:, block_ids[full]][:, :, order.places[:rest].ravel()] = last

    def _each(
        self, block_ids: Sequence[int], tokens: Span, wire: NDArray[Any], *, is_put: bool
    ) -> None:
        """Copies the tokens of one block after the other, stripe by stripe."""
        size, pages = self.order.block_size, self._heads()
        by_layer, by_block, by_head, item = pages.strides
        layers, blocks, heads, _ = pages.shape
        for stripe in self.order.stripes:
            view = np.lib.stride_tricks.as_strided(
                pages[:, :, :, stripe.start :],
                (layers, blocks, size, heads, stripe.end - stripe.first),
                (by_layer, by_block, stripe.by_token * item, by_head, stripe.by_element * item),
            )
            part = wire[..., stripe.first : stripe.end]
            token = tokens.start
            while token < tokens.end:
                block, at = divmod(token, size)
                end = min(token - at + size, tokens.end)
                inside = view[:, block_ids[block], at : at + end - token]
                outside = part[:, token - tokens.start : end - tokens.start]
                if is_put:
                    inside[...] = outside
                else:
                    outside[...] = inside
                token = end

    def _heads(self) -> NDArray[Any]:
        """The cache as [layers, blocks, heads, elements]."""
        g, item = self.geometry, self.order.item_bytes
        elements = self.order.places.size
        heads, rest = divmod(g.page_bytes, elements * item)
        if rest:
            raise KvTransferError(
                f"{self.order.block_size} tokens in {g.page_bytes} bytes of a page"
            )
        return np.ndarray(
            (g.num_layers, g.num_blocks, heads, elements),
            f"u{item}",
            self.memory,
            g.offset_bytes,
            (g.layer_stride_bytes, g.block_stride_bytes, elements * item, item),
        )
