"""Options of the commands, and checks of them before a start."""

from grpo_runs.settings.compare import CompareSettings
from grpo_runs.settings.evaluate import EvalSettings
from grpo_runs.settings.rollouts import ReportSettings, RolloutsSettings
from grpo_runs.settings.run import DemoSettings, RunSettings
from grpo_runs.settings.sft import SftSettings
from grpo_runs.settings.watch import WatchSettings

__all__ = [
    "CompareSettings",
    "DemoSettings",
    "EvalSettings",
    "ReportSettings",
    "RolloutsSettings",
    "RunSettings",
    "SftSettings",
    "WatchSettings",
]
