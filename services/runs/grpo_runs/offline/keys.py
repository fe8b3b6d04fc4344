"""Every key of the offline trainer, with its type, its default and its description.

`conf/offline_grpo.yaml` is generated from these classes. Hydra composes it with the command line.
An `interpolation` there takes the place of the default: the value of another key.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from grpo_core.settings import HttpUrl

SamplingBackend = Literal["vllm_server", "sglang_server", "local"]
SyncMode = Literal["auto", "shared_vllm", "lora_only", "lora_restart", "none", "frozen"]

Probability = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """Keys below one name."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelKeys(Section):
    train_id: str = Field(
        "Qwen/Qwen2.5-1.5B",
        min_length=1,
        description="Model to train: a directory or an id on the Hugging Face hub",
    )
    ref_id: str = Field(
        "Qwen/Qwen2.5-1.5B",
        min_length=1,
        json_schema_extra={"interpolation": "${model.train_id}"},
        description="Reference model of the KL penalty. It is loaded only if it is needed",
    )
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="Device to train on: cpu, cuda or cuda:N. auto: in mode shared_vllm the device "
        "of the served weights, otherwise a GPU if there is one",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Data type of the weights. auto: the server's"
    )


class GenerationKeys(Section):
    backend: SamplingBackend = Field(
        "vllm_server",
        description="Where rollouts are sampled. local: in this process, without a server",
    )
    base_url: HttpUrl = Field("http://127.0.0.1:30000", description="URL of the server")
    batch_size: Count = Field(4, description="Number of concurrent requests, one for each problem")
    max_new_tokens: Count = Field(256, description="Longest completion, in tokens")
    temperature: float = Field(0.7, gt=0, description="Sampling temperature")
    top_p: Probability = Field(
        0.95, description="Sample from the most likely tokens that together have this probability"
    )
    top_k: int = Field(
        50, ge=0, description="Sample from this number of most likely tokens. 0: from all tokens"
    )
    repetition_penalty: float = Field(
        1.1,
        ge=0.01,
        le=100,
        description="Above 1, tokens that the prompt or the completion contains get less likely",
    )


class TrainKeys(Section):
    iterations: Count = Field(10, description="Number of iterations of the run")
    batch_size: Count = Field(
        8,
        description="Sequences of a forward pass: it has at most this number times grpo.seq_len "
        "tokens",
    )
    lr: float = Field(1e-5, gt=0, description="Learning rate")
    grad_clip: float = Field(
        1.0, gt=0, description="Largest norm of the gradient; a larger gradient is scaled down"
    )
    kl_coef: float = Field(0.05, ge=0, description="Coefficient of the KL penalty. 0: none")
    entropy_coef: float = Field(0.0, ge=0, description="Coefficient of the entropy bonus")
    grad_accum_steps: Count = Field(
        1,
        description="An optimizer step takes at most this number times train.batch_size sequences. "
        "An iteration with more sequences takes several optimizer steps",
    )


class DataKeys(Section):
    task: str = Field(
        "arithmetic",
        min_length=1,
        description="Task of the environments: a name, or my.py:reward, my.py:MyTask, mixture",
    )
    problems_per_iteration: Count = Field(4, description="Prompts of one iteration")
    rollouts_per_problem: int = Field(4, ge=2, description="Completions of each prompt")
    train_seed_start: int = Field(1000, ge=0, description="Seed of the first training problem")
    num_train_seeds: Count = Field(
        64, description="Number of training problems; each pass has them in another order"
    )


class EvalKeys(Section):
    enabled: bool = Field(True, description="Evaluate during the run")
    interval: Count = Field(1, description="Iterations between two evaluations")
    backend: SamplingBackend = Field(
        "vllm_server",
        json_schema_extra={"interpolation": "${generation.backend}"},
        description="Where the answers are sampled",
    )
    base_url: HttpUrl = Field(
        "http://127.0.0.1:30000",
        json_schema_extra={"interpolation": "${generation.base_url}"},
        description="URL of the server",
    )
    batch_size: Count = Field(8, description="Number of concurrent requests, one for each item")
    replicates: Count = Field(4, description="Answers to each item")
    num_ids: Count = Field(16, description="Number of items")
    id_seed_start: int = Field(5000, ge=0, description="Seed of the first item")
    do_sample: bool = Field(
        True, description="false: the most likely tokens, with one answer to each item"
    )
    max_new_tokens: Count = Field(256, description="Longest answer, in tokens")
    temperature: float = Field(0.7, gt=0, description="Sampling temperature")
    top_p: Probability = Field(0.95, description="As generation.top_p")
    seed_base: int = Field(
        4242, ge=0, description="Seed of the sampling, for generation.backend=local"
    )
    ids: tuple[int | str, ...] = Field(
        (), description="Items: seeds, or keys of the task's items. Replaces num_ids"
    )


class CheckpointKeys(Section):
    save_interval: int = Field(
        1, ge=0, description="Iterations between two saved models. 0: only the last one"
    )
    keep_last_k: Count = Field(3, description="Number of saved models that are kept")
    resume: str | None = Field(
        None,
        description="Directory of a run to continue. Its keys hold, but for those that are given",
    )


class WandbKeys(Section):
    enabled: bool = Field(False, description="Log to Weights & Biases")
    project: str = Field("", description="Project. Empty: $WANDB_PROJECT, or uncategorized")
    run_name: str = Field("", description="Name of the run. Empty: chosen by Weights & Biases")


class LoggingKeys(Section):
    wandb: WandbKeys = WandbKeys()
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "WARNING", description="Least severe level of the messages on the screen"
    )


class SyncKeys(Section):
    mode: SyncMode = Field(
        "auto",
        description="How new weights reach the server. auto: what the server supports. frozen: they"
        " do not, and the rollouts stay those of the first weights",
    )


class OfflineKeys(Section):
    """One run. `grpo` and `env_server` take any option of these two commands, in snake_case."""

    model: ModelKeys = ModelKeys()
    generation: GenerationKeys = GenerationKeys()
    train: TrainKeys = TrainKeys()
    data: DataKeys = DataKeys()
    eval: EvalKeys = EvalKeys()
    checkpoint: CheckpointKeys = CheckpointKeys()
    logging: LoggingKeys = LoggingKeys()
    sync: SyncKeys = SyncKeys()
    grpo: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of the command grpo, for example objective: dapo",
    )
    env_server: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of the command env-server, for example data: rows.jsonl",
    )
    seed: int = Field(42, ge=0, description="Seed of the run's random numbers")

    @property
    def sequences_per_iteration(self) -> int:
        return self.data.problems_per_iteration * self.data.rollouts_per_problem

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps of one iteration."""
        size = self.train.batch_size * self.train.grad_accum_steps
        return -(-self.sequences_per_iteration // size)


def is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def value_of(content: Mapping[str, Any], path: str) -> Any:
    """Args: path: of a key, for example `train.lr`"""
    found: Any = content
    for name in path.split("."):
        found = found[name]
    return found


def put(content: dict[str, Any], path: str, value: Any) -> None:
    """Set a key, in sections that may be missing."""
    *sections, name = path.split(".")
    for section in sections:
        content = content.setdefault(section, {})
    content[name] = value


CONFIG_FILE = Path(__file__).parent / "conf" / "offline_grpo.yaml"
_WIDTH = 98
_HEAD = """\
# Every key of the offline trainer with its default. Generated from grpo_runs/offline/keys.py.
#
#   python run_offline_grpo.py train.lr=2e-5 data.task=my.py:reward
#   python run_offline_grpo.py -m train.lr=1e-5,2e-5

defaults:
  - _self_
  - override hydra/job_logging: none
  - override hydra/hydra_logging: none

"""
_TAIL = """
hydra:
  run:
    dir: outputs/${now:%Y-%m-%d}/${now:%H-%M-%S}
  sweep:
    dir: multirun/${now:%Y-%m-%d}/${now:%H-%M-%S}
    subdir: ${hydra.job.num}
"""


def config_text() -> str:
    return _HEAD + "\n".join(_lines(OfflineKeys, "")) + "\n" + _TAIL


def _lines(section: type[BaseModel], indent: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        kind: Any = field.annotation
        yield from ([""] if not indent else [])
        if is_section(kind):
            yield f"{indent}{name}:"
            yield from _lines(kind, indent + "  ")
            continue
        comment = f"{field.description}."
        yield from textwrap.wrap(
            comment, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
        )
        yield f"{indent}{name}: {_written(field)}"


def _written(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    if isinstance(extra, dict):
        return str(extra["interpolation"])
    value = field.get_default(call_default_factory=True)
    value = [*value] if isinstance(value, tuple) else value
    return (
        yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()
    )


if __name__ == "__main__":
    CONFIG_FILE.write_text(config_text())
