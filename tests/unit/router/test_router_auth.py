"""Keys to tenants, and that no key is told to anyone."""

from __future__ import annotations

import pytest

from pdserve.config import TenantConfig
from pdserve.errors import ConfigError, Unauthenticated
from pdserve.security.keys import hash_key, is_hash, new_key
from router.api.auth import EVERYONE, Keys

ONE, TWO, THREE = new_key(), new_key(), "a key that somebody chose"
KEYS = Keys(
    [
        TenantConfig("a", (hash_key(ONE), hash_key(TWO))),
        TenantConfig("b", (hash_key(THREE),)),
        TenantConfig("keyless"),
    ]
)


@pytest.mark.parametrize(
    ("header", "tenant"),
    [
        (f"Bearer {ONE}", "a"),
        (f"bearer  {TWO} ", "a"),
        (f"BEARER {THREE}", "b"),
    ],
    ids=["one", "two", "three"],
)
def test_a_key_is_its_tenants(header: str, tenant: str) -> None:
    assert KEYS.tenant_of(header) == tenant


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", ONE, f"Basic {ONE}", f"Bearer {ONE}x", f"Bearer {ONE[:-1]}"],
    ids=["none", "empty", "scheme", "space", "bare", "basic", "longer", "shorter"],
)
def test_anything_else_is_refused_and_not_repeated(header: str | None) -> None:
    with pytest.raises(Unauthenticated, match="API key") as caught:
        KEYS.tenant_of(header)
    assert ONE[:8] not in str(caught.value)


def test_a_hash_is_no_key() -> None:
    with pytest.raises(Unauthenticated):
        KEYS.tenant_of(f"Bearer {hash_key(ONE)}")


def test_without_tenants_everyone_is_let_in() -> None:
    assert EVERYONE.tenant_of(None) == EVERYONE.tenant_of(f"Bearer {ONE}") == ""


def test_a_key_in_the_configuration_is_refused_without_being_shown() -> None:
    with pytest.raises(ConfigError, match=r"keys\[1\]: must be a hash") as caught:
        TenantConfig("a", (hash_key(ONE), TWO))
    assert TWO not in str(caught.value)


def test_hashes() -> None:
    assert hash_key("abc") == (
        "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )
    assert is_hash(hash_key(ONE))
    assert not is_hash(hash_key(ONE) + "0")
    assert new_key() != new_key()
