"""Readers of option values. They raise :class:`argparse.ArgumentTypeError` for what is not one."""

from __future__ import annotations

import argparse
import math
from fractions import Fraction

SLO_METRICS = ("ttft", "ttft_sched", "tpot", "tt2t", "e2e", "e2e_sched")
TRACE_HELP = "chat, code or longchat (shipped), or the path of a trace file; A+B mixes two"


def positive_int(text: str) -> int:
    value = whole_number(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 1")
    return value


def whole_number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 up")
    return int(text)


def positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def fraction(text: str) -> Fraction:
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a factor above 0, such as 1/8 or 0.5")
    return value


def slo(text: str) -> dict[str, float]:
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, limit = part.strip().partition("=")
        if name not in SLO_METRICS:
            known = ", ".join(SLO_METRICS)
            raise argparse.ArgumentTypeError(f"unknown metric {name!r}; known are {known}")
        if name in limits:
            raise argparse.ArgumentTypeError(f"{name} is given twice")
        limits[name] = _duration_s(name, limit)
    return limits


def _duration_s(name: str, text: str) -> float:
    for unit, factor in (("ms", 0.001), ("s", 1.0)):
        if text.endswith(unit):
            try:
                value = float(text.removesuffix(unit))
            except ValueError:
                break
            if math.isfinite(value) and value > 0:
                return value * factor
    raise argparse.ArgumentTypeError(
        f"{name}={text}: give a time above 0 with its unit, such as 500ms or 0.5s"
    )
