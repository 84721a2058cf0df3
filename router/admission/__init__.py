"""Admission control. `AdmissionController.slot` is the entry."""

from router.admission.controller import (
    AdmissionController,
    AdmissionLimits,
    LatencyEstimate,
    Slot,
)
from router.admission.tenants import Tenant, Tenants

__all__ = [
    "AdmissionController",
    "AdmissionLimits",
    "LatencyEstimate",
    "Slot",
    "Tenant",
    "Tenants",
]
