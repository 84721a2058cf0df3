"""Certificates, keys and tokens are checked at the start; what is wrong is said with its key."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pdserve.config import AccessConfig, Config, HttpTlsConfig, RouterAccessConfig, TlsConfig, parse
from pdserve.errors import ConfigError
from pdserve.security import files
from pdserve.security.tls import (
    CertificateCollector,
    dialer,
    http_context,
    server_credentials,
    tls_dialer,
)
from tests.support.pki import Ca

if TYPE_CHECKING:
    from collections.abc import Callable

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def ca(tmp_path: Path) -> Ca:
    return Ca(tmp_path)


def refusal(what: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(ConfigError) as caught:
        what()
    return caught.value.field, caught.value.message


def test_a_good_pair_is_taken_and_none_is_plain(ca: Ca) -> None:
    files = ca.issue("router")
    tls = TlsConfig(cert_file=files.cert, key_file=files.key, ca_file=ca.path)
    assert tls.is_mutual
    assert server_credentials(tls) is not None
    assert dialer(AccessConfig(tls=tls)).context is not None
    assert tls_dialer(ca_file=ca.path).context is not None
    assert http_context(HttpTlsConfig(cert_file=files.cert, key_file=files.key)) is not None
    assert server_credentials(TlsConfig()) is None
    assert http_context(HttpTlsConfig()) is None
    assert dialer(AccessConfig()).context is None


def test_each_fault_of_a_pair_names_its_key_and_the_reason(ca: Ca, tmp_path: Path) -> None:
    good, other, late = ca.issue("good"), ca.issue("other"), ca.issue("late", hours=-1)
    garbage, absent = tmp_path / "garbage", str(tmp_path / "absent")
    garbage.write_text("no certificate")

    def start(**files: str) -> tuple[str, str]:
        return refusal(lambda: server_credentials(TlsConfig(**files)))

    field, reason = start(cert_file=absent, key_file=good.key)
    assert (field, "No such file" in reason) == ("access.tls.cert_file", True)
    field, reason = start(cert_file=good.cert, key_file=absent)
    assert (field, "No such file" in reason) == ("access.tls.key_file", True)
    field, reason = start(cert_file=good.cert, key_file=other.key)
    assert (field, "is not the key of" in reason) == ("access.tls.key_file", True)
    field, reason = start(cert_file=late.cert, key_file=late.key)
    assert (field, "certificate has expired" in reason) == ("access.tls.cert_file", True)
    field, reason = start(cert_file=str(garbage), key_file=good.key)
    assert (field, "is not a certificate in PEM" in reason) == ("access.tls.cert_file", True)
    field, reason = start(cert_file=good.cert, key_file=str(garbage))
    assert (field, "is not a private key" in reason) == ("access.tls.key_file", True)
    for path, why in (
        (str(garbage), "not a certificate in PEM"),
        (good.cert, "holds no CA certificate"),
        (Ca(tmp_path, "old", hours=-1).path, "has expired"),
    ):
        field, reason = start(cert_file=good.cert, key_file=good.key, ca_file=path)
        assert (field, why in reason) == ("access.tls.ca_file", True)


def test_a_client_reports_that_its_own_certificate_has_expired(ca: Ca) -> None:
    late = ca.issue("late", hours=-1)
    field, reason = refusal(lambda: tls_dialer(cert_file=late.cert, key_file=late.key))
    assert (field, "expired" in reason) == ("tls.cert_file", True)


def test_files_that_are_renewed_wrongly_are_not_used(
    ca: Ca, caplog: pytest.LogCaptureFixture
) -> None:
    files = ca.issue("router")
    found = tls_dialer(ca_file=ca.path, cert_file=files.cert, key_file=files.key)
    first = found.context
    Path(files.cert).write_text("no certificate")
    assert found.context is found.context is first
    assert [f"{files.cert} is not a certificate in PEM" in x for x in caplog.messages] == [True]
    ca.issue("router")
    assert found.context is found.context is not first


def shown(collector: CertificateCollector) -> dict[tuple[str, str], float]:
    """Return the values by the end of the metric's name and its label."""
    return {
        (x.name.removeprefix("pdserve_tls_"), x.labels["key"]): x.value
        for metric in collector.collect()
        for x in metric.samples
    }


def test_metrics_tell_when_certificates_end_and_that_new_ones_are_not_used(ca: Ca) -> None:
    files, public = ca.issue("router", hours=3), ca.issue("public", hours=7)
    tls = TlsConfig(cert_file=files.cert, key_file=files.key, ca_file=ca.path)
    http = HttpTlsConfig(cert_file=public.cert, key_file=public.key)
    collector = CertificateCollector(RouterAccessConfig(tls=tls, http_tls=http))

    def hours() -> dict[str, int]:
        ends = {
            x: end for (name, x), end in shown(collector).items() if name == "not_after_seconds"
        }
        return {key: round((end - time.time()) / 3600) for key, end in ends.items()}

    def errors() -> dict[str, float]:
        return {x: n for (name, x), n in shown(collector).items() if name == "file_errors_total"}

    expected = {"access.tls.cert_file": 3, "access.tls.ca_file": 24, "access.http_tls.cert_file": 7}
    assert hours() == expected
    Path(files.cert).write_text("no certificate")
    assert hours() == expected
    assert errors() == {"access.tls": 1, "access.http_tls": 0}
    ca.issue("router", hours=5)
    assert hours() == expected | {"access.tls.cert_file": 5}
    assert shown(CertificateCollector(AccessConfig())) == {}


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: TlsConfig(cert_file="a"), "key_file"),
        (lambda: TlsConfig(key_file="a"), "cert_file"),
        (lambda: TlsConfig(ca_file="a"), "cert_file"),
        (lambda: HttpTlsConfig(cert_file="a"), "key_file"),
        (lambda: HttpTlsConfig(ca_file="a"), "cert_file"),
        (lambda: AccessConfig(admin_keys=("plain",)), "admin_keys[0]"),
    ],
)
def test_halves_of_a_configuration_are_refused(make: Callable[[], object], field: str) -> None:
    assert refusal(make)[0] == field


def test_the_sections_name_the_whole_key() -> None:
    raw = {"router": {"access": {"http_tls": {"cert_file": "a"}}}}
    assert refusal(lambda: parse(Config, raw))[0] == "router.access.http_tls.key_file"


def test_a_token_is_read_and_never_repeated(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    found = dialer(AccessConfig(worker_token_file=str(file)))
    assert found.tokens == (TOKEN,)
    assert TOKEN not in repr(found)
    assert found.metadata == (("authorization", f"Bearer {TOKEN}"),)
    for text in ("short secret", "", f"{TOKEN} {TOKEN}", "é" * 40, f"{TOKEN}\nshort"):
        file.write_text(text)
        field, reason = refusal(lambda: dialer(AccessConfig(worker_token_file=str(file))))
        assert field == "access.worker_token_file"
        assert not text or text not in reason
    assert RouterAccessConfig(worker_token_file=str(file)).asks_for_roles


def test_a_replaced_token_is_valid_beside_the_new_one_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, old, new = tmp_path / "token", "o" * 40, "n" * 40
    file.write_text(old)
    found = dialer(AccessConfig(worker_token_file=str(file)))
    assert found.tokens == (old,)
    file.write_text("too short")
    assert found.tokens == (old,)
    file.write_text(new)
    assert found.tokens == (new, old)
    assert found.metadata == tuple(("authorization", f"Bearer {x}") for x in (new, old))
    file.write_text(f"{new}\n{TOKEN}\n")
    monkeypatch.setattr(files, "OVERLAP_S", -1.0)
    assert found.tokens == (new, TOKEN)
