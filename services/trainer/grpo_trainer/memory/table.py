"""Shows a memory plan as text, in at most 100 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from grpo_trainer.memory.plan import (
    GIB,
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
WORK: GiB of activations, logits and buffers in the trainer for a micro-batch of {tokens:,} tokens
(--tokens-per-micro-batch), estimated. Shorter micro-batches need less.
{fits}
*: with --gradient-checkpointing.
"""
_FITS_ON_GPU = (
    "FITS: yes, or the largest --gpu-memory-utilization with which server and trainer fit on the "
    "GPU."
)
_FITS_ON_HOST = (
    "FITS: whether server and trainer fit into this host's memory, if --kv-cache-memory-bytes "
    "limits\nthe server: without it, vLLM takes 92 % of the memory."
)


def text_of(plan: MemoryPlan) -> str:
    legend = _LEGEND.format(
        tokens=plan.micro_batch_tokens,
        fits=_FITS_ON_GPU if plan.machine.is_gpu else _FITS_ON_HOST,
    )
    return "\n".join([_head(plan), _table(plan), legend + _gradients(plan), _verdict(plan)])


def _head(plan: MemoryPlan) -> str:
    machine, server = plan.machine, plan.server
    weights = sum(p.numel() for p in plan.combinations[0].trainee.policy.parameters())
    total, least = _gib(machine.total_bytes), _gib(server.least_bytes)
    if machine.is_gpu:
        found = machine.name or "no GPU found, so this size is assumed"
        place = f"GPU      {total} GiB ({found}), for trainer and server\n"
        share = (
            f"{_gib(_server_bytes(plan))} GiB by --gpu-memory-utilization {plan.utilization:g}; it "
            f"needs {least} GiB or more"
        )
        rest = "for CUDA (estimated)"
    else:
        place = f"memory   {total} GiB of this host, for trainer and server\n"
        share = f"{least} GiB"
        rest = "for Python and its packages"
    return (
        f"model    {plan.model}: {weights / 1e9:.3g} billion weights, {plan.layers} layers, "
        f"{name_of(plan.dtype)}\n"
        f"{place}"
        f"server   {share}:\n"
        f"         weights {_gib(server.weights_bytes)}, keys and values of one sequence "
        f"{_gib(server.kv_bytes)}, engine {_gib(server.reserve_bytes)} (estimated)\n"
        f"trainer  the table's KEPT + WORK, and {_gib(machine.trainer_reserve)} GiB {rest}\n"
    )


def _server_bytes(plan: MemoryPlan) -> float:
    """What the server takes: on a GPU its share, even if it needs less."""
    if plan.machine.is_gpu:
        return plan.utilization * plan.machine.total_bytes
    return plan.server.least_bytes


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
    needed = plan.chosen.needed(plan.is_recomputed) + plan.machine.trainer_reserve
    fits = _fits(plan, plan.chosen, plan.is_recomputed)
    result = {
        "yes": "They fit.",
        "no": "They do not fit.",
    }.get(fits, f"They fit with --gpu-memory-utilization {fits}.")
    return (
        f"These options (>): trainer {_gib(needed)} GiB + server {_gib(_server_bytes(plan))} GiB "
        f"of {_gib(plan.machine.total_bytes)} GiB. {result}\n"
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
    yield f"--master-dtype {one.master_dtype}"
    if plan.machine.is_gpu:
        yield f" --gpu-memory-utilization {usable:g}"
    yield " --gradient-checkpointing\n" if recomputed else "\n"


def _gib(count: float) -> str:
    size = count / GIB
    return f"{size:.1f}" if size >= 0.1 else f"{size:.3f}"
