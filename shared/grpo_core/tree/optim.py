"""Options of the optimizer, and of a trainer that consists of several processes (ranks)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from grpo_core.settings import Mistake, Shown

BITSANDBYTES = "bitsandbytes"
BITSANDBYTES_PIN = "bitsandbytes==0.50.2"
"""As in requirements/constraints.txt."""
ScheduleName = Literal["constant", "linear", "cosine"]
OptimizerName = Literal["adamw", "adamw_8bit", "adafactor"]


class OptimizerOptions(BaseModel, frozen=True):
    """How a gradient changes the weights."""

    lr: float = Field(1e-5, gt=0, description="Peak learning rate")
    lr_schedule: ScheduleName = Field(
        "constant",
        description="Learning rate after the warm-up. linear and cosine: falls from --lr, and "
        "reaches 0 after the last step",
    )
    warmup_steps: int = Field(
        0, ge=0, description="Steps over which the learning rate rises linearly to its peak"
    )
    warmup_ratio: float = Field(
        0.0, ge=0, lt=1, description="The same as a fraction of --steps, rounded up"
    )
    optimizer: Annotated[
        OptimizerName | None, Shown(default="adamw_8bit on a GPU, adamw on a CPU")
    ] = Field(
        None,
        description="Optimizer. adamw stores its moments in float32 and needs 8 bytes per weight. "
        "adamw_8bit needs 2 bytes per weight and the package bitsandbytes. adafactor needs almost "
        "no memory, because it stores no momentum and one second moment per row and column",
    )
    adam_beta1: float = Field(
        0.9, ge=0, lt=1, description="Share of the first moment that an Adam optimizer keeps"
    )
    adam_beta2: float = Field(
        0.999, ge=0, lt=1, description="Share of the second moment that an Adam optimizer keeps"
    )
    adam_eps: float = Field(
        1e-8, gt=0, description="Number that an Adam optimizer adds to the denominator"
    )
    weight_decay: float = Field(
        0.01, ge=0, description="Weight decay of the optimizer. Norms and biases have none"
    )
    max_grad_norm: float = Field(
        1.0, gt=0, description="Largest L2 norm of the gradient; a larger gradient is scaled down"
    )
    master_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Data type of the master weights. bfloat16 halves their memory and needs "
        "served weights in bfloat16",
    )
    rounding: Annotated[
        Literal["nearest", "stochastic"] | None,
        Shown(default="stochastic for bfloat16 master weights"),
    ] = Field(
        None,
        description="Rounding when bfloat16 master weights are updated. With nearest, small updates"
        " are lost",
    )
    fsdp: bool = Field(
        False,
        description="Divide the weights, their gradients and the optimizer's state among the "
        "trainer processes (PyTorch's FSDP2)",
    )

    def optimizer_on(self, device_type: str) -> OptimizerName:
        """The optimizer on a device of this type, "cuda" or "cpu"."""
        return self.optimizer or ("adamw_8bit" if device_type == "cuda" else "adamw")

    def optimizer_conflicts(self) -> Iterator[Mistake]:
        """Options that exclude each other."""
        if self.master_dtype == "float32" and self.rounding == "stochastic":
            yield Mistake("rounding", "stochastic needs --master-dtype bfloat16")
        if self.warmup_steps and self.warmup_ratio:
            yield Mistake("warmup_ratio", "excludes --warmup-steps")
        for name in ("adam_beta1", "adam_beta2", "adam_eps"):
            is_default = getattr(self, name) == OptimizerOptions.model_fields[name].default
            if self.optimizer == "adafactor" and not is_default:
                yield Mistake(name, "has no effect on --optimizer adafactor")


class ProcessOptions(BaseModel):
    """With `ranks` or `nodes`, this process starts others: torchrun, which it uses, and `accelerate
    launch` set the variables of the options from `world_size` to `local_rank`."""

    ranks: int = Field(
        1,
        ge=1,
        description="Number of trainer processes (ranks) on this host, each on a GPU of its own. If"
        " one is lost, all start again from the newest checkpoint",
    )
    nodes: int = Field(
        1,
        ge=1,
        description="Number of hosts with --ranks each. Start the same command on every host",
    )
    rendezvous: Annotated[str | None, Shown(metavar="HOST:PORT")] = Field(
        None,
        pattern=r"^(\[[0-9a-fA-F:.]+\]|[\w.-]+):[1-9][0-9]{0,4}$",
        description="Where the hosts meet: a name or an address of one of them, which has rank 0, "
        "and a free port there",
    )
    world_size: int = Field(1, ge=1, description="Number of trainer processes, if none are started")
    trainer_rank: int = Field(0, ge=0, description="Number of this trainer process, counted from 0")
    local_rank: Annotated[int | None, Shown(default="--trainer-rank")] = Field(
        None,
        ge=0,
        description="Number of this trainer process on its host, counted from 0. It is also the "
        "number of its GPU",
    )
    init_method: str = Field(
        "env://",
        pattern=r"^(env://|tcp://.+|file:///.+)$",
        description="Where the trainer processes meet: tcp://HOST:PORT, file:///PATH, or env:// for"
        " MASTER_ADDR and MASTER_PORT, which torchrun sets",
    )
    rank_deadline_s: float = Field(
        3600.0,
        gt=0,
        description="Seconds that a trainer process waits for another one. After this time it ends "
        "with an error",
    )

    @property
    def starts_ranks(self) -> bool:
        """Whether this process starts ranks, and is none."""
        return self.world_size == 1 and self.ranks * self.nodes > 1

    @property
    def processes(self) -> int:
        """Number of all ranks."""
        return max(self.world_size, self.ranks * self.nodes)

    def process_conflicts(self, mode: str, device: str, waits_s: float) -> Iterator[Mistake]:
        """Options that exclude each other. Args: waits_s: the longest wait of rank 0 alone"""
        if self.trainer_rank >= self.world_size:
            problem = f"{self.trainer_rank} is not below --world-size {self.world_size}"
            yield Mistake("trainer_rank", problem)
        if self.nodes > 1 and self.rendezvous is None:
            yield Mistake("nodes", f"{self.nodes}: needs --rendezvous HOST:PORT")
        if self.nodes == 1 and self.rendezvous is not None:
            yield Mistake("rendezvous", "has no effect without --nodes")
        started = self.ranks * self.nodes
        if 1 < self.world_size != started > 1:
            yield Mistake("world_size", f"{self.world_size}: omit it with --ranks and --nodes")
        count = self.processes
        if count == 1:
            return
        name = "world_size" if started == 1 else "ranks" if self.ranks > 1 else "nodes"
        if mode == "shared_vllm":
            yield Mistake(
                name,
                f"{getattr(self, name)}: mode shared_vllm needs one trainer process, because it "
                "trains the server's own memory; pass --mode none, lora_only or lora_restart, or "
                "start one process",
            )
        if ":" in device:
            yield Mistake(
                "device",
                f"{device}: each of {count} trainer processes uses the GPU of its "
                "--local-rank; omit --device, or select GPUs with CUDA_VISIBLE_DEVICES",
            )
        if self.rank_deadline_s <= waits_s:
            yield Mistake(
                "rank_deadline_s",
                f"{self.rank_deadline_s:g}: other ranks wait while rank 0 waits for a batch or for "
                f"the server, together up to {waits_s:g} s; pass more",
            )
