"""The archived system's own code from the package index, and a run of our trainer on its data."""

from __future__ import annotations

import pytest

from tests.compat.training_run import TrainingRun, train
from tests.compat.upstream_install import NoPackageIndex, Upstream, ensure_upstream
from tests.fixtures.inference import InferenceServer
from tests.fixtures.run_api import start_run_api


@pytest.fixture(scope="session")
def upstream() -> Upstream:
    try:
        return ensure_upstream()
    except NoPackageIndex as error:
        pytest.skip(f"no package index: {error}")


@pytest.fixture(scope="session")
def training_run(
    upstream: Upstream,
    redis_url: str,
    shared_server: InferenceServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> TrainingRun:
    """Afterwards the session's inference server serves the run's `final_model`."""
    directory = tmp_path_factory.mktemp("training-run")
    api = start_run_api(redis_url, directory, run_id=directory.name)
    try:
        return train(upstream, api.url, shared_server, directory)
    finally:
        api.process.stop()
