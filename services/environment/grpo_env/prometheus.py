"""Counters of groups and of the inference servers' requests, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from grpo_env.inference.health import PoolState
from grpo_env.inference.pool import InferencePool
from grpo_env.rollout.groups import FailureReason
from grpo_env.rollout.producer import GroupCounts

PREFIX = "grpo_environment_"
OF_REPORT = {
    "mean_reward": "Mean reward of all graded completions.",
    "mean_completion_tokens": "Mean number of tokens of the graded completions.",
    "equal_scores_share": "Share (0 to 1) of graded groups whose scores are all equal.",
    "dropped_share": "Share (0 to 1) of the newest groups that were dropped for equal scores.",
    "tokens_per_s": "Sampled tokens per second.",
}
"""Fields of the newest event `groups.counted`, most of them over the five seconds before it."""


@dataclass(eq=False)
class EnvironmentMetrics(Collector):
    """Reads what the environment counts anyway, at a scrape, in another thread.

    Args:
        groups_in_progress: gives the number of groups being sampled, graded or submitted
        items: gives the number of items by task and pool of the curriculum
    """

    counts: GroupCounts
    pool: InferencePool
    groups_in_progress: Callable[[], int]
    items: Callable[[], Mapping[str, Mapping[str, int]]]

    def collect(self) -> Iterator[Metric]:
        counts = self.counts
        yield CounterMetricFamily(
            f"{PREFIX}groups_sent", "Number of groups that run-api took.", counts.groups_sent
        )
        lost = CounterMetricFamily(
            f"{PREFIX}groups_lost", "Number of groups that were dropped.", labels=["reason"]
        )
        for reason in FailureReason:
            lost.add_metric([reason.value], counts.failures[reason])
        yield lost
        yield GaugeMetricFamily(
            f"{PREFIX}groups_in_progress",
            "Number of groups that are being sampled, graded or submitted.",
            self.groups_in_progress(),
        )
        for name, meaning in OF_REPORT.items():
            if (value := counts.reported.get(name)) is not None:
                yield GaugeMetricFamily(f"{PREFIX}{name}", meaning, value)
        pools = GaugeMetricFamily(
            f"{PREFIX}items",
            "Number of items by the solve rate that the curriculum has measured.",
            labels=["task", "pool"],
        )
        for task, of_task in self.items().items():
            for pool, count in of_task.items():
                pools.add_metric([task, pool], count)
        yield pools
        answered = CounterMetricFamily(
            f"{PREFIX}server_requests", "Number of requests answered.", labels=["server"]
        )
        load = GaugeMetricFamily(
            f"{PREFIX}server_sequences",
            "Number of sequences that the server is sampling for this environment.",
            labels=["server"],
        )
        serving = GaugeMetricFamily(
            f"{PREFIX}server_up",
            "1 if the server answers this environment, else 0.",
            labels=["server"],
        )
        for server in [*self.pool.servers]:
            answered.add_metric([server.url], server.answered.total())
            load.add_metric([server.url], server.load)
            serving.add_metric([server.url], float(server.standing is PoolState.SERVING))
        yield from (answered, load, serving)
