"""Reads `/metrics` as Prometheus does."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def series(text: str) -> dict[str, float]:
    """Every series, by name, with its labels' values after slashes."""
    return {
        "/".join((sample.name, *sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(port: int) -> dict[str, float]:
    """Every series at this port of this host."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return series(opener.open(f"http://127.0.0.1:{port}/metrics").read().decode())
