"""Errors inside the KV plane. None reaches a client as it is: a transfer that fails ends its
request with pdserve's `transfer_failed`."""

from __future__ import annotations


class KvTransferError(Exception):
    """Base of the KV plane's errors."""


class ProtocolError(KvTransferError):
    """The peer sent something that is not a message of ours."""


class HandshakeRefused(KvTransferError):
    """The peer will not exchange KV with us; the message is its reason."""


class LinkClosed(KvTransferError):
    """The connection to the peer is gone."""


class UnsupportedLayout(KvTransferError):
    """This engine's KV cache cannot be moved; the message says what is missing."""
