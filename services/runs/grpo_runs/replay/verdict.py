"""Whether a replay gave the recorded numbers, and the likely cause if not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from grpo_core.provenance.digest import file_digest
from grpo_core.provenance.records import Code, Machine, Publication, Start
from grpo_runs.replay.run import ReplayedStep

Say = Callable[[str], None]
CPU = "cpu"
SHORT = 12


@dataclass(frozen=True)
class Tolerance:
    """Largest difference on another machine: of the loss, and of the gradient norm relative to
    it."""

    loss: float
    norm: float


BOUNDS = {"float32": Tolerance(1e-3, 1e-2)}
ROUNDED = Tolerance(2e-2, 0.1)
"""For weights in 16 bits."""


@dataclass(frozen=True)
class Differences:
    """What is not as in the run, such as `threads: 2 in the run, 1 here`. `machine`: what may
    change the last bits of the same code."""

    machine: Sequence[str]
    code: Sequence[str]

    @property
    def all(self) -> list[str]:
        return [*self.machine, *self.code]


def environment_differences(start: Start, code: Code, machine: Machine) -> Differences:
    then, own = start.machine, start.code.own
    of_machine = [
        ("threads", then.threads, machine.threads),
        ("torch", then.torch, machine.torch),
        ("transformers", then.transformers, machine.transformers),
        ("python", then.python, machine.python),
        ("instructions of the CPU", then.cpu, machine.cpu),
        ("device", then.device, machine.device),
        ("trainer processes", then.ranks, machine.ranks),
    ]
    of_code = [
        ("code of grpo_trainer", start.code.trainer, code.trainer),
        ("code of grpo_core", start.code.core, code.core),
        *(
            (path, digest, file_digest(Path(path)) if Path(path).is_file() else "missing")
            for path, digest in own.items()
        ),
    ]
    return Differences(
        [f"{what}: {was} in the run, {now} here" for what, was, now in of_machine if was != now],
        [
            f"{what}: {was[:SHORT]} in the run, {now[:SHORT]} here"
            for what, was, now in of_code
            if was != now
        ],
    )


def first_difference(start: Start, recorded: Publication, digests: Sequence[str]) -> str | None:
    """The name of the first tensor whose digest differs."""
    names = (facts[0] for facts in start.tensors)
    rows = zip_longest(names, recorded.digests, digests, fillvalue="one without a record")
    return next((name for name, then, now in rows if then != now), None)


def passes(step: ReplayedStep, start: Start, differences: Differences, say: Say) -> bool:
    """Whether the step is equal bit by bit, or within the bound where no more can be expected.

    Args: differences: of the environment; say: prints a line
    """
    then = step.recorded
    if step.is_equal:
        say(
            f"step {step.step}: loss and gradient norm are equal bit by bit"
            if then.root is None
            else f"step {step.step}: loss, gradient norm and weights are equal bit by "
            f"bit (weights {then.root[:SHORT]})"
        )
        return True
    name = first_difference(start, then, step.digests)
    say(f"step {step.step}: differs from the run")
    say(f"  loss           {_pair(then.loss, step.loss)}")
    say(f"  gradient norm  {_pair(then.grad_norm, step.norm)}")
    of_weights = "equal" if name is None else f"differ; the first tensor that differs is {name}"
    say(f"  weights        {'not recorded' if then.root is None else of_weights}")
    expects_equal = start.machine.device == CPU and not differences.machine
    bound = BOUNDS.get(start.dtype, ROUNDED)
    if expects_equal or not _is_within(step, bound):
        say(f"likely cause: {_cause(differences)}")
        return False
    say(
        f"within the bound for another machine: {bound.loss:g} of "
        f"the loss, {bound.norm:.0%} of the gradient norm"
    )
    return True


def _pair(then: float | None, now: float) -> str:
    if then == now:
        return f"{now!r}, equal"
    return f"{then!r} in the run, {now!r} here"


def _is_within(step: ReplayedStep, bound: Tolerance) -> bool:
    loss, norm = step.recorded.loss, step.recorded.grad_norm
    assert loss is not None
    assert norm is not None
    return abs(step.loss - loss) <= bound.loss and abs(step.norm - norm) <= bound.norm * norm


def _cause(differences: Differences) -> str:
    if differences.all:
        return "; ".join(differences.all)
    return (
        "none is known: code, libraries, threads, batch and first weights are those of the run. An "
        "operation may be random, for example in your own loss"
    )
