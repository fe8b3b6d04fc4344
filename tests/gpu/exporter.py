"""A process that exports a weight on the GPU and computes with it in a CUDA graph.

It does what the inference server does, without vLLM. `python -m tests.gpu.exporter SOCKET
GENERATION [--private-copy]` answers each line of its input with a line: `replay` with the sum of
the graph's output, `allocated` with the number of bytes that torch has allocated.
"""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path

import torch

from grpo_core.weights.shared_memory import ParameterMapping, WeightGrant, WeightManifest
from grpo_core.weights.socket import send_grant, send_refusal
from grpo_vllm.weights.memory import WeightMemory, exported, why_not_exportable

ROWS, COLUMNS = 4096, 4096
"""64 MiB in float32, so torch's allocator gives it its own block, beside a small one."""
SMALL = 8


class Graph:
    """y = x W, captured once. `private_copy`: use a copy of W instead of the exported one."""

    def __init__(self, private_copy: bool) -> None:
        self.weight = torch.zeros(ROWS, COLUMNS, device="cuda")
        self.bias = torch.zeros(SMALL, device="cuda")
        read = self.weight.clone() if private_copy else self.weight
        x = torch.ones(1, ROWS, device="cuda")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                x @ read
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = (x @ read).sum() + self.bias.sum()

    def replay(self) -> float:
        self._graph.replay()
        return float(self._output)


def manifest_of(
    memory: WeightMemory, generation: str, tensors: dict[str, torch.Tensor]
) -> WeightManifest:
    parameters = {
        name: ParameterMapping(
            offset=memory.offset_of(tensor) or 0,
            nbytes=tensor.nbytes,
            shape=tuple(tensor.shape),
            dtype="float32",
            vllm_name=name,
            slice=None,
        )
        for name, tensor in tensors.items()
    }
    return WeightManifest(
        generation=generation, model="proof", total_bytes=memory.total_bytes, parameters=parameters
    )


def serve(listener: socket.socket, memory: WeightMemory, manifest: WeightManifest) -> None:
    """Export once for each consumer. The connections stay open until this process ends."""
    connections = []
    while True:
        connection, _ = listener.accept()
        connections.append(connection)
        obstacle = why_not_exportable(memory)
        if obstacle is not None:
            send_refusal(connection, obstacle)
            continue
        send_grant(connection, WeightGrant(session="s", manifest=manifest, memory=exported(memory)))


def main() -> None:
    path, generation, *flags = sys.argv[1:]
    graph = Graph("--private-copy" in flags)
    tensors = {"weight": graph.weight, "bias": graph.bias}
    memory = WeightMemory(tensors.values())
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(Path(path)))
    listener.listen()
    arguments = (listener, memory, manifest_of(memory, generation, tensors))
    threading.Thread(target=serve, args=arguments, daemon=True).start()
    answers = {"replay": graph.replay, "allocated": torch.cuda.memory_allocated}
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(f"{answers[line.strip()]()}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
