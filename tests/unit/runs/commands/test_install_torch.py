"""`make install` takes torch from the first index with a build for the device.

The indexes are directories with small packages called torch, and pip is the real one.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from unittest.mock import create_autospec

import pytest

from grpo_runs.commands import install_torch
from grpo_runs.commands.install_torch import install, is_usable, pinned_version

VERSION = pinned_version()
CPU, CUDA, NAMED_CUDA, XPU = f"{VERSION}+cpu", VERSION, f"{VERSION}+cu130", f"{VERSION}+xpu"


def index(directory: Path, *builds: str) -> str:
    """The URL of an index with these builds of torch, and with what its CUDA build needs."""
    for name, version in [("nvidia-cublas", "13.1"), *(("torch", build) for build in builds)]:
        place = directory / name
        place.mkdir(parents=True, exist_ok=True)
        stem = f"{name.replace('-', '_')}-{version}"
        needs = "Requires-Dist: nvidia-cublas\n" if version in (CUDA, NAMED_CUDA) else ""
        with zipfile.ZipFile(place / f"{stem}-py3-none-any.whl", "w") as wheel:
            info = f"{stem}.dist-info"
            wheel.writestr(
                f"{info}/METADATA",
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
            )
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
            wheel.writestr(f"{info}/RECORD", "")
        links = (f'<a href="{file.name}">{file.name}</a>' for file in place.iterdir())
        (place / "index.html").write_text("\n".join(links))
    return directory.as_uri()


@pytest.mark.parametrize(
    ("device", "configured", "pytorchs", "arguments"),
    [
        ("cpu", (CUDA, CPU), (), ("--no-deps", f"torch=={CPU}")),
        ("cpu", (CUDA,), (CPU,), ("--no-deps", "--index-url", "pytorchs", f"torch=={CPU}")),
        # What torch needs is on the same index.
        ("cpu", (CUDA,), (), (f"torch=={VERSION}",)),
        ("cuda", (CUDA, CPU), (), ("--no-deps", f"torch==={CUDA}")),
        ("cuda", (XPU, NAMED_CUDA, CPU), (), ("--no-deps", f"torch=={NAMED_CUDA}")),
        ("cuda", (CPU,), (), None),
    ],
)
def test_the_build_for_the_device_is_asked_for(
    device: str,
    configured: tuple[str, ...],
    pytorchs: tuple[str, ...],
    arguments: tuple[str, ...] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Args: arguments: of pip's installation; None if there is no build"""
    offers = {"": configured, "pytorchs": pytorchs}
    run_pip = create_autospec(install_torch.run_pip)
    monkeypatch.setattr(install_torch, "installed_version", lambda: "")
    monkeypatch.setattr(install_torch, "offered", lambda index, _seconds: offers[index])
    monkeypatch.setattr(install_torch, "run_pip", run_pip)
    if arguments is None:
        with pytest.raises(SystemExit, match=f"no build of torch .* DEVICE={device}"):
            install(device, "pytorchs")
    else:
        install(device, "pytorchs")
        run_pip.assert_called_once_with(*arguments)


@pytest.mark.parametrize(
    ("device", "configured", "pytorchs", "expected"),
    [
        # The next command installs what torch needs.
        ("cuda", (), (CUDA, CPU), {CUDA}),
        *(
            pytest.param(*row, marks=pytest.mark.full)
            for row in (
                ("cpu", (CUDA, CPU), (), {CPU}),
                ("cpu", (CUDA,), (CPU,), {CPU}),
                ("cpu", (CUDA,), None, {CUDA, "nvidia"}),
                ("cuda", (XPU, NAMED_CUDA, CPU), (), {NAMED_CUDA}),
                ("cuda", (CPU,), (NAMED_CUDA,), {NAMED_CUDA}),
            )
        ),
    ],
)
def test_the_first_index_with_a_build_for_the_device_is_taken(
    device: str,
    configured: tuple[str, ...],
    pytorchs: tuple[str, ...] | None,
    expected: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    installed = tmp_path / "installed"
    only_from(monkeypatch, index(tmp_path / "configured", *configured), installed)
    # Nothing listens on port 1.
    others = index(tmp_path / "other", *pytorchs) if pytorchs is not None else "http://127.0.0.1:1"
    install(device, others)
    found = {path.name.partition(".dist-info")[0] for path in installed.glob("*.dist-info")}
    assert {name.removeprefix("torch-").partition("_")[0] for name in found} == expected
    said = capfd.readouterr().out
    assert said.count("\n") == 1
    assert ("no index with a CPU build answers" in said) == (pytorchs is None)


@pytest.mark.full
@pytest.mark.parametrize(
    ("device", "given", "named"), [("cuda", "", "the package index"), ("cpu", "asked", "asked")]
)
def test_a_build_that_is_nowhere_is_named(
    device: str, given: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_from(monkeypatch, index(tmp_path / "configured", CPU), tmp_path / "installed")
    asked = given and index(tmp_path / given, CUDA)
    with pytest.raises(SystemExit, match=f"{named} has no build of torch .* DEVICE={device}"):
        install(device, index(tmp_path / "other"), asked)


@pytest.mark.parametrize(
    ("build", "device", "stays"),
    [
        (CPU, "cpu", True),
        (CUDA, "cpu", True),
        (NAMED_CUDA, "cuda", True),
        (CPU, "cuda", False),
        ("1.0+cpu", "cpu", False),
        ("", "cpu", False),
    ],
)
def test_a_build_that_works_stays(build: str, device: str, stays: bool) -> None:
    assert is_usable(build, VERSION, device) == stays


def only_from(monkeypatch: pytest.MonkeyPatch, url: str, target: Path) -> None:
    """Let pip look into this index alone, and install into a directory."""
    monkeypatch.setattr(install_torch, "installed_version", lambda: "")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", url)
    monkeypatch.setenv("PIP_TARGET", str(target))
    monkeypatch.setattr(install_torch, "SECONDS_TO_ANSWER", 1)
