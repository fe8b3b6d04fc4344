#!/usr/bin/env python3
"""Seven tests of this installation without a server: `python run_tests.py`.

They use a small model in this process. Exit status 1 if one fails.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import unittest
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from rich.console import Console

from grpo_core.cpu import prepare_cpu
from grpo_core.evaluation.statistics import mean_at_k, pass_at_k
from grpo_core.logs import configure_logging
from grpo_core.tree.objectives import Objective
from grpo_runs.offline.command_line import words_for_hydra
from grpo_runs.offline.errors import KeysInvalid
from grpo_runs.offline.keys import CONFIG_FILE, OfflineKeys
from grpo_runs.offline.run_files import RunFiles, resumed_keys
from grpo_runs.offline.screen import OfflineScreen
from grpo_trainer.coefficients import KlCoefficient

ITERATIONS = 2


def run_small(directory: Path, iterations: int, evaluated: int) -> RunFiles:
    """A run of a small model in this process. Args: evaluated: number of items"""
    from grpo_tiny_model.model import ensure_tiny_model

    screen = quiet_screen()
    model = str(ensure_tiny_model())
    content = {
        "model": {"train_id": model, "ref_id": model, "device": "cpu"},
        "generation": {"backend": "local", "max_new_tokens": 8},
        "eval": {"backend": "local", "max_new_tokens": 8, "num_ids": evaluated},
        "train": {"iterations": iterations, "lr": 1e-4},
    }
    return run_with(content, directory, screen)


def run_with(content: Mapping[str, Any], directory: Path, screen: OfflineScreen) -> RunFiles:
    """Args: content: keys that are not the default"""
    from grpo_runs.offline.loop import run_offline

    run_offline(OfflineKeys.model_validate(content), directory, screen)
    return RunFiles(directory)


def quiet_screen() -> OfflineScreen:
    """Only warnings are shown."""
    from transformers.utils.logging import disable_progress_bar

    configure_logging("offline", "WARNING")
    disable_progress_bar()
    return OfflineScreen(Console(quiet=True))


@cache
def run() -> RunFiles:
    """A run of two iterations, which several tests look at."""
    return run_small(Path(tempfile.mkdtemp(prefix="grpo-offline-")), ITERATIONS, 4)


def records() -> list[dict[str, Any]]:
    return [json.loads(run().train(number).read_text()) for number in range(ITERATIONS)]


def test_configuration() -> None:
    with initialize_config_dir(str(CONFIG_FILE.parent)):
        content = OmegaConf.to_container(compose(CONFIG_FILE.stem), resolve=True)
    assert OfflineKeys.model_validate(content) == OfflineKeys.model_validate({})
    assert words_for_hydra(["-m", "train.lr=[1e-5,2e-5]"]) == ["-m", "train.lr=1e-5,2e-5"]
    with unittest.TestCase().assertRaisesRegex(KeysInvalid, "-m"):  # noqa: PT027 - without pytest
        words_for_hydra(["train.lr=[1e-5,2e-5]"])


def test_kl_divergence_and_its_control() -> None:
    import torch

    from grpo_trainer.losses import kl_terms

    distance = torch.tensor([math.log(2)])
    found = [float(kl_terms(distance, torch.zeros(1), name)) for name in ("k1", "k2", "k3")]
    assert all(abs(a - b) < 1e-4 for a, b in zip(found, (0.6931, 0.2402, 0.1931), strict=True))
    coefficient = KlCoefficient("adaptive", 0.05, 0.04, 10_000)
    coefficient.observe(0.08, 128)
    assert abs(coefficient.value - 0.050128) < 1e-6, coefficient.value


def test_maxent_weights() -> None:
    import torch

    from grpo_trainer.advantages import completion_weights

    scores, reference = torch.tensor([1.0, 0, 0, 0]), torch.tensor([-0.5, -0.4, -1, -2])
    found = completion_weights(scores, reference, Objective(maxent_tau=0.2), beta=0.1)
    expected = torch.tensor([0.918511, 0.033878, 0.027737, 0.019874])
    assert torch.allclose(found.float(), expected, atol=1e-5)


def test_evaluation_metrics() -> None:
    assert abs(mean_at_k((0.0, 0.3, 1.0, 0.0), 2) - 0.6) < 1e-9
    assert pass_at_k(4, 1, 2) == 0.5


def test_training_records() -> None:
    for record in records():
        parts = record["loss_pg"] + record["loss_kl"] + record["loss_entropy"]
        assert abs(record["loss_total"] - parts) < 1e-6
        assert abs(record["loss_kl"] - record["kl_coef"] * record["kl_divergence"]) < 1e-6
        assert record["served_step"] < record["trained_step"]


def test_evaluations_and_pages() -> None:
    for number in range(ITERATIONS):
        evaluation = json.loads(run().evaluation(number).read_text())
        assert {"pass@1", "mean@1"} <= evaluation.keys()
    assert run().plot.stat().st_size > 0
    assert (run().path / "report.html").stat().st_size > 0


def test_models_and_resuming() -> None:
    for number in range(ITERATIONS):
        assert (run().path / "checkpoints" / f"iter_{number:03}" / "config.json").is_file()
    before = len(records())
    run_with(resumed_keys(run().path), run().path, quiet_screen())
    assert len(records()) == before


def main(names: Mapping[str, Any], what: str, facts: Callable[[], str] = str) -> NoReturn:
    """Run all functions that begin with `test_`, show how many passed, and end the process.

    Args: names: those of the script's module; what: "passed"; facts: lines above, after the tests
    """
    prepare_cpu()  # before torch is imported
    tests = [value for name, value in names.items() if name.startswith("test_")]
    suite = unittest.TestSuite(map(unittest.FunctionTestCase, tests))
    result = unittest.TextTestRunner(sys.stdout, verbosity=2).run(suite)
    passed = len(tests) - len(result.failures) - len(result.errors)
    sys.stdout.write(f"{facts()}{passed}/{len(tests)} {what}\n")
    raise SystemExit(passed < len(tests))


if __name__ == "__main__":
    main(globals(), "tests passed")
