"""Runs of Trackio. As a program, this module is the child process of `TrackerSink`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_core.errors import TrackioUnavailable
from grpo_core.tracker import CannotOpen, Tool, TrackerSink, serve

PROJECT = "grpo"
TRACKIO = Tool(
    name="Trackio",
    event="trackio",
    module="grpo_core.trackio_run",
    start_advice="see the messages of Trackio above, or omit trackio from --report-to",
    failure_hint="see the messages of Trackio above; --metrics-file has every record",
    unavailable=TrackioUnavailable,
)


def start_trackio(
    project: str, group: str | None, config: Mapping[str, Any], *, name: str, goes_on: bool
) -> TrackerSink:
    """Start the child process and wait until Trackio has opened a run.

    Args:
        config: the options to show
        name: of the run; a run that goes on finds its records by it
        goes_on: the run has records already, and repeats some of its steps with the same results

    Raises:
        TrackioUnavailable: Trackio did not open a run.
    """
    start = {"project": project, "group": group, "config": config, "name": name}
    return TrackerSink.started(TRACKIO, start | {"goes_on": goes_on})


class _OpenTrackio:
    def __init__(self, start: dict[str, Any]) -> None:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage
        from trackio.utils import TRACKIO_DIR

        try:
            self._run = trackio.init(
                project=start["project"],
                name=start["name"],
                group=start["group"],
                config=start["config"],
                resume="allow" if start["goes_on"] else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        except Exception as error:  # noqa: BLE001  # it has no error of its own
            raise CannotOpen(f"{type(error).__name__}: {error}") from None
        last = SQLiteStorage.get_max_step_for_run(
            start["project"], self._run.name, run_id=self._run.id
        )
        self._logged = last or 0
        self.where = str(TRACKIO_DIR)

    def log(self, record: dict[str, Any]) -> None:
        """Trackio would show a step that the run repeats twice."""
        step = record.pop("step")
        if step > self._logged:
            self._run.log(record, step=step)

    def log_table(self, table: dict[str, Any]) -> None:
        """Rollouts are in files of their own."""

    def finish(self, exit_code: int) -> None:  # noqa: ARG002
        self._run.finish()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    serve(_OpenTrackio)
