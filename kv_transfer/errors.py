"""Errors inside the KV plane. A client sees none of them: a transfer that fails ends its request
with `transfer_failed` or `transfer_corrupted`."""

from __future__ import annotations


class KvTransferError(Exception):
    """Base of the KV plane's errors."""


class ProtocolError(KvTransferError):
    """The peer violated the protocol."""


class HandshakeRefused(KvTransferError):
    """Two workers cannot exchange KV; the message says why."""


class LinkClosed(KvTransferError):
    """The connection to the peer has ended."""


class UnsupportedLayout(KvTransferError):
    """This engine's KV cache cannot be moved; the message says what is missing."""
