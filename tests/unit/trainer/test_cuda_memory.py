"""Obstacles between a trainer and weights on a GPU are named before CUDA is called."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from grpo_core.host_place import pid_namespace, shm_filesystem
from grpo_core.weight_transport import CudaMemory, CudaPlace
from grpo_trainer.errors import UnreachableWeights
from grpo_trainer.weight_sync.cuda_memory import OpenedCuda, OwnPlace

SERVER = CudaPlace(
    device_uuid="GPU-a",
    device_name="H200",
    torch="2.11 with CUDA 13",
    pid_namespace=7,
    shm_filesystem=9,
)
OWN = OwnPlace(
    devices={"GPU-b": 0, "GPU-a": 1}, torch="2.11 with CUDA 13", pid_namespace=7, shm_filesystem=9
)
OBSTACLES: list[tuple[dict[str, Any], str]] = [
    ({"devices": {"GPU-b": 0}}, "H200 GPU-a; this process sees GPU-b"),
    ({"devices": {}}, "this process sees none"),
    ({"torch": "2.13 with CUDA 13"}, "torch 2.11 with CUDA 13, this process 2.13"),
    ({"pid_namespace": 8}, "pid: service"),
    ({"shm_filesystem": 8}, "ipc: service"),
]


@pytest.mark.parametrize(("difference", "named"), OBSTACLES)
def test_each_difference_from_the_server_is_an_obstacle(
    difference: dict[str, Any], named: str
) -> None:
    assert OWN.obstacles(SERVER) == []
    (problem,) = replace(OWN, **difference).obstacles(SERVER)
    assert named in problem


def test_all_obstacles_are_named_at_once() -> None:
    elsewhere = OwnPlace(devices={}, torch="2.13", pid_namespace=1, shm_filesystem=1)
    with pytest.raises(UnreachableWeights) as refused:
        OpenedCuda.open(CudaMemory(place=SERVER, segments=()), elsewhere)
    assert str(refused.value).count("\n") == 4


def test_the_namespace_and_the_file_system_are_read_from_the_kernel() -> None:
    own = OwnPlace.find()
    assert (own.pid_namespace, own.shm_filesystem) == (pid_namespace(), shm_filesystem())
    assert own.pid_namespace > 0
