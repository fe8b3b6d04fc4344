"""Errors that end a training run.

GrpoError (grpo_core)
├── UnusableGroup           a scored group lacks what GRPO needs, or carries what breaks it
├── DuplicatedBatch         a batch was handed out that had been trained on
├── RolloutMismatch         completions were not sampled the way their group says
├── UnusableSavePath        the trained model would have nowhere to go
├── CheckpointNotSaved      a model or a state could not be written: the disk is full, or the like
├── StateError              a saved state cannot be gone on from
│   ├── NoSuchState         --resume names a directory that holds none
│   ├── DamagedState        its files are not what was written
│   ├── StateMismatch       it is of another model, mode, adapter or optimizer
│   └── StateOfAnotherRun   the run at run-api is not the one that it was saved in
├── MissingPackage          an option needs a package that is not installed
├── NoSuchDevice            --device or --vllm-gpu names a GPU that this process does not see
├── FastPathRefused         a faster way of computing was asked for that the model does not allow
├── UnusableOptimizer       the weights, or their device, do not go with the optimizer's options
├── NoInferenceServer       nothing answers at the server's URL; says what to start
├── NoEnvironmentLeft       every environment of the run has left, and none came back
├── StaleData               every batch that comes is older than --max-staleness
├── WandbUnavailable        Weights & Biases was asked for and does not start
├── NonFiniteStep           a step cannot be taken; no weight was changed
│   ├── NonFiniteLoss       the loss of a micro-batch is NaN or infinite
│   └── NonFiniteGradient   the gradient norm of a step is NaN or infinite
├── PolicyDiverged          no step could be taken on several batches in a row
└── WeightSyncError         trainer and server do not hold the same weights
    ├── PolicyMismatch      the server's parameters do not fit the trainer's model
    ├── UnreachableWeights  the server's weights are on a GPU, and this process cannot open them
    ├── MovedParameters     parameters left the memory they share with the server
    ├── TornWeights         the server may hold half an update of an earlier trainer
    ├── LostServer          the server is gone
    ├── WeightsRefused      the server takes no such weights
    ├── NotPublished        the server did not come to serve new weights in time
    └── ServedWeightsDiffer the server answers with other weights than the trainer's
"""

from __future__ import annotations

from enum import StrEnum

from grpo_core.errors import GrpoError

NO_INFERENCE_LOGPROBS = """\
GRPO requires inference_logprobs for importance sampling!

Group {index} of the batch (env_id {env_id}) carries none. To fix:
  1. run the environment with --openai.server_type vllm (not "openai")
  2. check that the inference server returns logprobs on /generate
  3. check that the environment copies them into inference_logprobs"""


class UnusableReason(StrEnum):
    """Why a scored group cannot be trained on."""

    NO_LOGPROBS = "no_inference_logprobs"
    POSITIVE_LOGPROBS = "positive_inference_logprobs"
    SAMPLING = "truncated_sampling"
    TEMPERATURE = "temperature"
    UNKNOWN_TOKEN = "unknown_token"
    MASKS = "masks_against_tokens"
    PROMPT_TRAINED = "prompt_trained_on"
    NOTHING_TRAINED = "nothing_trained_on"
    CUT_OFF = "cut_off_by_seq_len"


class UnusableGroup(GrpoError):
    """A scored group cannot be trained on."""

    def __init__(self, reason: UnusableReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class DuplicatedBatch(GrpoError):
    """A batch whose groups were all in one earlier batch of this process."""


class RolloutMismatch(GrpoError):
    """The logged log-probabilities are not those of the weights, tokens and temperature that the
    group names."""


class UnusableSavePath(GrpoError):
    """The directory for checkpoints cannot be written, or another trainer writes there."""


class CheckpointNotSaved(GrpoError):
    """A model or a state could not be written. What was saved before is intact."""


class StateError(GrpoError):
    """A saved state cannot be gone on from."""


class NoSuchState(StateError):
    """`--resume` names a directory without a state."""


class DamagedState(StateError):
    """Files of a state are missing or are not what was written."""


class StateMismatch(StateError):
    """A state of another model, mode, adapter or optimizer. Lists every difference."""


class StateOfAnotherRun(StateError):
    """A state whose batches are not those of the run at run-api."""


class MissingPackage(GrpoError):
    """An optional package is needed and not installed. Names the install line."""


class NoSuchDevice(GrpoError):
    """The device to train or to serve on is not there."""


class FastPathRefused(GrpoError):
    """The model does not allow a faster way of computing. Says why."""


class UnusableOptimizer(GrpoError):
    """The optimizer's options do not go with the weights, or with the device that they are on."""


class NoInferenceServer(GrpoError):
    """No inference server answers, or the one that was started ended. Says what to start."""


class NoEnvironmentLeft(GrpoError):
    """All environments have left, and none came back within --environment-return-deadline-s."""


class StaleData(GrpoError):
    """Nothing that came was young enough for --max-staleness until the deadline."""


class WandbUnavailable(GrpoError):
    """Weights & Biases did not start."""


class NonFiniteStep(GrpoError):
    """A step cannot be taken. No weight was changed."""


class NonFiniteLoss(NonFiniteStep):
    """The loss is NaN or infinite; training on would spread it into every weight."""


class NonFiniteGradient(NonFiniteStep):
    """The gradient norm is NaN or infinite."""


class PolicyDiverged(GrpoError):
    """No step could be taken on several batches in a row."""


class WeightSyncError(GrpoError):
    """Trainer and inference server do not hold the same weights."""


class PolicyMismatch(WeightSyncError):
    """The server's parameters do not fit the trainer's model. Lists every difference."""


class UnreachableWeights(WeightSyncError):
    """The server's memory on a GPU cannot be opened here. Lists everything in the way."""


class MovedParameters(WeightSyncError):
    """Parameters left the memory shared with the server. Lists all of them."""


class TornWeights(WeightSyncError):
    """The served weights may be half of an update."""


class LostServer(WeightSyncError):
    """The inference server went away and did not come back in time."""


class WeightsRefused(WeightSyncError):
    """The server takes no such weights, for the reason that it gives. It serves those before."""


class NotPublished(WeightSyncError):
    """The server did not come to serve new weights within the deadline."""


class ServedWeightsDiffer(WeightSyncError):
    """The server's log-probabilities are not those of the trainer's weights."""
