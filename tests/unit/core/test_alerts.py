"""Alerts fire once a measure is beyond its threshold for long enough, and say since when."""

from dataclasses import fields

import pytest

from grpo_core.alerts import ALERTS, AlertWatch, FiringAlert, Measures

MEASURES = {field.name for field in fields(Measures)} - {"details"}


def fired(watch: AlertWatch, now: float, **measures: float | bool | None) -> dict[str, FiringAlert]:
    return {found.alert.name: found for found in watch.look(Measures(**measures), now)}


def test_nothing_fires_without_measures_or_with_healthy_ones() -> None:
    healthy = {
        "over_step_s": 900.0,
        "staleness_mean": 4.0,
        "environments_alive": 1.0,
        "servers_gone": 0.0,
        "run_api_answers": True,
        "redis_answers": True,
        "redis_disk_share": 0.75,
        "disk_free_bytes": 2e9,
    }
    watch = AlertWatch()
    for now in (0.0, 1000.0, 2000.0):
        assert not fired(watch, now)
        assert not fired(watch, now, **healthy)


def test_a_row_without_a_hold_fires_at_once() -> None:
    found = fired(AlertWatch(), 50.0, over_step_s=900.5, redis_disk_share=0.8)
    assert list(found) == ["no-training-step", "redis-disk"]
    assert (found["no-training-step"].since, found["no-training-step"].value) == (50.0, 900.5)


def test_an_alert_tells_its_numbers_if_they_are_known() -> None:
    watch, known = AlertWatch(), Measures(dropped_share=0.98, details={"dropped_share": "4 of 8"})
    for measures, text in ((known, "4 of 8"), (Measures(dropped_share=1.0), "Nine of ten groups")):
        [found] = watch.look(measures, 0.0)
        assert found.text.startswith(text)


def test_a_condition_must_hold_and_its_beginning_is_kept() -> None:
    watch = AlertWatch()
    assert not fired(watch, 100.0, staleness_mean=5.0)
    assert not fired(watch, 399.0, staleness_mean=9.0)
    assert fired(watch, 400.0, staleness_mean=6.0)["staleness-high"].since == 100.0
    assert not fired(watch, 401.0, staleness_mean=4.0)
    assert not fired(watch, 500.0, staleness_mean=5.0), "it began again at 500"
    assert fired(watch, 800.0, staleness_mean=5.0)["staleness-high"].since == 500.0


def test_an_unknown_measure_ends_the_condition() -> None:
    watch = AlertWatch()
    assert not fired(watch, 0.0, environments_alive=0)
    assert fired(watch, 120.0, environments_alive=0)
    assert not fired(watch, 121.0, environments_alive=None)
    assert not fired(watch, 130.0, environments_alive=0)


def test_a_total_fires_on_its_increase_over_ten_minutes() -> None:
    watch = AlertWatch()
    assert not fired(watch, 0.0, engine_crashes=3), "those from earlier do not count"
    assert fired(watch, 10.0, engine_crashes=4)["engine-crashed"].value == 1
    found = fired(watch, 300.0, engine_crashes=6)["engine-crashed"]
    assert (found.since, found.value) == (10.0, 3)
    assert fired(watch, 610.0, engine_crashes=6)["engine-crashed"].value == 2
    assert not fired(watch, 900.0, engine_crashes=6)


def test_a_total_that_fell_began_again_at_zero() -> None:
    watch = AlertWatch()
    fired(watch, 0.0, stale_groups=100)
    assert not fired(watch, 1.0, stale_groups=10), "10 more, which is the threshold"
    assert fired(watch, 2.0, stale_groups=11)["groups-stale"].value == 11


def test_a_total_may_be_unknown_for_a_while() -> None:
    watch = AlertWatch()
    fired(watch, 0.0, refused_groups=0)
    assert not fired(watch, 1.0)
    assert fired(watch, 2.0, refused_groups=1)
    assert fired(watch, 3.0), "the increase is known"


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_every_row_looks_at_a_measure(alert) -> None:
    assert alert.measure in MEASURES
    beyond = alert.threshold + (1 if alert.above else -1)
    watch = AlertWatch([alert])
    for now, value in ((0.0, 0.0 if alert.over_s else beyond), (1.0, beyond), (301.0, beyond)):
        found = watch.look(Measures(**{alert.measure: value}), now)
    assert [firing.alert for firing in found] == [alert]


def test_names_and_measures_are_each_used_once() -> None:
    assert len({alert.name for alert in ALERTS}) == len(ALERTS)
    assert {alert.measure for alert in ALERTS} == MEASURES
