"""The side of the ranks above 0: they do what the leader does, as its messages say."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace

import structlog
import torch

from grpo_trainer.config.trainer import TrainerSettings
from grpo_trainer.errors import LostRank, NonFiniteStep
from grpo_trainer.model.adapter import adapter_dropouts, trained_parameters
from grpo_trainer.model.forward import build_forward_pass
from grpo_trainer.model.loading import TrainedWeights, device_to_load_on
from grpo_trainer.model.policy import CausalLM, train_only
from grpo_trainer.ranks.group import LEADER, Ranks
from grpo_trainer.ranks.joint import Joint
from grpo_trainer.ranks.lead import DTYPES, OPTIMIZERS, build_joint, share_weights
from grpo_trainer.ranks.messages import Command, Message, receive, receive_batch

log = structlog.get_logger()


def follow(settings: TrainerSettings, ranks: Ranks) -> None:
    """Compute this rank's share of every step, until the leader ends the run.

    Args:
        settings: those of the leader

    Raises:
        LostRank: another process ended before the run.
    """
    log.info("rank.joined", rank=ranks.index, ranks=ranks.count)
    message = receive(ranks)
    if message.command is Command.STOP:
        return
    _require(message.command is Command.LOAD_MODEL, message)
    follower = _Follower(ranks, settings, message)
    while (message := receive(ranks)).command is not Command.STOP:
        follower.obey(message)


class _Follower:
    def __init__(self, ranks: Ranks, settings: TrainerSettings, message: Message) -> None:
        dtype, optimizer, *_ = message.numbers
        self.ranks = ranks
        self.settings = settings.model_copy(update={"optimizer": OPTIMIZERS[int(optimizer)]})
        policy = self._loaded(DTYPES[int(dtype)])
        share_weights(ranks, policy)
        if settings.trained_layers is not None:
            train_only(policy, settings.trained_layers)
        forward = build_forward_pass(
            policy, settings, differentiates_entropy=settings.entropy_coef > 0
        )
        self.joint: Joint = build_joint(ranks, policy, forward, self.settings, _nobody)
        self.dropouts = adapter_dropouts(policy)
        self.names = list(trained_parameters(self.joint.policy))

    def _loaded(self, dtype: torch.dtype) -> CausalLM:
        weights = TrainedWeights(self.settings.model, self.settings.lora)
        return weights.load(dtype, device_to_load_on(self.settings.device)).eval()

    def obey(self, message: Message) -> None:
        optimizer, (step, kl_coef, maxent_tau, dropout) = self.joint.optimizer, message.numbers
        match message.command:
            case Command.LOAD_STATE:
                optimizer.load_tensors(self.names, {})
            case Command.COLLECT_STATE:
                optimizer.tensors(self.names)
            case Command.COMPARE:
                self.joint.reference_logprobs(receive_batch(self.ranks))
            case Command.GRADIENTS:
                objective = replace(
                    self.settings.resolved_objective, kl_coef=kl_coef, maxent_tau=maxent_tau
                )
                self._seed(int(step))
                for module in self.dropouts:
                    module.p = dropout
                # The leader has the same error, and decides.
                with contextlib.suppress(NonFiniteStep):
                    self.joint.gradients(receive_batch(self.ranks), objective, int(step))
            case Command.STEP:
                with contextlib.suppress(NonFiniteStep):
                    optimizer.step(int(step))
            case Command.WRITE:
                optimizer.write_into_parameters()
            case _:
                _require(False, message)

    def _seed(self, step: int) -> None:
        """The random numbers of dropout follow from seed, step and rank: no checkpoint has them."""
        text = f"{self.settings.seed}/{step}/{self.ranks.index}"
        torch.manual_seed(random.Random(text).getrandbits(63))


def _nobody(*_: float) -> None:
    """A follower tells nothing."""


def _require(is_right: bool, message: Message) -> None:
    if not is_right:
        raise LostRank(
            f"rank {LEADER} sent {message.command.name} out of order; start all trainer processes "
            "with the same version of grpo and the same options"
        )
