"""Options of commands that start an inference server on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Protocol

from pydantic import Field

from grpo_core.settings import LogLevel, Shown
from grpo_local.settings.with_services import WithServiceOptions

GPU_CONTROL = Path("/dev/nvidiactl")
"""Exists if the NVIDIA driver is loaded."""


class ServerSizes(Protocol):
    """Sizes of the server that depend on other options."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def kv_cache_mib(self) -> int | None:
        """None: vLLM takes what the weights leave of its share of the GPU's memory."""

    @property
    def server_deadline_s(self) -> float: ...


class ServerOptions(WithServiceOptions):
    """`gpu_memory_utilization`, `compute_threads` and `seed`: see the commands."""

    gpu_memory_utilization: float
    compute_threads: int
    seed: int
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        Shown(default="float32; on a GPU bfloat16"),
    ] = Field(None, description="Data type of the weights")
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="Device to compute on: cpu, cuda or cuda:N. auto: a GPU if there is one, "
        "otherwise cpu",
    )
    eager: Annotated[bool | None, Shown(default="on; on a GPU off")] = Field(
        None,
        description="Start the server sooner, without compilation and CUDA graphs. With --no-eager,"
        " the server starts later but samples faster, which saves time in long runs",
    )
    log_level: LogLevel = Field(
        "INFO", description="Least severe level of the messages in the services' log files"
    )

    @property
    def server_sizes(self) -> ServerSizes:
        raise NotImplementedError

    @property
    def on_gpu(self) -> bool:
        """All services use the same device."""
        return GPU_CONTROL.exists() if self.device == "auto" else self.device.startswith("cuda")

    @property
    def weights_dtype(self) -> str:
        return self.dtype or ("bfloat16" if self.on_gpu else "float32")

    @property
    def starts_eager(self) -> bool:
        return self.eager if self.eager is not None else not self.on_gpu
