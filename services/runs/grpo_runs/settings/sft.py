"""Options of `grpo-sft`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from grpo_core.settings import Command, CommandSettings, Mistake, Shown
from grpo_core.settings.machine import missing_data, not_writable, unusable_model
from grpo_core.settings.options import option_of
from grpo_core.tree.environment_values import Columns
from grpo_core.tree.optim import OptimizerOptions
from grpo_core.tree.trainer import ForwardOptions, TrainerSettings
from grpo_runs.models import A_MODEL


class SftSettings(CommandSettings):
    """Trains a model on given answers, with TRL's SFTTrainer, so that GRPO starts from a model that
    has the format of the answers. The result is the directory model/ below --output, which
    grpo-run --model and vllm-api-server --model take.

    A row of the data holds messages that end with an answer of the assistant, or a prompt and a
    completion, or a prompt (or question) and an answer. The chat template of the model renders
    them, and only the tokens of the assistant's answers are trained on."""

    command: ClassVar[Command] = Command(
        prog="grpo-sft",
        env_prefix="GRPO_SFT_",
        examples=(
            "grpo-sft --model smollm2 --data sft.jsonl --output runs/sft",
            "grpo-sft --model my-model --data my/data-set --lora-r 16 --lr 1e-4 --output runs/sft",
            "grpo-run --model runs/sft/model",
        ),
        groups={
            "Data": ("data", "data_config", "columns", "system_prompt", "seq_len"),
            "Training": (
                *("epochs", "lr", "batch_size", "lora_r", "gradient_checkpointing"),
                *("device", "seed"),
            ),
        },
    )

    model: str = Field(min_length=1, description=f"Model to train: {A_MODEL}")
    output: Path = Field(description="Directory for the result, new or empty, such as runs/sft")
    data: str = Field(
        min_length=1,
        description="Rows to train on: a file (JSON lines, CSV, Parquet or Arrow), a directory "
        "with train.jsonl, or an id on the Hugging Face hub",
    )
    data_config: Annotated[str | None, Shown(default="none")] = Field(
        None, description="Name of the data set's configuration on the Hugging Face hub"
    )
    columns: Annotated[Columns, Shown(metavar="NAME=COLUMN,...")] = Field(
        default_factory=dict,
        description="Names of columns: prompt, completion or answer, and the data set's, for "
        "example prompt=instruction,completion=output",
    )
    system_prompt: Annotated[str | None, Shown(default="that of the rows")] = Field(
        None,
        description="System message of every example, such as that of the task which GRPO trains "
        "on. An empty text removes those of the rows",
    )
    seq_len: int = option_of(
        TrainerSettings,
        "seq_len",
        default=1024,
        description="Longest example, in tokens. Longer ones are left out",
    )
    epochs: float = Field(
        1.0, gt=0, description="How often each row is trained on; also a part, such as 0.5"
    )
    lr: float = option_of(
        OptimizerOptions,
        "lr",
        description="Peak learning rate. It falls linearly, and reaches 0 after the last step",
    )
    batch_size: int = Field(8, ge=1, description="Number of examples in a step")
    lora_r: Annotated[int | None, Shown(default="none: all weights are trained")] = Field(
        None,
        ge=1,
        description="Rank of a LoRA adapter on all linear layers, with an alpha of twice the rank. "
        "Only the adapter is trained, and merged into the model at the end",
    )
    gradient_checkpointing: bool = option_of(ForwardOptions, "gradient_checkpointing")
    device: str = option_of(
        TrainerSettings,
        "device",
        description="Device to train on: cpu, cuda or cuda:N. auto: a GPU if there is one, "
        "otherwise cpu",
    )
    seed: int = Field(
        0, ge=0, description="Random seed: the order of the examples, and the adapter"
    )

    def start_mistakes(self) -> Iterator[Mistake]:
        if problem := unusable_model(self.model):
            yield Mistake("model", problem)
        if problem := missing_data(self.data):
            yield Mistake("data", problem)
        if self.output.exists() and not (self.output.is_dir() and not any(self.output.iterdir())):
            yield Mistake("output", f"{self.output} is not an empty directory; name a new one")
        elif problem := not_writable(self.output):
            yield Mistake("output", problem)
