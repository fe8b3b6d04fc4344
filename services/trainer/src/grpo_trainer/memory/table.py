"""Shows a memory plan as text, in at most 100 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from grpo_trainer.memory.plan import (
    GIB,
    SERVER_RESERVE_BYTES,
    TRAINER_RESERVE_BYTES,
    WHOLE,
    Combination,
    MemoryPlan,
    name_of,
)

_HEADINGS = (
    *("", "MODE", "LAYERS", "OPTIMIZER", "MASTERS", "MASTER", "GRAD", "STATE", "COPY"),
    *("KEPT", "WORK", "FITS", "WORK*", "FITS*"),
)
_TEXT_COLUMNS = 5
"""These are aligned on the left, the others on the right."""
_LEGEND = """\
MASTER, GRAD, STATE: bytes per trained weight of master weight, gradient and optimizer state.
COPY: bytes per weight of the trainer's copies: of the model, except in shared_vllm, where the
trainer uses the server's, and of the reference model of --kl-coef.
KEPT: GiB of these four in the trainer, exact.
WORK: GiB of activations, logits and buffers in the trainer, estimated.
FITS: yes, or the largest --gpu-memory-utilization with which server and trainer fit on the GPU.
*: with --gradient-checkpointing.
"""


def text_of(plan: MemoryPlan) -> str:
    return "\n".join([_head(plan), _table(plan), _LEGEND + _gradients(plan), _verdict(plan)])


def _head(plan: MemoryPlan) -> str:
    gpu, server = plan.gpu, plan.server
    found = gpu.name or "no GPU found, so this size is assumed"
    model = plan.combinations[0].trainee.policy
    weights = sum(p.numel() for p in model.parameters())
    return (
        f"model    {plan.model}: {weights / 1e9:.3g} billion weights, {plan.layers} layers, "
        f"{name_of(plan.dtype)}\n"
        f"GPU      {_gib(gpu.total_bytes)} GiB ({found}), for trainer and server\n"
        f"server   {_gib(plan.utilization * gpu.total_bytes)} GiB by --gpu-memory-utilization "
        f"{plan.utilization:g}; it needs {_gib(server.least_bytes)} GiB or more:\n"
        f"         weights {_gib(server.weights_bytes)}, keys and values of one sequence "
        f"{_gib(server.kv_bytes)}, engine {_gib(SERVER_RESERVE_BYTES)} (estimated)\n"
        f"trainer  the table's KEPT + WORK, and {_gib(TRAINER_RESERVE_BYTES)} GiB for CUDA "
        "(estimated)\n"
    )


def _table(plan: MemoryPlan) -> str:
    rows = [_cells(plan, one) for one in plan.combinations]
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *rows, strict=True)]
    return "".join(_line(cells, widths) for cells in (_HEADINGS, *rows))


def _cells(plan: MemoryPlan, one: Combination) -> list[str]:
    kept, trainee = one.kept, one.trainee
    trained = sum(p.numel() for p in trainee.policy.parameters() if p.requires_grad)
    whole = sum(p.numel() for p in trainee.policy.parameters())
    parts = [kept.masters, kept.gradients, kept.moments]
    return [
        ">" if one is plan.chosen else "",
        "lora_*" if trainee.is_adapter else trainee.modes,
        trainee.layers,
        one.optimizer,
        one.master_dtype,
        *(f"{part / trained:.2f}" for part in parts),
        f"{kept.weights / whole:.2f}",
        _gib(kept.total),
        _gib(one.working_bytes[False]),
        _fits(plan, one, False),
        _gib(one.working_bytes[True]),
        _fits(plan, one, True),
    ]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    aligned = [
        cell.ljust(width) if column < _TEXT_COLUMNS else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return " ".join(aligned).rstrip() + "\n"


def _fits(plan: MemoryPlan, one: Combination, is_recomputed: bool) -> str:
    usable = plan.usable_utilization(one, is_recomputed)
    if usable is None:
        return "no"
    return "yes" if usable == plan.utilization else f"{usable:.2f}"


def _gradients(plan: MemoryPlan) -> str:
    width = plan.dtype.itemsize
    return (
        f"GRAD is 4 with several micro-batches per step, {width} with "
        "--gradient-accumulation-steps 1.\n"
    )


def _verdict(plan: MemoryPlan) -> str:
    one = plan.chosen
    is_recomputed = plan.is_recomputed
    total = plan.gpu.total_bytes
    needed = one.needed(is_recomputed) + TRAINER_RESERVE_BYTES
    fits = _fits(plan, one, is_recomputed)
    result = {
        "yes": "They fit.",
        "no": "They do not fit.",
    }.get(fits, f"They fit with --gpu-memory-utilization {fits}.")
    return (
        f"These options (>): trainer {_gib(needed)} GiB + server "
        f"{_gib(plan.utilization * total)} GiB of {_gib(total)} GiB. {result}\n"
    ) + "".join(_suggestion(plan))


def _suggestion(plan: MemoryPlan) -> Iterator[str]:
    """The first combination that trains the whole model and leaves the server the most memory."""
    fitting = [
        (usable, -is_recomputed, -index, one)
        for index, one in enumerate(plan.combinations)
        if one.trainee.layers == WHOLE
        for is_recomputed in (False, True)
        if (usable := plan.usable_utilization(one, is_recomputed)) is not None
    ]
    if not fitting:
        yield "The whole model does not fit; train some layers or an adapter.\n"
        return
    usable, recomputed, _, one = max(fitting, key=lambda found: found[:3])
    first = f"--mode {one.trainee.modes} --optimizer {one.optimizer}"
    yield f"The whole model fits, for example, with {first}\n"
    yield f"--master-dtype {one.master_dtype} --gpu-memory-utilization {usable:g}"
    yield " --gradient-checkpointing\n" if recomputed else "\n"


def _gib(count: float) -> str:
    size = count / GIB
    return f"{size:.1f}" if size >= 0.1 else f"{size:.3f}"
