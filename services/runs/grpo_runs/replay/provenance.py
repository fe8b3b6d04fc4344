"""The command `grpo-provenance`, or `python -m grpo_runs.replay.provenance`. Needs no torch."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

from grpo_core.errors import BrokenProvenance, GrpoError
from grpo_core.provenance.chain import Provenance, chain_of
from grpo_core.provenance.verify import verify
from grpo_core.rollouts.files import ROLLOUTS, read_step, steps_in
from grpo_core.rollouts.record import RolloutRecord
from grpo_core.settings import EXIT_USAGE, OptionsInvalid, load_settings
from grpo_runs.settings.replay import ProvenanceSettings

EXIT_DIFFERS = 1


@contextlib.contextmanager
def errors_told(prog: str) -> Iterator[None]:
    try:
        yield
    except OptionsInvalid as error:
        sys.stderr.write("".join(f"{prog}: {line}\n" for line in error.lines))
        raise SystemExit(EXIT_USAGE) from None
    except GrpoError as error:
        sys.stderr.write(f"{prog}: {type(error).__name__}: {error}\n")
        raise SystemExit(EXIT_DIFFERS) from None


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> None:
    """`grpo-provenance`"""
    words = sys.argv[1:] if argv is None else argv
    settings = load_settings(ProvenanceSettings, words, at_start=True)
    with errors_told("grpo-provenance"):
        found = Provenance.of(settings.run)
        if settings.completion is not None:
            for line in chain_of(found, _record(found, settings.completion)):
                say(line)
        elif not _is_as_recorded(found):
            raise SystemExit(EXIT_DIFFERS)


def _is_as_recorded(provenance: Provenance) -> bool:
    found = verify(provenance)
    without = f" ({found.undigested} without digests)" if found.undigested else ""
    counts = (
        f"{found.publications} publications{without}, {found.checkpoints} checkpoints, "
        f"{found.models} exported models and {found.batches} batches"
    )
    for problem in found.problems:
        say(problem)
    if found.problems:
        say(f"compared {counts}; {len(found.problems)} do not match")
    else:
        say(f"{counts} match their digests")
    return not found.problems


def _record(provenance: Provenance, completion: str) -> RolloutRecord:
    """Raises `BrokenProvenance`: there is no such rollout; `BrokenRollouts`."""
    step, group, index = map(int, completion.split("/"))
    places = [at / ROLLOUTS for at in (provenance.save_path, provenance.save_path.parent)]
    found = [at for at in places if at.is_dir() and step in steps_in(at)]
    if not found:
        raise BrokenProvenance(
            f"neither {places[0]} nor {places[1]} has rollouts of step {step}; see --keep-rollouts"
        )
    records = {(r.group, r.index): r for r in read_step(found[0], step)}
    if (group, index) not in records:
        groups, sequences = (max(at[k] for at in records) for k in (0, 1))
        raise BrokenProvenance(
            f"step {step} has no completion {group}/{index}; the last is {groups}/{sequences}"
        )
    return records[group, index]


if __name__ == "__main__":
    main()
