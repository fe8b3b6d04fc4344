"""How a server is made to load one of the controls."""

from __future__ import annotations

import os
from pathlib import Path

from tests.negative_controls import grpo_negative_controls


def control_plugin(control: str, directory: Path) -> dict[str, str]:
    """Environment that makes vLLM load the control instead of our plugin."""
    metadata = directory / "grpo_negative_controls-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: grpo-negative-controls\nVersion: 0\n"
    )
    (metadata / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ngrpo_negative_controls = grpo_negative_controls:register\n"
    )
    source = Path(grpo_negative_controls.__file__).parent
    inherited = os.environ.get("PYTHONPATH")
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(directory), str(source), inherited))),
        "VLLM_PLUGINS": "grpo_negative_controls",
        grpo_negative_controls.VARIABLE: control,
    }
