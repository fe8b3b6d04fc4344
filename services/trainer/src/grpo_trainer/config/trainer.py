"""Options of `grpo`: the archived trainer's names and defaults, and a few of our own."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from grpo_core.security.bearer_token import usable_token
from grpo_core.settings import load_settings
from grpo_core.wire import Registration
from grpo_trainer.config.cli import joined_lists
from grpo_trainer.config.forward import ForwardSettings
from grpo_trainer.config.optimizer import OptimizerSettings

AUTO, NEVER = "auto", "never"
AUTO_DEVICE = "auto"
LISTS = ("--lora-target-modules", "--lora-layer-indices")


class TrainerSettings(ForwardSettings, OptimizerSettings):
    """GRPO trainer: takes batches from run-api, updates the policy, publishes the weights."""

    model_config = SettingsConfigDict(cli_prog_name="grpo", env_prefix="GRPO_")

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
    environment_return_deadline_s: float = Field(
        60.0,
        gt=0,
        description="Seconds to wait for an environment to come back once the last one has left",
    )
    verify_every_steps: int = Field(
        10,
        ge=0,
        description="shared_vllm: compare served and trained log-probabilities after the first "
        "update and then every so many steps; 0: never. The other modes compare after every "
        "publication",
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
        return _random_group() if info.data.get("use_wandb") and not value else value

    @model_validator(mode="after")
    def _data_can_be_fresh_enough(self) -> Self:
        """Right before a publication the newest data is this old."""
        oldest = self.publish_every_steps - 1
        if self.max_staleness is not None and self.max_staleness < oldest:
            raise ValueError(
                f"--max-staleness {self.max_staleness}: the server gets new weights every "
                f"{oldest + 1} steps, so what it samples is up to {oldest} steps old; allow that "
                "much, or publish more often"
            )
        return self

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


def parse_settings(argv: Sequence[str]) -> TrainerSettings:
    """Those of a command line, or the process ends with status 2 and a line per mistake."""
    return load_settings(TrainerSettings, joined_lists(argv, LISTS))


def _random_group() -> str:
    return "".join(secrets.choice(string.ascii_letters) for _ in range(8))
