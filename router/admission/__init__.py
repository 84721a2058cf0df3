"""Admission control. `AdmissionController.enter` is the entry."""

from router.admission.controller import (
    UNAVAILABLE_RETRY_AFTER_S,
    AdmissionController,
    LatencyEstimate,
    Slot,
)
from router.admission.queue import NoAdapterSlot, NoRoom
from router.admission.tenants import Door, Tenants

__all__ = [
    "UNAVAILABLE_RETRY_AFTER_S",
    "AdmissionController",
    "Door",
    "LatencyEstimate",
    "NoAdapterSlot",
    "NoRoom",
    "Slot",
    "Tenants",
]
