"""How the tables show several measurements of one thing."""

from __future__ import annotations

from statistics import median


def spread(values: list[float], digits: int) -> str:
    """median (lowest to highest)"""
    shown = [f"{value:,.{digits}f}" for value in (median(values), min(values), max(values))]
    return f"{shown[0]} ({shown[1]} to {shown[2]})"
