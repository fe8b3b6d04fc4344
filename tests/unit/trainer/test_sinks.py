"""Records on disk and in W&B: the real package, offline, and what it wrote."""

from __future__ import annotations

import contextlib
import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from structlog.testing import capture_logs

from grpo_trainer.errors import NonFiniteLoss, WandbUnavailable
from grpo_trainer.settings import TrainerSettings
from grpo_trainer.sinks import append_record, open_sinks
from grpo_trainer.wandb_sink import FINISH_DEADLINE_S, WandbSink, start_wandb

BLOCK, HEADER = 32768, 7
FULL, LAST = 1, 4


def test_records_are_appended_whole_and_never_hold_nan(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    append_record(path, {"step": 1})
    append_record(path, {"step": 2})
    with pytest.raises(ValueError, match="not JSON compliant"):
        append_record(path, {"step": float("nan")})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1},
        {"step": 2},
    ]


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """W&B writes into this directory and speaks to nobody."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    return tmp_path


def settings(**changes: Any) -> TrainerSettings:
    values: dict[str, Any] = {
        **{"model_name": "m", "weight_bridge_mode": "shared_vllm", "lr": 0.25},
        **{"use_wandb": True, "wandb_project": "proj", "wandb_group": "grp"},
    }
    return TrainerSettings(**(values | changes))


def written_by_wandb(directory: Path) -> list[Any]:
    """The records of the one offline run, from its transaction log (LevelDB's log format)."""
    from wandb.proto import wandb_internal_pb2 as proto

    (path,) = directory.glob("wandb/offline-run-*/run-*.wandb")
    found = []
    for payload in leveldb_records(path.read_bytes()):
        record = proto.Record()
        record.ParseFromString(payload)
        found.append(record)
    return found


def leveldb_records(data: bytes) -> Iterator[bytes]:
    position, parts = HEADER, b""  # W&B's own header is as long as a chunk's
    while position + HEADER <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + HEADER])
        parts += data[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind in (FULL, LAST):
            yield parts
            parts = b""


def history(records: list[Any]) -> list[dict[str, Any]]:
    rows = [r.history for r in records if r.WhichOneof("record_type") == "history"]
    return [{item.nested_key[0]: json.loads(item.value_json) for item in row.item} for row in rows]


def test_an_offline_run_holds_every_record_the_settings_and_its_end(offline: Path) -> None:
    metrics = offline / "metrics.jsonl"
    sent = [{"step": step, "train/loss": 0.5 * step, "grpo/mean_ratio": 1.0} for step in (1, 2, 3)]
    with capture_logs() as logs, open_sinks(settings(metrics_file=metrics)) as write:
        for record in sent:
            write(record)
    assert [entry["log_level"] for entry in logs] == ["info"]
    records = written_by_wandb(offline)
    kept = [{key: row[key] for key in sent[0]} for row in history(records)]
    assert kept == sent == [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["_step"] for row in history(records)] == [1, 2, 3]
    (run,) = [r.run for r in records if r.WhichOneof("record_type") == "run"]
    assert (run.project, run.run_group) == ("proj", "grp")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (config["lr"], config["model_name"]) == (0.25, "m")
    (end,) = [r.exit for r in records if r.WhichOneof("record_type") == "exit"]
    assert end.exit_code == 0


def test_a_run_that_fails_is_marked_as_failed(offline: Path) -> None:
    def fail_after_one_step() -> None:
        with open_sinks(settings()) as write:
            write({"step": 1})
            raise NonFiniteLoss("step 1")

    with pytest.raises(NonFiniteLoss):
        fail_after_one_step()
    records = written_by_wandb(offline)
    assert [row["step"] for row in history(records)] == [1]
    (end,) = [r.exit for r in records if r.WhichOneof("record_type") == "exit"]
    assert end.exit_code == 1


def processes(sink: WandbSink) -> list[psutil.Process]:
    """Ours and W&B's own below it."""
    child = psutil.Process(sink.pid)
    return [child, *child.children(recursive=True)]


def assert_all_end(family: list[psutil.Process]) -> None:
    """W&B's own processes watch for the death of ours, once they may run again."""
    deadline = time.monotonic() + 60
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
    while left := [p for p in family if is_alive(p)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("fate", ["kill", "suspend"])
def test_w_and_b_that_dies_or_hangs_is_told_once_and_nothing_waits_for_it(fate: str) -> None:
    with capture_logs() as logs:
        sink = start_wandb(settings())
        family = processes(sink)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # W&B's own end when ours is killed
                getattr(process, fate)()
        started = time.monotonic()
        for step in range(1, 2001):
            sink.write({"step": step, **{f"metric/{i}": 0.5 for i in range(40)}})
        sink.close(failed=False)
        assert time.monotonic() - started < 0.8 * FINISH_DEADLINE_S
    warnings = [entry for entry in logs if entry["log_level"] == "warning"]
    assert len(warnings) == 1
    assert "goes on without it" in warnings[0]["event"]
    assert_all_end(family)


@pytest.mark.usefixtures("offline")
def test_finishing_has_a_deadline() -> None:
    with capture_logs() as logs:
        sink = start_wandb(settings())
        family = processes(sink)
        sink.write({"step": 1})
        for process in family:
            process.suspend()
        started = time.monotonic()
        sink.close(failed=False, deadline_s=0.5)
        assert 0.5 <= time.monotonic() - started < 0.8 * FINISH_DEADLINE_S
    assert "did not finish" in logs[-1]["why"]
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def test_nobody_logged_in_stops_at_start_in_w_and_bs_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(WandbUnavailable, match=r"API key|log in") as failed, open_sinks(settings()):
        pass
    assert "WANDB_MODE=offline" in str(failed.value)


def test_without_the_flag_nothing_is_started_or_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would fail
    before = set(psutil.Process().children())
    with open_sinks(settings(use_wandb=False, metrics_file=tmp_path / "m.jsonl")) as write:
        write({"step": 1})
        assert set(psutil.Process().children()) <= before


def test_the_key_in_a_file_reaches_wandb_and_an_empty_file_counts_as_none(
    offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    key = offline / "key"
    for content, seen in (("s3cret\n", "s3cret"), ("", None)):
        key.write_text(content)
        sink = start_wandb(settings(wandb_key_file=key))
        try:
            assert psutil.Process(sink.pid).environ().get("WANDB_API_KEY") == seen
        finally:
            sink.abandon()


def test_a_key_file_that_is_not_there_is_named(offline: Path) -> None:
    with pytest.raises(WandbUnavailable, match=r"--wandb-key-file .*nowhere"):
        start_wandb(settings(wandb_key_file=offline / "nowhere"))
