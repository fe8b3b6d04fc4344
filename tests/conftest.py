"""Fixtures live in `tests/fixtures/`, one file per service."""

pytest_plugins = ["tests.fixtures.inference", "tests.fixtures.redis", "tests.fixtures.run_api"]
