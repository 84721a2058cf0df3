"""PEM files that a process is told of, checked before anything is served with them.

Nothing of a certificate is parsed here: OpenSSL is asked, by a handshake in memory, what it would
say to this one.
"""

from __future__ import annotations

import ssl
import time
from dataclasses import dataclass
from pathlib import Path

from pdserve.config import refuse

_TURNS = 8  # more than any handshake takes


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate, its chain, and its key, as PEM."""

    chain: bytes
    key: bytes

    def __repr__(self) -> str:
        return "Pair(...)"


def read(path: str, at: str) -> bytes:
    """A file's bytes. Raises ConfigError naming the key `at`."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        refuse(at, f"cannot read {path}: {error.strerror or error}")


def read_pair(cert_file: str, key_file: str, at: str, *, as_server: bool) -> Pair:
    """The pair, which works at this moment. `at` is the section of both keys.

    Raises ConfigError: a file is missing or no PEM, the key is encrypted or of another certificate,
    the certificate has expired, is not yet valid, or is not for this use.
    """
    pair = Pair(read(cert_file, f"{at}.cert_file"), read(key_file, f"{at}.key_file"))
    trust = _trusting(pair.chain, cert_file, f"{at}.cert_file")
    mine = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if as_server else ssl.PROTOCOL_TLS_CLIENT)
    if not as_server:
        mine.check_hostname, mine.verify_mode = False, ssl.CERT_NONE
    try:
        mine.load_cert_chain(cert_file, key_file, password=lambda: "")
    except ssl.SSLError as error:
        why = (
            f"{key_file} is not the key of {cert_file}"
            if "MISMATCH" in (error.reason or "")
            else f"{key_file} is no private key in PEM, or is encrypted"
        )
        refuse(f"{at}.key_file", why)
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if as_server else ssl.PROTOCOL_TLS_SERVER)
    theirs.check_hostname, theirs.verify_mode = False, ssl.CERT_REQUIRED
    theirs.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    theirs.load_verify_locations(cadata=trust)
    if not as_server:
        # Somebody has to be the server, and it needs a certificate: any will do.
        theirs.load_cert_chain(cert_file, key_file)
    try:
        _shake_hands(mine, theirs, as_server=as_server)
    except ssl.SSLCertVerificationError as error:
        refuse(f"{at}.cert_file", f"{cert_file}: {error.verify_message}")
    except ssl.SSLError as error:
        refuse(f"{at}.cert_file", f"{cert_file} cannot be used: {error.reason}")
    return pair


def read_ca(path: str, at: str) -> bytes:
    """CA certificates as PEM, of which one at least is valid now. Raises ConfigError naming the
    key `at`."""
    text = read(path, at)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=_trusting(text, path, at))
    ends = [str(found["notAfter"]) for found in context.get_ca_certs()]
    if not ends:
        refuse(at, f"{path} holds no CA's certificate")
    if all(ssl.cert_time_to_seconds(end) < time.time() for end in ends):
        refuse(at, f"{path}: certificate has expired ({ends[0]})")
    return text


def _trusting(text: bytes, path: str, at: str) -> str:
    try:
        pem = text.decode("ascii")
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem)
    except (UnicodeDecodeError, ssl.SSLError):
        refuse(at, f"{path} is no certificate in PEM")
    return pem


def _shake_hands(mine: ssl.SSLContext, theirs: ssl.SSLContext, *, as_server: bool) -> None:
    one, other = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        mine.wrap_bio(one, other, server_side=as_server),
        theirs.wrap_bio(other, one, server_side=not as_server),
    )
    for _ in range(_TURNS):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
