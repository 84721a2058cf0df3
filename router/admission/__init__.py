"""Admission: how many requests run, how many wait, in which order, and who is refused."""

from router.admission.admission import Admission
from router.admission.gate import Grant
from router.admission.limits import AdmissionLimits, Bid, Reservation, bid_of

__all__ = ["Admission", "AdmissionLimits", "Bid", "Grant", "Reservation", "bid_of"]
