"""AdamW on fp32 masters in one pass over memory (`--fused-step`); the kernel is `fused_kernel`.

The kernel writes the rounded weights into the staging copy, not into what is served. A step on
served weights would have to lie inside the pause: it moves 30 bytes per weight there, where the
copy of what is staged moves 4. And a write can be repeated on a server that came back, a step not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_trainer.optim.updates.adamw import EXP_AVG, EXP_AVG_SQ, AdamW32
from grpo_trainer.optim.updates.base import BETA1, BETA2, EPS, STEP, Pace, State
from grpo_trainer.optim.updates.fused_kernel import adamw_kernel

BLOCK = 1024


class FusedAdamW:
    """Its state is that of `AdamW32`: a run may go on with either."""

    dtype = torch.float32

    def __init__(self) -> None:
        self._plain = AdamW32()

    def begin(self, step: int) -> None:
        pass

    def initial_state(self, master: Tensor) -> State:
        return self._plain.initial_state(master)

    def adopted(self, saved: State, master: Tensor) -> State:
        return self._plain.adopted(saved, master)

    def take(
        self, master: Tensor, gradient: Tensor, state: State, pace: Pace, served: torch.dtype
    ) -> Tensor | None:
        low = None if served == master.dtype else torch.empty_like(master, dtype=served)
        state[STEP] += 1
        steps, count = float(state[STEP]), master.numel()
        with torch.cuda.device_of(master):  # type: ignore[no-untyped-call]
            adamw_kernel[(-(-count // BLOCK),)](
                master,
                state[EXP_AVG],
                state[EXP_AVG_SQ],
                gradient.contiguous(),
                master if low is None else low,
                count,
                pace.gradient_scale,
                pace.lr * pace.weight_decay,
                pace.lr / (1 - BETA1**steps),
                (1 - BETA2**steps) ** 0.5,
                BETA1=BETA1,
                BETA2=BETA2,
                EPS=EPS,
                WRITES_LOW=low is not None,
                BLOCK=BLOCK,
            )
        return low
