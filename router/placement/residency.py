"""Data residency: the regions in which data of each tenant may be. `may_hold` applies them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.config import GLOBAL, ResidencyConfig
from pdserve.errors import InvalidRequest, Refusal
from router.placement.values import may_hold, shown_regions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pdserve.config import TenantConfig
    from pdserve.types import Regions

FIELD, HEADER = "inference_geo", "x-inference-geo"


def cache_namespace(regions: Regions, cache_salt: str) -> str:
    """Return the cache salt of a request. It is part of the prefix root and of the names of blocks
    in tiers, so a request finds KV only of requests that may be in the same regions. Without that,
    KV of a constrained request could leave its regions as a cached prefix of another request.

    Raises InvalidRequest for a salt that could name the cache of a region.
    """
    if "\0" in cache_salt:
        raise InvalidRequest("'cache_salt' must not have a NUL character", field="cache_salt")
    return cache_salt if regions is None else f"{shown_regions(regions)}\0{cache_salt}"


def narrowest(named: str | None, headers: Mapping[str, str]) -> str:
    """Return the region that a request names in its body or in a header, "" if it names none.
    Raises InvalidRequest if they differ."""
    header = headers.get(HEADER, "")
    if named and header and named != header:
        text = f"'{FIELD}' is {named!r}, and the header {HEADER} is {header!r}"
        raise _refused(text)
    return named or header


class Residency:
    """Residency rules. State: `tenants` with rules, by name.

    The router reads every prompt, fetches images and keeps answers, so it also serves only requests
    that may be in its own region.
    """

    def __init__(
        self,
        config: ResidencyConfig,
        topology: Mapping[str, str],
        tenants: Iterable[TenantConfig] = (),
    ) -> None:
        """`topology`: labels of this router."""
        self._known, self._topology = frozenset(config.regions), topology
        self.use(tenants)

    def use(self, tenants: Iterable[TenantConfig]) -> None:
        """Use the rules of these tenants from now on."""
        self.tenants = {
            x.name: x
            for x in tenants
            if x.allowed_inference_geos or x.default_inference_geo or x.storage_geo
        }

    def regions_of(self, tenant: str, geo: str = "") -> Regions:
        """Return the regions in which a request of `tenant` may be. `geo`: the region that it
        names, or "". Raises InvalidRequest."""
        rules = self.tenants.get(tenant)
        if not geo and rules is None:
            return None
        allowed = frozenset(rules.allowed_inference_geos) if rules is not None else frozenset()
        if not geo and rules is not None:
            geo = rules.default_inference_geo
        if geo and geo != GLOBAL and geo not in self._known:
            known = ", ".join((*sorted(self._known), GLOBAL))
            raise _refused(f"'{FIELD}' must be one of {known}, not {geo!r}")
        if geo and allowed and geo not in allowed:
            own = shown_regions(allowed)
            raise _refused(f"'{FIELD}' is {geo!r}, and tenant {tenant} may use {own} alone")
        regions: Regions = frozenset({geo}) if geo and geo != GLOBAL else allowed or None
        self._check_here(regions, "the request may be")
        return regions

    def admits(self, tenant: str, regions: Regions) -> bool:
        """Return True if a request that another region forwards may be here, by its own `regions`
        and the rules for its tenant here."""
        rules = self.tenants.get(tenant)
        allowed = frozenset(rules.allowed_inference_geos) if rules is not None else frozenset()
        places = (regions, allowed or None)
        return all(may_hold(x, self._topology) for x in places)

    def storage_of(self, tenant: str) -> Regions:
        """Return the regions in which data of `tenant` may be kept."""
        if (rules := self.tenants.get(tenant)) is None:
            return None
        kept = (rules.storage_geo,) if rules.storage_geo else rules.allowed_inference_geos
        return frozenset(kept) or None

    def check_store(self, tenant: str, field: str) -> None:
        """Raise InvalidRequest, naming `field`, if data of `tenant` must not be kept here."""
        self._check_here(self.storage_of(tenant), f"'{field}': data is kept", field)

    def _check_here(self, regions: Regions, what: str, field: str = FIELD) -> None:
        if regions is not None and not may_hold(regions, self._topology):
            here, there = self._topology.get("region", "no region"), shown_regions(regions)
            text = f"{what} in {there} alone, and this router is in {here}: use one of {there}"
            raise _refused(text, field)


def _refused(text: str, field: str = FIELD) -> InvalidRequest:
    return InvalidRequest(text, field=field, reason=Refusal.REGION_NOT_ALLOWED)


ANYWHERE = Residency(ResidencyConfig(), {})
"""The rules of a service without regions."""
