"""Options of `grpo` that apply in every weight-sync mode."""

from __future__ import annotations

import secrets
import string
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field, ValidationInfo, field_validator

from grpo_core.redis.url import LOCAL_REDIS, RedisUrl, local_redis
from grpo_core.settings import CommaSeparated, InferenceUrl, Shown
from grpo_core.tree.common import ClientOptions, MetricsOptions, Port
from grpo_core.tree.objective import ObjectiveOptions
from grpo_core.tree.optim import OptimizerOptions
from grpo_core.tree.weights import (
    FullModelSettings,
    LoraOptions,
    LoraSettings,
    SharedVllmSettings,
    SyncSettings,
)
from grpo_core.wire.run_api import Registration

AUTO, NEVER = "auto", "never"
AUTO_DEVICE = "auto"


def _not_a_tracker(value: object) -> object:
    option = {"wandb": "--use-wandb", "tensorboard": "--tensorboard-dir DIR"}.get(str(value))
    if option:
        raise ValueError(f"expected trackio; for {value} write {option}")
    return value


Tracker = Annotated[Literal["trackio"], BeforeValidator(_not_a_tracker)]
Choice = Literal["auto", "on", "off"]
"""`auto` turns a feature on if it pays and the model allows it, and logs the reason otherwise.
`on` fails if the feature is not available."""


class ForwardOptions(BaseModel, frozen=True):
    """How logprobs are computed."""

    packing: Choice = Field(
        "auto",
        description="Concatenate the sequences of a micro-batch instead of padding them, and "
        "compute a beginning that several sequences share, for example the prompt of a group, only "
        "once. auto: on if the model supports packing",
    )
    fused_head: Choice = Field(
        "auto",
        description="Compute logprobs with a fused head, which never holds the logits of all tokens"
        " in memory at once. auto: on if the model supports the fused head",
    )
    compile: Annotated[bool | None, Shown(default="off; on a GPU on")] = Field(
        None,
        description="Compile the model's layers with torch.compile, which needs a C++ compiler "
        "for a CPU, and Triton and a C compiler for a GPU. On a GPU it is on by default if the "
        "compiler and the model allow it",
    )
    gradient_checkpointing: bool = Field(
        False,
        description="Store only the input of each layer, and compute the layer again in the "
        "backward pass. This saves memory and increases the computation of a step by about a third",
    )


class ServersOptions(BaseModel, frozen=True):
    """The inference servers of the run, and the address at which the trainer serves weights."""

    num_inference_nodes: int = Field(
        0,
        ge=0,
        description="Number of inference servers to wait for at the start; afterwards one is "
        "enough, and servers may join and leave. They follow the run's --run-id in Redis. 0: the "
        "server at --inference-url",
    )
    master_addr: str = Field(
        "localhost",
        min_length=1,
        description="With --num-inference-nodes: host name or address of the trainer, as the "
        "inference servers reach it to fetch weights",
    )
    master_port: Port = Field(
        26756,
        description="With --num-inference-nodes: port on which the trainer serves weights. If "
        "torchrun starts the trainer, it is the next higher one, because torch.distributed uses "
        "this port",
    )


class RunOptions(
    ForwardOptions,
    ObjectiveOptions,
    OptimizerOptions,
    ServersOptions,
    MetricsOptions,
    ClientOptions,
    frozen=True,
    extra="forbid",
):
    """Options that every mode reads."""

    model: str = Field(
        min_length=1, description="Model to train: a directory or an id on the Hugging Face hub"
    )
    redis_url: Annotated[RedisUrl, Shown(default=LOCAL_REDIS)] = Field(
        default_factory=local_redis,
        description="URL of the Redis in which the trainer announces new weights to the inference "
        "servers. Mode shared_vllm does not use it",
    )
    run_id: Annotated[str | None, Shown(default="the one that the server reports")] = Field(
        None, description="The inference server's --run-id, which names the server's data in Redis"
    )

    vllm_gpu: Annotated[int | None, Shown(default="the first GPU")] = Field(
        None,
        ge=0,
        description="Number of the GPU for a server that grpo starts, counted from 0 within "
        "CUDA_VISIBLE_DEVICES",
    )
    gpu_memory_utilization: float = Field(
        0.45,
        gt=0,
        le=1,
        description="Fraction of the GPU's memory that a server started by grpo may use",
    )
    max_model_len: Annotated[int | None, Shown(default="the model's limit, at most 4096")] = Field(
        None, ge=1, description="Longest sequence, in tokens, that a server started by grpo accepts"
    )

    steps: int = Field(
        10, ge=1, description="Number of training steps (optimizer updates) of the run"
    )
    batch_size: int = Field(
        2,
        ge=1,
        description="A step trains on this number times --gradient-accumulation-steps sequences",
    )
    gradient_accumulation_steps: int = Field(
        32, ge=1, description="A step trains on this number times --batch-size sequences"
    )
    tokens_per_micro_batch: Annotated[
        int | None, Shown(default="--batch-size times --seq-len; on a GPU by its memory")
    ] = Field(
        None,
        ge=1,
        description="Largest number of tokens in one forward pass (micro-batch). A longer "
        "sequence is a micro-batch of its own. With --packing, tokens that sequences share "
        "count once. On GPUs the default is the largest of 4096, 8192, 16384 and 32768 that "
        "fits by --memory-plan, or the number of the checkpoint from which the run resumes",
    )
    seq_len: int = Field(
        2048, ge=2, description="Longest sequence, in tokens. Longer sequences are truncated"
    )
    seed: int = Field(0, ge=0, description="Seed of the trainer's random numbers")

    dtype: Literal["bfloat16", "float16", "float32", "auto"] = Field(
        "auto", description="Data type of the weights. auto: the data type of the server's weights"
    )
    device: str = Field(
        AUTO_DEVICE,
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="Device to train on: cpu, cuda or cuda:N. auto: in mode shared_vllm the "
        "device of the served weights, otherwise a GPU if there is one",
    )
    inference_url: InferenceUrl = Field(
        "http://127.0.0.1:9001", description="URL of the inference server"
    )
    service_deadline_s: float = Field(
        60.0,
        gt=0,
        description="Seconds for which the trainer repeats a request that run-api, Redis or the "
        "inference server does not answer",
    )
    server_return_deadline_s: float = Field(
        300.0,
        gt=0,
        description="Seconds to wait for the inference server to return when it restarts or fails",
    )
    batch_deadline_s: float = Field(
        600.0,
        gt=0,
        description="Seconds to wait for a batch. After this time the trainer ends with an error",
    )
    environment_return_deadline_s: float = Field(
        60.0,
        gt=0,
        description="Seconds to wait for an environment to return after all environments have "
        "disconnected",
    )
    max_staleness: Annotated[int | None, Shown(default="no limit")] = Field(
        None,
        ge=0,
        description="Largest staleness of a group, in steps. Groups with a larger staleness are "
        "dropped",
    )

    save_path: Path = Field(
        Path("trained_model_checkpoints"),
        description="Directory for exported models, checkpoints, served weights and config.yaml",
    )
    checkpoint_interval: int = Field(
        3,
        ge=0,
        description="Steps between two exported models (step_<n>/ or adapter_step_<n>/). 0: only "
        "the final model is exported. Environments save their own state at the same "
        "interval",
    )
    keep_checkpoints: int = Field(
        2,
        ge=1,
        description="Number of exported models to keep besides the final model. Older exported "
        "models are deleted",
    )
    state_interval: int = Field(
        10,
        ge=0,
        description="Largest number of steps between two checkpoints. The trainer also writes a "
        "checkpoint with each exported model. 0: checkpoints are written only with exported models",
    )
    resume: str = Field(
        AUTO,
        description="Checkpoint to resume from. auto: the newest checkpoint below --save-path, if "
        "there is one. never: train from the start. Any other value: directory of the "
        "checkpoint",
    )
    metrics_file: Path | None = Field(
        None, description="File to which the trainer writes its metrics, one JSON object per step"
    )
    tensorboard_dir: Path | None = Field(
        None, description="Directory to which the trainer writes its metrics for TensorBoard"
    )
    report_to: CommaSeparated[Tracker] = Field(
        (),
        description="Further experiment trackers to which the trainer logs every step. trackio: "
        "Trackio, which keeps its data on this machine, in the directory $TRACKIO_DIR",
    )
    keep_rollouts: int = Field(
        500,
        ge=0,
        description="Number of steps whose rollouts are kept: the newest steps, one file for each. "
        "0: no rollouts are written",
    )
    rollouts_dir: Annotated[Path | None, Shown(default="rollouts/ below --save-path")] = Field(
        None, description="Directory to which the trainer writes the rollouts of each step"
    )
    benchmark: bool = Field(
        False,
        description="At the end of the run, print its time, memory and disk space, and write "
        "benchmark.json",
    )
    use_wandb: bool = Field(False, description="Log every step to Weights & Biases")
    wandb_project: Annotated[str, Shown(default="$WANDB_PROJECT, or uncategorized")] = Field(
        "",
        description="Project in Weights & Biases to which the trainer and the environments log. "
        "With --report-to trackio, also the project in Trackio, by default grpo",
    )
    wandb_group: Annotated[str, Shown(default="8 random letters with --use-wandb")] = Field(
        "",
        validate_default=True,
        description="Group in Weights & Biases to which the trainer and the environments log",
    )
    wandb_key_file: Annotated[
        Path | None, Shown(default="$WANDB_API_KEY, or the login of `wandb login`")
    ] = Field(None, description="File with the API key of Weights & Biases")

    @field_validator("wandb_group")
    @classmethod
    def _wandb_has_a_group(cls, value: str, info: ValidationInfo) -> str:
        if value or not info.data.get("use_wandb"):
            return value
        return "".join(secrets.choice(string.ascii_letters) for _ in range(8))

    @property
    def micro_batch_tokens(self) -> int:
        """Budget of a micro-batch, in tokens; on a GPU once it is chosen."""
        return self.tokens_per_micro_batch or self.batch_size * self.seq_len


class TrainerSettings(RunOptions):
    """Options of one run. `sync` holds those of its mode."""

    sync: SyncSettings

    @property
    def lora(self) -> LoraOptions | None:
        """None if the whole model is trained."""
        return self.sync.lora if isinstance(self.sync, LoraSettings) else None

    @property
    def trained_layers(self) -> tuple[int, ...] | None:
        """None if the whole model or an adapter is trained."""
        sync = self.sync
        return sync.train_layer_indices if isinstance(sync, FullModelSettings) else None

    @property
    def verify_every_steps(self) -> int:
        """Steps between two checks of the served weights; 0: none, or one per publication."""
        return self.sync.verify_every_steps if isinstance(self.sync, SharedVllmSettings) else 0

    def registration(self, first_step: int) -> Registration:
        """The trainer's registration with run-api. A batch holds the sequences of one step."""
        return Registration(
            wandb_group=self.wandb_group,
            wandb_project=self.wandb_project,
            batch_size=self.batch_size * self.gradient_accumulation_steps,
            max_token_len=self.seq_len,
            checkpoint_dir=str(self.save_path),
            save_checkpoint_interval=self.checkpoint_interval or self.steps,
            starting_step=first_step,
            num_steps=self.steps,
            server_run_id=self.run_id,
        )
