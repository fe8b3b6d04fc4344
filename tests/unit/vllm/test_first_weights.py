"""The first weights of a server that starts during a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_core.settings import load_settings
from grpo_core.tree.server import ServerSettings
from grpo_core.weights.directory_checks import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    UnusableWeights,
    directory_digest,
)
from grpo_core.weights.ref import WeightKind, WeightRef
from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.supervisor.joining import first_weights
from grpo_vllm.weights.served_store import ServedWeights
from tests.unit.vllm.fake_engine import Record

MODEL = "some-model"
V27, V30 = PolicyVersion(2, 7), PolicyVersion(3, 0)
UNTRAINED = ServedWeights(WeightRef(version=V30))
IN_MEMORY = WeightRef(version=V27, kind=WeightKind.MEMORY)


@pytest.fixture
def adapter(tmp_path: Path) -> ServedWeights:
    path = tmp_path / "adapter"
    path.mkdir()
    (path / ADAPTER_CONFIG).write_text('{"r": 8}')
    (path / ADAPTER_WEIGHTS).write_text("weights")
    weights = WeightRef(
        version=V27, kind=WeightKind.ADAPTER, path=path, digest=directory_digest(path)
    )
    return ServedWeights(weights, model=MODEL)


async def begins_with(record: Record, *flags: str) -> WeightRef:
    directory = (record.served and record.served.weights.path) or Path("/weights")
    given = ["--model", MODEL, "--weights-dir", str(directory.parent), *flags]
    return await first_weights(load_settings(ServerSettings, given), record)


async def test_the_last_served_weights_are_served_again(adapter: ServedWeights) -> None:
    record = Record(adapter)
    weights = await begins_with(record, "--enable-lora")
    assert weights == adapter.weights
    assert record.saved == []


@pytest.mark.parametrize(
    ("flags", "change"),
    [
        pytest.param((), {}, id="an adapter, and this server takes none"),
        pytest.param(("--enable-lora",), {"weights": IN_MEMORY}, id="written in place"),
        (("--enable-lora",), {"model": "another-model"}),
        (("--enable-lora", "--no-await-weights"), {}),
    ],
)
async def test_weights_of_another_mode_or_model_give_way_to_the_model_under_a_new_epoch(
    adapter: ServedWeights, flags: tuple[str, ...], change: dict[str, Any]
) -> None:
    record = Record(replace(adapter, **change))
    assert await begins_with(record, *flags) == WeightRef(version=V30)
    assert [saved.weights for saved in record.saved] == [WeightRef(version=V30)]


@pytest.mark.parametrize(
    ("served", "expected"),
    [
        pytest.param(None, WeightRef(), id="a new run"),
        pytest.param(UNTRAINED, WeightRef(version=V30), id="a name no trainer made"),
    ],
)
async def test_a_run_without_weights_on_disk_begins_with_the_model(
    served: ServedWeights | None, expected: WeightRef
) -> None:
    assert await begins_with(Record(served)) == expected


async def test_damaged_files_stop_the_start_of_a_named_run(adapter: ServedWeights) -> None:
    assert adapter.weights.path is not None
    (adapter.weights.path / ADAPTER_WEIGHTS).write_text("other weights")
    with pytest.raises(UnusableWeights, match=r"version \(2, 7\), which.*--no-await-weights"):
        await begins_with(Record(adapter), "--enable-lora", "--run-id", "day")
    assert await begins_with(Record(adapter), "--enable-lora") == WeightRef(version=V30)
