"""How long a version of the weights takes from the trainer to a verified copy of a server on the
same machine, by files and by a process group:

    python -m benchmarks.weight_transport --directory DIRECTORY

Trainer and server are processes of their own; the server is its fetcher and one receiver, without
an engine. Each version changes every 50th weight, as a step with a small learning rate does in
bfloat16. The ways take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.report import number, publish_table, today
from grpo_core.weights.collective import GroupAddress
from grpo_core.weights.version_log import Slot
from grpo_core.weights.versions import Announcement
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.model.loading import TrainedWeights
from grpo_trainer.weight_sync.collective import TransferGroup, streams_of
from grpo_trainer.weight_sync.directories import VersionDirectories, announcement_of
from grpo_trainer.weight_sync.source import WeightSource
from grpo_vllm.engine.vllm_compat.collective import Receiver
from grpo_vllm.weights.fetch import Fetcher, HttpTransport, Staged
from grpo_vllm.weights.staging import Staging

SECTION = "Weights to a server: files and a process group"
SERVER, SILENT_S, EVERY = "a", 60.0, 50
WAYS = IN_PLACE, OVER_HTTP, GROUP = "files, in place", "files, by HTTP", "process group"
HOST = torch.device("cpu")
Seconds = dict[str, list[float]]
"""By way."""


class Sources:
    """`ServerVersionLog` with the trainer as the only source. Args: announced: by it"""

    def __init__(self, source: str, announced: list[Announcement]) -> None:
        self._source = source
        self._announced = announced

    async def sources(self, _: PolicyVersion) -> list[str]:
        return [self._source]

    async def peers(self, *_: Any) -> list[str]:
        return []

    async def between(self, after: PolicyVersion, last: PolicyVersion) -> list[Announcement]:
        return [each for each in self._announced if after < each.version <= last]

    async def take_slot(self, _: list[str]) -> Slot:
        return Slot(self._source, 0)

    async def renew_slot(self, _: Slot) -> bool:
        return True

    async def release_slot(self, _: Slot) -> None:
        return None


def serve(told: Connection, staging: Path, loads_from: Path) -> None:
    """Fetch each version that is announced by (way, source, announcement), and say when it is here,
    with the CPU seconds of this process.
    An address of a group is joined."""
    torch.set_num_threads(1)
    held: dict[str, dict[str, Staged]] = {way: {} for way in WAYS}
    announced: list[Announcement] = []
    while (word := told.recv()) is not None:
        if isinstance(word, GroupAddress):
            Receiver(word, 1, 0, 1, staging / GROUP, HOST).start()
            continue
        way, source, wanted = word
        announced.append(wanted)
        staged = asyncio.run(_fetched(way, source, announced, held[way], staging, loads_from))
        for old in held[way].values():
            if not old.in_place and old.directory is not None:
                shutil.rmtree(old.directory)
        held[way] = {wanted.id: staged}
        told.send(time.process_time())


async def _fetched(
    way: str,
    source: str,
    announced: list[Announcement],
    held: dict[str, Staged],
    staging: Path,
    loads_from: Path,
) -> Staged:
    async with HttpTransport(None) as transport:
        versions: Any = Sources(source, announced)
        place = Staging(staging / way.replace(", ", "-"), loads_from)
        return await Fetcher(versions, transport, place).fetch(announced[-1], held)


def policy_of(gigabytes: float) -> Any:
    """In bfloat16, with layers of a model of half a billion weights."""
    layer = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14}
    sizes = layer | {"num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True}
    layers = max(1, round((gigabytes * 1e9 - 272e6) / 29.8e6))
    with torch.device("meta"):
        policy: Any = Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=layers, **sizes))
    policy = policy.to_empty(device="cpu").to(torch.bfloat16)
    policy.tie_weights()
    for parameter in policy.parameters():
        parameter.data.uniform_(-1, 1)
    return policy


@torch.no_grad()
def change(policy: Any, version: int) -> None:
    for parameter in policy.parameters():
        flat = parameter.view(-1)
        flat[version % EVERY :: EVERY] *= -1


def measured(directory: Path, gigabytes: float, rounds: int) -> tuple[float, Seconds, Seconds]:
    """The size in GB; the seconds of each way, and the CPU seconds of both processes together."""
    policy, seconds = policy_of(gigabytes), {way: list[float]() for way in WAYS}
    busy, served_s = {way: list[float]() for way in WAYS}, 0.0
    policy.config.save_pretrained(directory / "model")
    weights = TrainedWeights(str(directory / "model"), None)
    folders = {way: directory / f"served-{number}" for number, way in enumerate(WAYS)}
    for folder in folders.values():
        folder.mkdir()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    with ExitStack() as stack:
        staging = Path(stack.enter_context(TemporaryDirectory(dir="/dev/shm")))
        (staging / GROUP).mkdir(mode=0o700)
        server = multiprocessing.get_context("spawn").Process(
            target=serve, args=(theirs, staging, folders[IN_PLACE])
        )
        server.start()
        stack.callback(server.join)
        stack.callback(ours.send, None)
        group = TransferGroup("localhost", HOST, "gloo", SILENT_S, {SERVER: (0, 1)})
        ours.send(group.address)
        group.connect()
        source = stack.enter_context(closing(WeightSource(folders[OVER_HTTP], None, 0, None)))
        sources = {IN_PLACE: folders[IN_PLACE].as_uri(), OVER_HTTP: source.open()[1], GROUP: ""}
        written = {way: VersionDirectories(folders[way], with_deltas=True) for way in WAYS[:2]}

        def by_files(way: str, version: PolicyVersion) -> Announcement:
            return written[way].write(version, weights, policy)

        def by_group(version: PolicyVersion) -> Announcement:
            with TemporaryDirectory() as name:
                manifest = group.send(version, streams_of(weights, policy, Path(name)))
            return announcement_of(version, weights, manifest)

        ways: dict[str, Callable[[PolicyVersion], Announcement]] = {
            **{way: partial(by_files, way) for way in WAYS[:2]},
            GROUP: by_group,
        }
        for number_ in range(rounds + 1):  # the first has no delta, and is not counted
            change(policy, number_)
            for way, publish_by in ways.items():
                began, before_s = time.monotonic(), served_s + time.process_time()
                announced = publish_by(PolicyVersion(1, number_))
                ours.send((way, sources[way], announced))
                served_s = ours.recv()
                if number_:
                    seconds[way].append(time.monotonic() - began)
                    busy[way].append(served_s + time.process_time() - before_s)
            for each in written.values():
                each.remove_older(())
    return sum(p.nbytes for p in policy.parameters()) / 1e9, seconds, busy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True, help="on the trainer's disk")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, help="Markdown file whose section is replaced")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory(dir=options.directory) as name:
        size, seconds, busy = measured(Path(name), options.gigabytes, options.rounds)
    group = median(seconds[GROUP])
    rows = [["", "seconds", "process group over it", "goal", "CPU seconds of both"]]
    for way, found in seconds.items():
        share = group / median(found)
        told = f"{number(median(found))} ({number(min(found))} to {number(max(found))})"
        goal = "" if way == GROUP else "0.5: met" if share <= 0.5 else "0.5: **missed**"
        over = "" if way == GROUP else f"{share:.2f}"
        rows.append([way, told, over, goal, number(median(busy[way]))])
    about = (
        f"`python -m benchmarks.weight_transport --directory DIRECTORY` on {today()}: {size:.2f} "
        f"GB of weights in bfloat16 between two processes, {options.rounds} versions in turn: "
        "median (lowest to highest) from the weights in the trainer's memory to the server's "
        "verified copy in /dev/shm, or to the trainer's verified files. Every 50th weight changes. "
        "gloo."
    )
    publish_table(SECTION, about, rows, options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
