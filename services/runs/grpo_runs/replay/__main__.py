"""The command `grpo-replay`, or `python -m grpo_runs.replay`. Options are parsed before torch is
imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from grpo_core.cpu import prepare_cpu
from grpo_core.logs import configure_logging
from grpo_core.provenance.chain import Provenance
from grpo_core.settings import load_settings
from grpo_runs.replay.provenance import EXIT_DIFFERS, errors_told, say
from grpo_runs.settings.replay import ReplaySettings


def main(argv: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else argv
    settings = load_settings(ReplaySettings, words, at_start=True)
    with errors_told("grpo-replay"):
        provenance = Provenance.of(settings.run)
        configure_logging("replay", "WARNING")
        prepare_cpu()

        from grpo_runs.replay.command import replay_run

        if not replay_run(provenance, settings, say):
            raise SystemExit(EXIT_DIFFERS)


if __name__ == "__main__":
    main()
