"""Options of `grpo`: the archived trainer's names and defaults, and a few of our own."""

from __future__ import annotations

import secrets
import string
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AliasChoices, Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import SettingsConfigDict

from grpo_core.bearer_token import usable_token
from grpo_core.settings import CommandSettings
from grpo_core.wire import Registration

AUTO, NEVER = "auto", "never"


class TrainerSettings(CommandSettings):
    """GRPO trainer: takes batches from run-api, updates the policy, publishes the weights."""

    model_config = SettingsConfigDict(cli_prog_name="grpo", env_prefix="GRPO_")

    model_name: Annotated[str, Field(validation_alias=AliasChoices("model_name", "model"))] = Field(
        description="Hub id or directory of the model to train"
    )
    weight_bridge_mode: Literal["shared_vllm"] = Field(
        description="How new weights reach the inference server; shared_vllm: both hold one copy"
    )

    training_steps: int = Field(10, ge=1, description="Optimizer steps to take")
    batch_size: int = Field(2, ge=1, description="Sequences per forward pass (micro-batch)")
    gradient_accumulation_steps: int = Field(
        32, ge=1, description="Micro-batches per step; a step trains on their product of sequences"
    )
    seq_len: int = Field(2048, ge=2, description="Longest sequence, in tokens; longer ones are cut")
    lr: float = Field(1e-5, gt=0, description="Peak learning rate")
    warmup_steps: int = Field(0, ge=0, description="Steps of linear learning-rate warm-up")
    optimizer: Literal["adamw"] = Field("adamw", description="Optimizer, on fp32 masters")
    weight_decay: float = Field(0.01, ge=0, description="AdamW's weight decay")
    max_grad_norm: float = Field(1.0, gt=0, description="Bound on the gradient's L2 norm")
    clip_eps: float = Field(
        0.2, gt=0, lt=1, description="The ratio may move in [1 - clip_eps, 1 + clip_eps]"
    )
    seed: int = Field(0, ge=0, description="Seed of the trainer's random numbers")

    dtype: Literal["bfloat16", "float16", "float32", "auto"] = Field(
        "auto", description="Data type of the weights; auto: the server's"
    )
    device: Literal["cpu"] = Field("cpu", description="Device to train on")

    atropos_url: str = Field("http://localhost:8000", description="URL of run-api")
    run_api_token: SecretStr | None = Field(
        None, description="Token that run-api asks for (default: $RUN_API_TOKEN)"
    )
    vllm_port: int = Field(9001, ge=1, le=65535, description="Port of the inference server")
    vllm_url: str | None = Field(
        None, description="URL of the inference server (default: http://127.0.0.1:<vllm port>)"
    )
    vllm_control_url: str | None = Field(
        None,
        description="URL of the server's control port, where it has one (default: its own URL)",
    )
    weights_socket: Path | None = Field(
        None, description="Unix socket of the server's weights (default: what the server names)"
    )
    vllm_config_path: Path | None = Field(
        None,
        description="vllm_bridge_config.json of the server, where the socket that the server names "
        "is not on this file system (default: looked for in $LOGDIR, . and /tmp/atropos_bridge)",
    )
    pause_lease_s: float = Field(
        30.0, gt=0, description="Seconds after which the server goes on if an update hangs"
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
    verify_every_steps: int = Field(
        10,
        ge=0,
        description="Compare served and trained log-probabilities after the first update and then "
        "every so many steps; 0: never",
    )

    save_path: Path = Field(
        Path("trained_model_checkpoints"),
        description="Directory that receives final_model/, step_<n>/ and trainer_state/",
    )
    checkpoint_interval: int = Field(
        3,
        ge=0,
        description="Steps between two saved models (step_<n>/); 0: only the final one. Told to "
        "environments, which save their own state that often",
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
    log_level: str = Field("INFO", description="Least severe level that is logged")

    _usable_token = field_validator("run_api_token")(usable_token)

    @field_validator("wandb_project")
    @classmethod
    def _wandb_has_a_project(cls, value: str, info: ValidationInfo) -> str:
        if info.data.get("use_wandb") and not value:
            raise ValueError("--use-wandb needs a project to log to")
        return value

    @field_validator("wandb_group")
    @classmethod
    def _wandb_has_a_group(cls, value: str, info: ValidationInfo) -> str:
        return _random_group() if info.data.get("use_wandb") and not value else value

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


def _random_group() -> str:
    return "".join(secrets.choice(string.ascii_letters) for _ in range(8))
