"""A wheel is held against the table of internals as if it were imported."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.inference import vllm_wheel
from tests.inference.other_vllm import required
from tests.inference.vllm_hooks import Hook
from tests.inference.vllm_wheel import WheelVllm, gaps

FILES = {
    "vllm-0.33.0.dist-info/METADATA": "",
    "vllm/__init__.py": "",
    "vllm/engine/__init__.py": "from .base import Base as Renamed\nfrom . import base\n",
    "vllm/engine/base.py": """
from abc import abstractmethod
from typing import TYPE_CHECKING
from torch import Tensor

if TYPE_CHECKING:
    on_demand: "Base"
try:
    import fast
except ImportError:
    fast = None

class Base:
    size: int

    @abstractmethod
    def promised(self): ...

    @abstractmethod
    def stop(self, grace): ...
""",
    "vllm/engine/engine.py": """
from vllm.engine import Renamed
from vllm.engine.base import Base

class Engine(Renamed["T"]):
    async def pause(self, mode, *, clear_cache=True):
        await self.core.pause(mode)

    def stop(self, grace): ...

Alias = Engine
""",
    "vllm/sampling_params.py": "class SamplingParams:\n    top_p: float\n    _own: int\n",
}


@pytest.fixture
def wheel(tmp_path: Path) -> Iterator[WheelVllm]:
    path = tmp_path / "vllm-0.33.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(name, text)
    with zipfile.ZipFile(path) as archive:
        yield WheelVllm(archive)


@pytest.mark.parametrize(
    "place",
    [
        "vllm.engine.engine:",
        "vllm.engine:Renamed.size",
        "vllm.engine:base",
        "vllm.engine.engine:Engine.pause(mode, clear_cache) ~ self.core.pause(",
        "vllm.engine.engine:Alias.size",
        "vllm.engine.engine:Engine.stop(grace)",
        "vllm.engine.engine: ~ Alias =",
        "vllm.engine.base:Base(size)",
        "vllm.engine.base:on_demand.size",
        "vllm.engine.base:Tensor",
        "vllm.engine.base:fast",
    ],
)
def test_what_a_wheel_has_is_found(place: str, wheel: WheelVllm) -> None:
    assert Hook((place,)).problem(wheel) is None


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("vllm.gone:", "there is no module vllm.gone"),
        ("vllm.engine.engine:Gone", "vllm.engine.engine: there is no Gone (Gone)"),
        ("vllm.engine.engine:Engine.gone", "there is no gone (Engine.gone)"),
        ("vllm.engine.engine:Engine.promised", "there is no promised"),
        ("vllm.engine.engine:Engine.pause(mode, grace)", "Engine.pause takes no grace"),
        ("vllm.engine.engine:Engine.pause ~ self.core.stop", "does not say self.core.stop"),
        ("vllm.engine.engine:Engine.stop ~ self.core.pause", "does not say self.core.pause"),
    ],
)
def test_what_it_lacks_is_named(place: str, problem: str, wheel: WheelVllm) -> None:
    assert problem in str(Hook((place,)).problem(wheel))
    assert problem in str(Hook((place, "vllm.also_gone:")).problem(wheel))
    assert Hook((place, "vllm.engine:")).problem(wheel) is None  # it moved


def test_gaps_are_those_of_this_version_and_new_sampling_parameters(
    wheel: WheelVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = [Hook(("vllm.old:",)), Hook(("vllm.next:",), since=(0, 34)), Hook(("vllm.engine:",))]
    monkeypatch.setattr(vllm_wheel, "HOOKS", hooks)
    assert gaps(wheel) == ["there is no module vllm.old"]
    monkeypatch.setattr(vllm_wheel, "SAMPLING_PARAMETERS", frozenset())
    assert gaps(wheel)[1:] == ["SamplingParams.top_p is not reviewed"]


def test_another_vllm_gets_what_it_requires_and_no_cuda_builds() -> None:
    lines = ["torch==2.11.0+cpu; os_name == 'posix'", "torchaudio", "mcp[cli]<3; extra == 'x'"]
    assert required([*lines, "setuptools==77.0.3", "mistral_common[image]>=1.11"]) == [
        *("torch==2.11.0", "setuptools==77.0.3", "mistral_common[image]>=1.11")
    ]
