"""Options of the objective. One names a preset, and each of the others overrides a part of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated

from pydantic import BaseModel, Field, ValidationInfo, field_validator

from grpo_core.settings import Mistake, Shown
from grpo_core.tree.objectives import (
    ADVANTAGES,
    LOSSES,
    AggregationName,
    CorrectionName,
    KlControlName,
    KlEstimatorName,
    KlPlace,
    Level,
    Objective,
    ObjectiveName,
    resolved,
)

BY_PRESET = Shown(default="that of --objective")


class ObjectiveOptions(BaseModel, frozen=True):
    """What a step minimises."""

    objective: ObjectiveName = Field(
        "grpo",
        description="Named preset that sets the options below it; each of them can be overridden",
    )
    advantage: Annotated[str | None, BY_PRESET] = Field(
        None,
        description="How advantages follow from scores. group_std: the distance to the group's "
        "mean, divided by the group's standard deviation. group_mean: not divided. leave_one_out: "
        "the distance to the mean of the group's other scores. batch_std: the distance to the "
        "batch's mean, divided by the batch's standard deviation. maxent: the weights of "
        "MaxEnt-GRPO, see --maxent-tau. Or FILE.py:FUNCTION, your own function of the scores of a "
        "batch's groups. Advantages that an environment sends have priority",
    )
    overlong_buffer: Annotated[float | None, Shown(default="0; 0.2 for dapo")] = Field(
        None,
        ge=0,
        lt=1,
        description="Last part of the longest allowed completion, as a fraction of it, in which a "
        "completion's score loses up to 1, in proportion to its length. Adds to the same penalty "
        "in --reward-weights, overlong: use one of the two",
    )
    reward_coef: Annotated[float | None, Shown(default="1; 0 for distill")] = Field(
        None,
        ge=0,
        description="Factor of the advantages that follow from scores, beside those of "
        "--distill-coef. 0: rewards are only measured",
    )
    distill_coef: Annotated[float | None, Shown(default="0; 1 for distill")] = Field(
        None,
        ge=0,
        description="Weight of the teacher's advantages: each token's advantage gains this number "
        "times the teacher's logprob minus the student's. The environment needs --teacher-url",
    )
    loss: Annotated[str | None, BY_PRESET] = Field(
        None,
        description="How importance ratio and advantage form the loss. clip: PPO's clipped "
        "surrogate. cispo: the clipped ratio is a constant factor of the token's logprob. "
        "reinforce: so is the ratio, which is not clipped. likelihood: the logprob without a "
        "ratio. Or FILE.py:FUNCTION, your own function of the tokens",
    )
    clip_eps: Annotated[float | None, Shown(default="that of --objective; 0.2 for grpo")] = Field(
        None,
        gt=0,
        lt=1,
        description="Clipping range: importance ratios below 1 minus this number are clipped, and "
        "so are those above 1 plus --clip-eps-high",
    )
    clip_eps_high: Annotated[
        float | None, Shown(default="that of --objective; --clip-eps if it has none")
    ] = Field(None, gt=0, description="Upper part of the clipping range; see --clip-eps")
    importance_level: Annotated[Level | None, BY_PRESET] = Field(
        None,
        description="Importance ratio that is clipped: of each token, or the geometric mean of "
        "those of a sequence",
    )
    importance_correction: Annotated[CorrectionName | None, BY_PRESET] = Field(
        None,
        description="What happens to tokens whose importance ratio is above "
        "--importance-correction-cap. truncate: the ratio counts as the cap. mask: the tokens are "
        "not trained on. none: nothing",
    )
    importance_correction_level: Annotated[Level | None, Shown(default="token")] = Field(
        None,
        description="Importance ratio that is compared with the cap: of each token, or the product "
        "over a sequence, whose tokens are then truncated or masked together",
    )
    importance_correction_cap: Annotated[float | None, Shown(default="3")] = Field(
        None, ge=1, description="Largest importance ratio that --importance-correction leaves alone"
    )
    recompute_logprobs: bool = Field(
        False,
        description="Train also on groups without usable logprobs: those without "
        "inference_logprobs, and those sampled with top_p, top_k, min_p or penalties. The "
        "trainer's own logprobs from before the update take their place, so their importance "
        "ratios are 1, and nothing corrects or checks how the tokens were sampled",
    )
    aggregation: Annotated[AggregationName | None, BY_PRESET] = Field(
        None,
        description="How the losses of tokens add up. sequence: mean over each sequence's tokens, "
        "then over sequences. token: mean over all tokens. constant: sum over all tokens, divided "
        "by the number of sequences and by --aggregation-tokens",
    )
    aggregation_tokens: Annotated[int | None, Shown(default="--seq-len")] = Field(
        None, ge=1, description="Divisor of --aggregation constant, in tokens"
    )

    entropy_coef: float = Field(
        0.0,
        ge=0,
        description="Weight of the entropy bonus: the mean entropy of the policy's next-token "
        "distributions in nats, times this number, is subtracted from the loss",
    )

    kl_coef: float = Field(
        0.0,
        ge=0,
        description="Weight of the penalty for the KL divergence from the reference model, which "
        "is --model before training. 0: no penalty and no reference model. In the LoRA modes the "
        "reference model needs no memory, in the others a second copy of the weights",
    )
    reference_model: Annotated[str | None, Shown(default="--model")] = Field(
        None,
        min_length=1,
        description="Another reference model with the same tokenizer: a directory or an id on the "
        "Hugging Face hub. It is a copy of its own, in the LoRA modes too",
    )
    kl_estimator: Annotated[KlEstimatorName | None, BY_PRESET] = Field(
        None, description="Estimator of the KL divergence from a sampled token"
    )
    kl_in: Annotated[KlPlace | None, BY_PRESET] = Field(
        None,
        description="Where the penalty is: in the loss of each token, in the score of each "
        "completion, or, for --advantage maxent, in the weights of a group's completions",
    )
    kl_control: KlControlName = Field(
        "fixed",
        description="How the weight of the penalty follows the KL divergence. adaptive: in "
        "proportion to the distance from --kl-target",
    )
    kl_target: Annotated[float | None, Shown(default="none")] = Field(
        None, gt=0, description="Mean KL divergence per token for --kl-control, in nats"
    )
    kl_horizon: int = Field(
        10_000,
        ge=1,
        description="Number of sequences over which an adaptive weight follows the KL divergence",
    )

    maxent_tau: float | None = Field(
        None,
        ge=0,
        description="For --objective maxent. A completion's weight in its group is "
        "softmax((log q + beta l) / (tau + beta)): q follows from its score, l is its "
        "log-likelihood under the reference model, beta is --kl-coef, and this is tau",
    )
    maxent_q_temperature: Annotated[float | None, Shown(default="1")] = Field(
        None, gt=0, description="Temperature of q, which is softmax(score / temperature)"
    )
    maxent_q_epsilon: Annotated[float | None, Shown(default="1e-6")] = Field(
        None, gt=0, le=0.001, description="Least value of q"
    )
    maxent_length_normalize_ref: Annotated[bool | None, Shown(default="on")] = Field(
        None, description="Divide l by the number of the completion's tokens"
    )
    maxent_target_entropy: Annotated[float | None, Shown(default="none")] = Field(
        None,
        gt=0,
        description="Mean entropy of a group's weights in nats, to which tau is driven from "
        "--maxent-tau on. At most the logarithm of the group size can be reached",
    )
    maxent_tau_lr: float = Field(
        0.01, gt=0, description="Change of log tau per step, for a distance of one nat"
    )
    maxent_tau_warmup_steps: int = Field(
        0, ge=0, description="First steps, in which tau does not change"
    )

    @field_validator("advantage", "loss")
    @classmethod
    def _is_known(cls, value: str | None, info: ValidationInfo) -> str | None:
        names = ADVANTAGES if info.field_name == "advantage" else LOSSES
        if value is None or value in names or re.fullmatch(r".+\.py:\w+", value):
            return value
        raise ValueError(f"expected {', '.join(names)}, or FILE.py:FUNCTION")

    @property
    def resolved_objective(self) -> Objective:
        """The preset with the parts that were given."""
        names = (part.name for part in fields(Objective))
        return resolved(self.objective, {name: getattr(self, name) for name in names})

    def objective_conflicts(self) -> Iterator[Mistake]:
        """Options that exclude each other."""
        whole = self.resolved_objective
        if (self.kl_target is None) != (self.kl_control == "fixed"):
            problem = "is required by" if self.kl_target is None else "has no effect on"
            yield Mistake("kl_target", f"{problem} --kl-control {self.kl_control}")
        if not self.kl_coef:
            for name in ("kl_estimator", "kl_in", "kl_control", "reference_model"):
                if getattr(self, name) != _default(name):
                    yield Mistake(name, "has no effect without --kl-coef")
        if self.recompute_logprobs and self.kl_coef and whole.kl_in == "reward":
            yield Mistake("recompute_logprobs", "excludes --kl-in reward, which needs logged ones")
        if self.kl_horizon != _default("kl_horizon") and self.kl_control != "adaptive":
            yield Mistake("kl_horizon", f"has no effect on --kl-control {self.kl_control}")
        if whole.importance_correction == "truncate" and whole.loss == "cispo":
            problem = "truncate is what --loss cispo does itself; pass none or mask"
            yield Mistake("importance_correction", problem)
        if whole.importance_correction == "truncate" and whole.importance_level == "sequence":
            problem = "truncate does not fit --importance-level sequence; pass none or mask"
            yield Mistake("importance_correction", problem)
        yield from self._distill_conflicts(whole)
        yield from self._maxent_conflicts(whole)
        if whole.loss == "likelihood":
            if whole.importance_correction != "none":
                yield Mistake("importance_correction", "must be none with --loss likelihood")
            if self.importance_level is not None:
                yield Mistake("importance_level", "has no effect on --loss likelihood")
        if self.aggregation_tokens is not None and whole.aggregation != "constant":
            yield Mistake("aggregation_tokens", "needs --aggregation constant")
        if self.clip_eps is not None and whole.loss in ("cispo", "reinforce", "likelihood"):
            yield Mistake("clip_eps", f"has no effect on --loss {whole.loss}")
        if self.clip_eps_high is not None and whole.loss in ("reinforce", "likelihood"):
            yield Mistake("clip_eps_high", f"has no effect on --loss {whole.loss}")
        if whole.importance_correction == "none":
            for name in ("importance_correction_level", "importance_correction_cap"):
                if getattr(self, name) is not None:
                    yield Mistake(name, "has no effect, because --importance-correction is none")

    def _distill_conflicts(self, whole: Objective) -> Iterator[Mistake]:
        if not whole.distill_coef:
            if whole.reward_coef != 1:
                yield Mistake("reward_coef", "has no effect without --distill-coef")
            return
        if whole.advantage == "maxent":
            yield Mistake("distill_coef", "does not fit --advantage maxent")
        if self.recompute_logprobs:
            problem = "excludes --distill-coef, which compares the logged ones with the teacher's"
            yield Mistake("recompute_logprobs", problem)

    def _maxent_conflicts(self, whole: Objective) -> Iterator[Mistake]:
        if whole.advantage != "maxent":
            for name in ObjectiveOptions.model_fields:
                if name.startswith("maxent_") and getattr(self, name) != _default(name):
                    yield Mistake(name, f"has no effect on --advantage {whole.advantage}")
            if whole.kl_in == "weights":
                yield Mistake("kl_in", "weights needs --advantage maxent")
            return
        if whole.loss != "likelihood":
            yield Mistake("loss", "must be likelihood with --advantage maxent")
        if whole.kl_in == "reward":
            yield Mistake("kl_in", "reward does not fit --advantage maxent; pass weights or loss")
        if not whole.maxent_tau and not (self.kl_coef and whole.kl_in == "weights"):
            yield Mistake(
                "maxent_tau", "must be above 0, unless --kl-coef is, with --kl-in weights"
            )
        if whole.aggregation != "sequence":
            yield Mistake("aggregation", "must be sequence with --advantage maxent")
        has_prior = bool(self.kl_coef) and whole.kl_in == "weights"
        if self.maxent_length_normalize_ref is not None and not has_prior:
            problem = "has no effect without --kl-coef and --kl-in weights"
            yield Mistake("maxent_length_normalize_ref", problem)
        if self.kl_estimator is not None and has_prior:
            yield Mistake("kl_estimator", "has no effect on --kl-in weights")
        if self.maxent_target_entropy is not None and not whole.maxent_tau:
            yield Mistake("maxent_target_entropy", "needs --maxent-tau above 0, where tau begins")
        if self.maxent_target_entropy is None:
            for name in ("maxent_tau_lr", "maxent_tau_warmup_steps"):
                if getattr(self, name) != _default(name):
                    yield Mistake(name, "has no effect without --maxent-target-entropy")


def _default(name: str) -> object:
    return ObjectiveOptions.model_fields[name].default
