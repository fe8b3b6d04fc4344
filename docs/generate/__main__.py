"""Fills the generated parts of the pages, and writes generated files; with `--check` it only tells
whether one is out of date.

A page marks such a part, and names the function below that makes it:

    <!-- generated: options grpo -->
    <!-- end of generated part -->
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from docs.generate import (
    alerts,
    archived_commands,
    chart,
    code_map,
    dashboard,
    errors,
    examples,
    home,
    http_api,
    metrics,
    offline_keys,
    options,
    recipes,
)

PAGES = Path(__file__).parents[1]
PART = re.compile(
    r"(?P<begin><!-- generated: (?P<name>[a-z-]+)(?: (?P<of>\S+))? -->\n)"
    r".*?(?P<end><!-- end of generated part -->)",
    re.DOTALL,
)
PARTS: Mapping[str, Callable[..., str]] = {
    "alerts": alerts.listed,
    "archived-lines": archived_commands.lines,
    "archived-options": archived_commands.options,
    "chart-values": chart.values,
    "code-map": code_map.tree,
    "errors": errors.table,
    "example": examples.code,
    "goals": home.table,
    "introduction": home.introduction,
    "offline-keys": offline_keys.keys,
    "options": options.command,
    "recipe-keys": recipes.keys,
    "routes": http_api.routes,
    "fields": http_api.fields,
    "run-api-metrics": metrics.of_run_api,
    "trainer-metrics": metrics.of_trainer,
    "environment-metrics": metrics.of_environment,
    "healthy-ranges": metrics.healthy_ranges,
}

FILES: Mapping[Path, Callable[[], str]] = {
    PAGES / "assets/grafana-dashboard.json": dashboard.dashboard,
    PAGES.parent / "helm/grpo/files/alerts.yml": alerts.rules,
}


def filled(page: str) -> str:
    """The page with its generated parts as the code has them now."""
    return PART.sub(_part, page)


def _part(found: re.Match[str]) -> str:
    argument = [found["of"]] if found["of"] else []
    return f"{found['begin']}\n{PARTS[found['name']](*argument)}\n\n{found['end']}"


def main(argv: list[str]) -> None:
    outdated = {}
    for path in sorted(PAGES.rglob("*.md")):
        before = path.read_text()
        after = filled(before)
        if after != before:
            outdated[path] = after
    for path, made in FILES.items():
        after = made()
        if not path.is_file() or path.read_text() != after:
            outdated[path] = after
    if argv == ["--check"] and outdated:
        names = ", ".join(str(path.relative_to(PAGES.parent)) for path in outdated)
        raise SystemExit(f"generated parts are out of date: {names}; run `make docs`")
    for path, page in outdated.items():
        path.write_text(page)


if __name__ == "__main__":
    main(sys.argv[1:])
