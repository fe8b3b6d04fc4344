"""Settings of a run: the archived trainer's options and defaults, and a few of our own."""

from __future__ import annotations

import secrets
import string
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AliasChoices,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
)

from grpo_core.redis.keys import DEFAULT_RUN_ID
from grpo_core.redis.url import OptionalRedisUrl
from grpo_core.security.bearer_token import usable_token
from grpo_core.wire.run_api import Registration
from grpo_trainer.config.forward import ForwardOptions
from grpo_trainer.config.optimizer import OptimizerOptions
from grpo_trainer.config.sync import (
    LoraOptions,
    LoraSettings,
    SharedVllmSettings,
    SyncSettings,
)

AUTO, NEVER = "auto", "never"
AUTO_DEVICE = "auto"


class RunOptions(ForwardOptions, OptimizerOptions):
    """Options that every mode reads."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, protected_namespaces=()
    )

    model_name: Annotated[str, Field(validation_alias=AliasChoices("model_name", "model"))] = Field(
        description="Hub id or directory of the model to train"
    )
    redis_url: OptionalRedisUrl = Field(
        None,
        description="Redis by which trainer and server speak: needed in every mode but shared_vllm "
        "(default: $REDIS_URL)",
    )
    run_id: str = Field(DEFAULT_RUN_ID, description="Name of the run (default: $RUN_ID)")

    vllm_gpu: int | None = Field(
        None,
        ge=0,
        description="GPU of a server that grpo starts, counted from 0 among those that "
        "CUDA_VISIBLE_DEVICES names (default: the first)",
    )
    gpu_memory_utilization: Annotated[
        float,
        Field(
            validation_alias=AliasChoices("gpu_memory_utilization", "vllm_gpu_memory_utilization")
        ),
    ] = Field(0.45, gt=0, le=1, description="Share of its memory that such a server may take")
    max_model_len: int | None = Field(
        None,
        ge=1,
        description="Longest sequence of such a server, in tokens (default: 4096, or what the "
        "model allows where that is less)",
    )

    training_steps: int = Field(10, ge=1, description="Optimizer steps to take")
    batch_size: int = Field(2, ge=1, description="Sequences per forward pass (micro-batch)")
    gradient_accumulation_steps: int = Field(
        32, ge=1, description="Micro-batches per step; a step trains on their product of sequences"
    )
    seq_len: int = Field(2048, ge=2, description="Longest sequence, in tokens; longer ones are cut")
    clip_eps: float = Field(
        0.2, gt=0, lt=1, description="The ratio may move in [1 - clip_eps, 1 + clip_eps]"
    )
    seed: int = Field(0, ge=0, description="Seed of the trainer's random numbers")

    dtype: Literal["bfloat16", "float16", "float32", "auto"] = Field(
        "auto", description="Data type of the weights; auto: the server's"
    )
    device: str = Field(
        AUTO_DEVICE,
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="Device to train on: cpu, cuda or cuda:N; auto: in shared_vllm that of the "
        "served weights, else a GPU where there is one",
    )
    atropos_url: str = Field("http://localhost:8000", description="URL of run-api")
    run_api_token: SecretStr | None = Field(
        None, description="Token that run-api asks for (default: $RUN_API_TOKEN)"
    )
    vllm_api_key: SecretStr | None = Field(
        None, description="Key that the inference server asks for (default: $VLLM_API_KEY)"
    )
    vllm_port: int = Field(9001, ge=1, le=65535, description="Port of the inference server")
    vllm_url: str | None = Field(
        None, description="URL of the inference server (default: http://127.0.0.1:<vllm port>)"
    )
    service_deadline_s: float = Field(
        60.0, gt=0, description="Seconds to keep trying an unreachable service"
    )
    server_return_deadline_s: float = Field(
        300.0, gt=0, description="Seconds to wait for an inference server that restarts"
    )
    batch_deadline_s: float = Field(
        600.0, gt=0, description="Seconds to wait for a batch before giving up"
    )
    environment_return_deadline_s: float = Field(
        60.0,
        gt=0,
        description="Seconds to wait for an environment to come back once the last one has left",
    )
    max_staleness: int | None = Field(
        None,
        ge=0,
        description="Drop groups with a completion that is more steps old (default: none)",
    )

    save_path: Path = Field(
        Path("trained_model_checkpoints"),
        description="Directory that receives final_model/ and step_<n>/ (of an adapter: "
        "final_adapter/ and adapter_step_<n>/), trainer_state/ and served_weights/",
    )
    checkpoint_interval: int = Field(
        3,
        ge=0,
        description="Steps between two saved models (step_<n>/); 0: only the final one. Told to "
        "environments, which save their own state that often",
    )
    keep_checkpoints: int = Field(
        2, ge=1, description="Keep the newest so many of those, and the final one beside them"
    )
    state_interval: int = Field(
        10,
        ge=0,
        description="Steps between two saved states of the trainer, from which a run goes on after "
        "a crash; one is saved with every model as well. 0: only then",
    )
    resume: str = Field(
        AUTO,
        description="What to go on from. auto: the newest state in --save-path, where there is "
        "one; never: train from the start; or the directory of a state",
    )
    metrics_file: Path | None = Field(None, description="JSONL file with one record per step")
    benchmark: bool = Field(
        False, description="At the end print where the time went, and write benchmark.json"
    )
    use_wandb: bool = Field(False, description="Log every step to Weights & Biases as well")
    wandb_project: str = Field(
        "",
        validate_default=True,
        description="Weights & Biases project, told to environments; --use-wandb needs one",
    )
    wandb_group: str = Field(
        "",
        validate_default=True,
        description="Weights & Biases group, told to environments (default with --use-wandb: 8 "
        "random letters)",
    )
    wandb_key_file: Path | None = Field(
        None,
        description="File with the API key of Weights & Biases, a container's secret for example; "
        "an empty one counts as none (default: $WANDB_API_KEY, or what `wandb login` left)",
    )
    log_level: str = Field("INFO", description="Least severe level that is logged")

    _usable_token = field_validator("run_api_token", "vllm_api_key")(usable_token)

    @field_validator("wandb_project")
    @classmethod
    def _wandb_has_a_project(cls, value: str, info: ValidationInfo) -> str:
        if info.data.get("use_wandb") and not value:
            raise ValueError("--use-wandb needs a project to log to")
        return value

    @field_validator("wandb_group")
    @classmethod
    def _wandb_has_a_group(cls, value: str, info: ValidationInfo) -> str:
        if value or not info.data.get("use_wandb"):
            return value
        return "".join(secrets.choice(string.ascii_letters) for _ in range(8))


class TrainerSettings(RunOptions):
    """Options of one run. `sync`: of its mode, with none of another one."""

    sync: SyncSettings

    @property
    def lora(self) -> LoraOptions | None:
        """None where the whole model is trained."""
        return self.sync.lora if isinstance(self.sync, LoraSettings) else None

    @property
    def verify_every_steps(self) -> int:
        """Steps between two checks of the served weights; 0: none, or with every publication."""
        return self.sync.verify_every_steps if isinstance(self.sync, SharedVllmSettings) else 0

    @property
    def inference_url(self) -> str:
        return self.vllm_url or f"http://127.0.0.1:{self.vllm_port}"

    def registration(self, first_step: int) -> Registration:
        """What run-api is told: a batch is one optimizer step's worth of sequences."""
        return Registration(
            wandb_group=self.wandb_group,
            wandb_project=self.wandb_project,
            batch_size=self.batch_size * self.gradient_accumulation_steps,
            max_token_len=self.seq_len,
            checkpoint_dir=str(self.save_path),
            save_checkpoint_interval=self.checkpoint_interval or self.training_steps,
            starting_step=first_step,
            num_steps=self.training_steps,
        )
