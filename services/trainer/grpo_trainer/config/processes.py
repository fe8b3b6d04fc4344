"""Options of a trainer that consists of several processes (ranks)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, Field, field_validator

from grpo_core.settings import Mistake, Shown


@dataclass(frozen=True)
class Processes:
    """This process's place among the trainer's processes. `local_rank`: its number on its host."""

    count: int = 1
    rank: int = 0
    local_rank: int = 0
    init_method: str = "env://"
    deadline_s: float = 3600.0


class ProcessOptions(BaseModel):
    """`torchrun` and `accelerate launch` set the variables of these options."""

    world_size: int = Field(
        1,
        ge=1,
        description="Number of trainer processes (ranks)",
    )
    trainer_rank: int = Field(
        0,
        ge=0,
        description="Number of this trainer process, counted from 0",
    )
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
    num_inference_nodes: int = Field(
        0,
        description="Only 0 is valid. 0 means one inference server, and only one server of a run "
        "can receive new weights",
    )

    @field_validator("num_inference_nodes")
    @classmethod
    def _is_one_server(cls, value: int) -> int:
        if value:
            raise ValueError(
                "the only valid value is 0, because 0 means one inference server, and only one "
                "server of a run can receive new weights; --inference-url names this server"
            )
        return value

    def processes(self) -> Processes:
        rank = self.trainer_rank
        local_rank = rank if self.local_rank is None else self.local_rank
        return Processes(self.world_size, rank, local_rank, self.init_method, self.rank_deadline_s)

    def process_conflicts(self, mode: str, device: str, waits_s: float) -> Iterator[Mistake]:
        """Options that exclude each other. Args: waits_s: the longest wait of rank 0 alone"""
        if self.trainer_rank >= self.world_size:
            yield Mistake(
                "trainer_rank",
                f"{self.trainer_rank}: with --world-size {self.world_size} the ranks are 0 to "
                f"{self.world_size - 1}",
            )
        if self.world_size == 1:
            return
        if mode == "shared_vllm":
            yield Mistake(
                "world_size",
                f"{self.world_size}: mode shared_vllm needs one trainer process, because it trains "
                "the server's own memory; pass --mode none, lora_only or lora_restart, or start "
                "one process",
            )
        if ":" in device:
            yield Mistake(
                "device",
                f"{device}: each of {self.world_size} trainer processes uses the GPU of its "
                "--local-rank; omit --device, or select GPUs with CUDA_VISIBLE_DEVICES",
            )
        if self.rank_deadline_s <= waits_s:
            yield Mistake(
                "rank_deadline_s",
                f"{self.rank_deadline_s:g}: other ranks wait while rank 0 waits for a batch or for "
                f"the server, together up to {waits_s:g} s; pass more",
            )
