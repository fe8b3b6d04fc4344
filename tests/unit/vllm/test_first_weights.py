"""What a server that starts in the middle of a run begins with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from grpo_core.weight_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    UnusableWeights,
    WeightKind,
    directory_digest,
)
from grpo_core.wire import PolicyVersion
from grpo_vllm.engine_plan import PlannedWeights
from grpo_vllm.served_record import ServedWeights
from grpo_vllm.settings import ServerSettings, load_server_settings
from grpo_vllm.supervisor.first_weights import first_weights, found_serving, recorded

MODEL = "some-model"


@dataclass
class Record:
    served: ServedWeights | None
    noted: list[ServedWeights] = field(default_factory=list)

    async def read(self, deadline_s: float) -> ServedWeights | None:  # noqa: ARG002
        return self.served

    async def note(self, served: ServedWeights) -> None:
        self.noted.append(served)


def server(directory: Path, *flags: str) -> ServerSettings:
    return load_server_settings(["--model", MODEL, "--weights-dir", str(directory), *flags])


@pytest.fixture
def adapter(tmp_path: Path) -> ServedWeights:
    path = tmp_path / "adapter"
    path.mkdir()
    (path / ADAPTER_CONFIG).write_text('{"r": 8}')
    (path / ADAPTER_WEIGHTS).write_text("weights")
    return ServedWeights(
        version=PolicyVersion(2, 7),
        intact=True,
        trained=True,
        kind="adapter",
        path=str(path),
        sha256=directory_digest(path),
        model=MODEL,
    )


async def test_what_was_served_last_is_served_again(tmp_path: Path, adapter: ServedWeights) -> None:
    record = Record(adapter)
    weights = await first_weights(server(tmp_path, "--enable-lora"), record)
    assert weights.adapter == tmp_path / "adapter"
    assert (weights.version, weights.trained) == (PolicyVersion(2, 7), True)
    assert recorded(weights, MODEL) == adapter
    assert record.noted == []


async def test_a_run_that_was_served_nothing(tmp_path: Path) -> None:
    assert await first_weights(server(tmp_path), Record(None)) == PlannedWeights()


@pytest.mark.parametrize(
    ("flags", "change"),
    [
        ((), {}),  # an adapter, and this server takes none
        (("--enable-lora",), {"kind": "checkpoint"}),
        (("--enable-lora",), {"kind": "", "path": ""}),  # written in place
        (("--enable-lora",), {"model": "another-model"}),
        (("--enable-lora", "--no-await-weights"), {}),
    ],
)
async def test_weights_of_another_mode_or_model_give_way_to_the_model_under_a_new_epoch(
    tmp_path: Path, adapter: ServedWeights, flags: tuple[str, ...], change: dict[str, str]
) -> None:
    record = Record(replace(adapter, **change))  # type: ignore[arg-type]
    weights = await first_weights(server(tmp_path, *flags), record)
    assert weights == PlannedWeights(version=PolicyVersion(3, 0))
    assert [(noted.version, noted.trained) for noted in record.noted] == [
        (PolicyVersion(3, 0), False)
    ]


async def test_a_name_that_no_trainer_made_is_kept(tmp_path: Path, adapter: ServedWeights) -> None:
    untrained = replace(adapter, trained=False, kind="", path="", sha256="")
    weights = await first_weights(server(tmp_path), Record(untrained))
    assert weights == PlannedWeights(version=PolicyVersion(2, 7))


async def test_damaged_files_stop_the_start(tmp_path: Path, adapter: ServedWeights) -> None:
    (tmp_path / "adapter" / ADAPTER_WEIGHTS).write_text("other weights")
    with pytest.raises(UnusableWeights, match=r"policy version \(2, 7\) last.*--no-await-weights"):
        await first_weights(server(tmp_path, "--enable-lora"), Record(adapter))


async def test_where_a_trainer_writes_in_place_the_engine_process_finds_out(
    tmp_path: Path, adapter: ServedWeights
) -> None:
    assert await first_weights(server(tmp_path, "--share-weights"), Record(adapter)) == (
        PlannedWeights()
    )


def test_what_an_engine_serves_unasked(adapter: ServedWeights) -> None:
    version = PolicyVersion(4, 2)
    assert found_serving(version, None, in_memory=True).kind_name == "memory"
    assert found_serving(version, None, in_memory=False) == PlannedWeights(version=version)
    by_hand = found_serving(version, {"adapter_path": adapter.path}, in_memory=False)
    assert (by_hand.kind, by_hand.sha256) == (WeightKind.ADAPTER, adapter.sha256)
