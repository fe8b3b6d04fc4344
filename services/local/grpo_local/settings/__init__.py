"""Options of the commands, and checks of them before a start."""

from grpo_local.settings.compare import CompareSettings
from grpo_local.settings.demo import DemoSettings
from grpo_local.settings.evaluate import EvalSettings
from grpo_local.settings.rollouts import ReportSettings, RolloutsSettings
from grpo_local.settings.run import RunSettings

__all__ = [
    "CompareSettings",
    "DemoSettings",
    "EvalSettings",
    "ReportSettings",
    "RolloutsSettings",
    "RunSettings",
]
