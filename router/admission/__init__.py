"""Admission control. `AdmissionController.slot` is the entry."""

from router.admission.controller import AdmissionController, AdmissionLimits, LatencyEstimate
from router.admission.tenants import Tenants

__all__ = ["AdmissionController", "AdmissionLimits", "LatencyEstimate", "Tenants"]
