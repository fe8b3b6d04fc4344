"""Errors that end a training run.

GrpoError (grpo_core)
├── StateError          the run cannot resume from a checkpoint: NoSuchState, DamagedState,
│                       StateMismatch, StateOfAnotherRun, LostBatches, NewerState
├── NonFiniteStep       the step is impossible: NonFiniteLoss, NonFiniteGradient
├── WeightSyncError     trainer and server do not hold the same weights: PolicyMismatch,
│                       UnreachableWeights, MovedParameters, TornWeights, LostServer, EngineCrashed,
│                       WeightsRefused, NotPublished, ServedWeightsDiffer
└── all others
"""

from __future__ import annotations

from enum import StrEnum

from grpo_core.errors import GrpoError

NO_INFERENCE_LOGPROBS = """\
GRPO requires inference_logprobs for importance sampling!

Group {index} of the batch (env_id {env_id}) has none. To fix:
  1. run the environment with --openai.server_type vllm (not "openai")
  2. check that the inference server returns logprobs on /generate
  3. check that the environment copies them into inference_logprobs
Or pass --recompute-logprobs to the trainer, which then cannot correct or check the sampling."""


EXIT_FAILED, EXIT_LOST = 1, 75
"""Exit statuses. The second one: another rank was lost; a new start of all ranks may go well."""


class UnusableReason(StrEnum):
    """Why a scored group cannot be trained on. Log events use these names."""

    NO_LOGPROBS = "no_inference_logprobs"
    POSITIVE_LOGPROBS = "positive_inference_logprobs"
    SAMPLING = "truncated_sampling"
    TEMPERATURE = "temperature"
    UNKNOWN_TOKEN = "unknown_token"
    MASKS = "masks_against_tokens"
    ADVANTAGES = "advantages_against_tokens"
    PROMPT_TRAINED = "prompt_trained_on"
    TRAINED_AFTER_END = "trained_after_end_token"
    NOTHING_TRAINED = "nothing_trained_on"
    CUT_OFF = "cut_off_by_seq_len"
    NO_TEACHER = "no_teacher_logprobs"
    UNPUBLISHED = "weights_of_no_trainer"


class UnusableGroup(GrpoError):
    """A scored group cannot be trained on."""

    def __init__(self, reason: UnusableReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class DuplicatedBatch(GrpoError):
    """All groups of a batch were already in one earlier batch."""


class RolloutMismatch(GrpoError):
    """A group is not what the server sampled: it differs from its receipts, or its behaviour
    logprobs contradict its tokens, policy version or temperature."""


class SelfTestFailed(GrpoError):
    """Before the first step, a training step without an update gave wrong results."""


class UnusableSavePath(GrpoError):
    """`--save-path` cannot be written, or another trainer uses it."""


class CheckpointNotSaved(GrpoError):
    """A model or a checkpoint could not be written. Earlier checkpoints are intact."""


class NotReplayable(GrpoError):
    """A step cannot be computed again: its batch, or a checkpoint before it, is missing."""


class MetricsNotWritten(GrpoError):
    """`--metrics-file` could not be written."""


class StateError(GrpoError):
    """The run cannot resume from a checkpoint."""


class NoSuchState(StateError):
    """`--resume` names a directory without a checkpoint."""


class DamagedState(StateError):
    """Files of a checkpoint are missing or have changed since they were written."""


class StateMismatch(StateError):
    """The checkpoint has another model, weight-sync mode, adapter or optimizer than the command
    line."""


class StateOfAnotherRun(StateError):
    """The checkpoint does not belong to the run that run-api stores."""


class NewerState(StateError):
    """The checkpoint was written by a newer release, which this one cannot read."""


class LostBatches(StateError):
    """Redis has lost the newest batches that the checkpoint includes."""


class MissingPackage(GrpoError):
    """An option needs a package that is not installed. The message shows the install command."""


class FunctionUnusable(GrpoError):
    """The user's own loss or advantage cannot be loaded, or fails on a small batch."""


class FastPathRefused(GrpoError):
    """The model does not support an option for faster training. The message gives the reason."""


class UnusableOptimizer(GrpoError):
    """The optimizer's options do not fit the weights or the trainer's device."""


class NoInferenceServer(GrpoError):
    """No inference server answers, or the server that grpo started has ended."""


class NoEnvironmentLeft(GrpoError):
    """All environments left the run. None came back within `--environment-return-deadline-s`."""


class StaleData(GrpoError):
    """Every group that arrived within `--batch-deadline-s` exceeded `--max-staleness`."""


class NonFiniteStep(GrpoError):
    """The loss or the gradient of a step is not finite. No weight was changed."""


class NonFiniteLoss(NonFiniteStep):
    """The loss is NaN or infinite, so a step would make every weight NaN."""


class NonFiniteGradient(NonFiniteStep):
    """The gradient norm is NaN or infinite."""


class UnsupportedModel(GrpoError):
    """The model is an adapter, needs code of its own, or is no causal language model."""


class LostRank(GrpoError):
    """Another trainer process (rank) ended, or did not answer within `--rank-deadline-s`."""

    is_final = False
    """The other one ended by an error of its own, which would only come again."""


class PolicyDiverged(GrpoError):
    """For several batches in a row, the loss or the gradient was NaN or infinite."""


class WeightSyncError(GrpoError):
    """Trainer and inference server do not hold the same weights."""


class PolicyMismatch(WeightSyncError):
    """The models of server and trainer have different parameters, by name, shape or data type. The
    message lists the differences."""


class UnreachableWeights(WeightSyncError):
    """The trainer cannot map the server's GPU memory. The message lists all reasons."""


class MovedParameters(WeightSyncError):
    """Model parameters have left the shared memory. The message lists these parameters."""


class TornWeights(WeightSyncError):
    """An update of the served weights may be incomplete."""


class LostServer(WeightSyncError):
    """No inference server has served for `--server-return-deadline-s`."""


class SourcePortTaken(GrpoError):
    """The trainer cannot open the port on which it serves weights to the inference servers."""


class EngineCrashed(WeightSyncError):
    """The server's engine crashed twice while the trainer waited for the answer to one request."""


class WeightsRefused(WeightSyncError):
    """Every server refuses the new weights and keeps serving the previous weights."""


class NotPublished(WeightSyncError):
    """No server served the new weights within `--publish-deadline-s`."""


class ServedWeightsDiffer(WeightSyncError):
    """The server's logprobs do not match the trainer's weights."""
