"""Builds the optimizer that the settings select."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import structlog
import torch
from torch import Tensor

from grpo_trainer.config.optimizer import OptimizerName
from grpo_trainer.config.packages import BITSANDBYTES, BITSANDBYTES_PIN
from grpo_trainer.config.trainer import TrainerSettings
from grpo_trainer.errors import MissingPackage, UnusableOptimizer
from grpo_trainer.model.adapter import trained_parameters
from grpo_trainer.model.policy_protocol import CausalLM
from grpo_trainer.optim.adafactor import Adafactor
from grpo_trainer.optim.adamw import Adam, AdamW8bit, AdamW32, UpdateRule
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.optim.masters import Masters, StochasticRounding
from grpo_trainer.optim.schedule import Schedule

log = structlog.get_logger()


def build_optimizer(
    policy: CausalLM,
    settings: TrainerSettings,
    kind: Callable[..., MasterOptimizer] = MasterOptimizer,
) -> MasterOptimizer:
    """Raises the errors of `build_update`. Args: kind: creates the object"""
    parameters = list(trained_parameters(policy).values())
    return kind(
        parameters,
        learning_rate=Schedule.of(settings, settings.steps),
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        update=build_update(settings, parameters),
        # Even an adapter in float32 needs it, because its gradients pass through a float16 model.
        scales_loss=any(p.dtype == torch.float16 for p in policy.parameters()),
        adam=Adam(settings.adam_beta1, settings.adam_beta2, settings.adam_eps),
    )


def build_update(settings: TrainerSettings, parameters: Sequence[Tensor]) -> Masters:
    """Args: parameters: all trained parameters, on one device.

    Raises:
        UnusableOptimizer: the weights or their device do not fit the options.
        MissingPackage: the device's default optimizer needs a package that is not installed.
    """
    device = parameters[0].device
    rule = _rule(settings.optimizer_on(device.type), device)
    if settings.master_dtype == "float32":
        return Masters(rule)
    _require_bfloat16(parameters)
    return Masters(rule, torch.bfloat16, _rounding(settings, device))


def _rule(name: OptimizerName, device: torch.device) -> UpdateRule:
    if name == "adafactor":
        return Adafactor()
    if name == "adamw":
        return AdamW32(fused=device.type == "cuda")
    if find_spec(BITSANDBYTES) is None:
        raise MissingPackage(
            f"--optimizer adamw_8bit, the default on a GPU, needs the package {BITSANDBYTES}: "
            f"run pip install {BITSANDBYTES_PIN}, or pass another --optimizer"
        )
    return AdamW8bit(device)


def _rounding(settings: TrainerSettings, device: torch.device) -> StochasticRounding | None:
    if settings.rounding != "nearest":
        return StochasticRounding(settings.seed, device)
    log.warning(
        "rounding.loses_updates",
        lr=settings.lr,
        reason="--rounding nearest loses updates that are too small for bfloat16: of 1,000 "
        "weights, a step changes about 5 at a learning rate of 1e-6, 35 at 1e-5, and 270 at 1e-4",
        hint="pass --rounding stochastic, or --master-dtype float32",
    )
    return None


def _require_bfloat16(parameters: Sequence[Tensor]) -> None:
    others = Counter(p.dtype for p in parameters if p.dtype != torch.bfloat16)
    if others:
        found = " and ".join(
            f"{str(dtype).removeprefix('torch.')} ({count} of {len(parameters)} tensors)"
            for dtype, count in others.items()
        )
        raise UnusableOptimizer(
            f"--master-dtype bfloat16: the weights are in {found}, and bfloat16 would lose part of "
            "their precision; pass --master-dtype float32, or serve the model in bfloat16"
        )
