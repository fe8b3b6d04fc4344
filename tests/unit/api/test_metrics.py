"""What `/metrics` shows of the run, beside the counters of requests."""

from grpo_api.metrics import Metrics, RunScrape
from grpo_api.store.run import RunStats
from grpo_api.store.servers import ServerCounts
from tests.support.scraping import series

STATS = RunStats._make([7] * len(RunStats._fields))


def shown_with(redis_disk_bytes: int | None, scrape: RunScrape | None) -> dict[str, float]:
    text = bytes(Metrics(redis_disk_bytes).exposition(scrape, "").body).decode()
    return {
        name.removeprefix("run_api_"): value
        for name, value in series(text).items()
        if name.startswith("run_api_")
    }


def test_servers_and_the_disk_of_redis() -> None:
    servers = [
        ServerCounts("a", "serving", 5, 2, 1),
        ServerCounts("b", "failed", 4, 0, 0),
        ServerCounts("gone", "", 0, 0, 0),
    ]
    shown = shown_with(1000, RunScrape(STATS, servers, 250))
    assert (
        shown.items()
        >= {
            "redis_up": 1,
            "refused_groups_total": 7,
            "num_steps": 7,
            "redis_append_only_file_bytes": 250,
            "redis_disk_bytes": 1000,
            "servers": 1,
            "servers_lost": 2,
            "server_step/a": 5,
            "server_step/b": 4,
            "server_restarts_total/a": 2,
            "server_crashes_total/a": 1,
            "server_crashes_total/b": 0,
        }.items()
    )
    assert "server_step/gone" not in shown


def test_what_is_unknown_is_absent() -> None:
    shown = shown_with(None, RunScrape(STATS, None, 250))
    assert not [name for name in shown if name.startswith(("redis_append", "redis_disk", "server"))]
    assert "redis_disk_bytes" not in shown_with(1000, RunScrape(STATS, None, None))
    assert shown_with(1000, None) == {"redis_up": 0}
