"""Errors inside the KV plane. Clients never see them: a failed transfer ends its request with
`transfer_failed` or `transfer_corrupted`."""

from __future__ import annotations


class KvTransferError(Exception):
    """Base of the KV plane's errors."""


class ProtocolError(KvTransferError):
    """The peer violated the protocol."""


class HandshakeRefused(KvTransferError):
    """The two workers cannot exchange KV; the message states the reason."""


class LinkClosed(KvTransferError):
    """The connection to the peer has ended."""


class UnsupportedLayout(KvTransferError):
    """This engine's KV cache cannot be transferred; the message states what is missing."""
