"""Messages between the two ends of a link over NCCL, sent in `Inner`."""

from __future__ import annotations

from kv_transfer.protocol.messages import Count, KvMessage, kinds_of


class Offer(KvMessage, frozen=True):
    """Producer: offer the next bytes over this link's communicator `number`.

    With its NCCL `unique_id`, there are no bytes, and the consumer joins. `is_direct`: one
    operation per block, from the KV cache. Bytes offered outside of a chunk are discarded.
    """

    number: Count
    size_bytes: Count
    unique_id: bytes = b""
    is_direct: bool = False


class Clear(KvMessage, frozen=True):
    """Consumer: the receive of the offered bytes is posted."""

    number: Count


class Ended(KvMessage, frozen=True):
    """Either end: this end has freed its idle communicator. From a producer, while other links wait
    for a place: free yours and answer with this message once all bytes have arrived."""

    number: Count


KINDS = kinds_of(Offer, Clear, Ended)
