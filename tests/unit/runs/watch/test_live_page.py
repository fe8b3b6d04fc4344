"""The page that shows runs while they train, in a real browser: what one sees, hears and does."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect, sync_playwright

from grpo_core.rollouts.files import write_step
from grpo_core.rollouts.record import RolloutRecord, printable
from grpo_runs.process.records import ProcessRecords
from tests.support.conversations import group
from tests.unit.runs.records import SPEED
from tests.unit.runs.watch.written_runs import HOUR_S, WrittenRun, served

Runs = dict[str, WrittenRun]
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 360, "height": 740}
HOSTILE = "</script><script>hacked()</script><img src=x onerror=hacked()>\u202egnp.exe"
CHECKS = Path(__file__).with_name("checks.js").read_text()

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
expect.set_options(timeout=60_000)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no browser: install chromium to test the page (apt-get install)"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER)
        yield browser
        browser.close()


def rollouts(step: int) -> list[RolloutRecord]:
    """Two groups of two completions."""
    return [
        record
        for at in range(2)
        for record in group(
            f"{step}+{at}=", [(f"is {step + at}", 1.0), ("no", 0.0)], group=at, step=step
        )
    ]


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    """Run a has three steps with rollouts, run b two."""
    runs = {
        name: WrittenRun(tmp_path / name, {"seed": seed, "lr": 1e-3, "mode": "lora_only"})
        for name, seed in (("a", 1), ("b", 2))
    }
    for name, steps in (("a", 3), ("b", 2)):
        for step in range(1, steps + 1):
            runs[name].step(step, step / 10, rollouts(step))
    return runs


@pytest.fixture
def page(request: pytest.FixtureRequest, browser: Browser, runs: Runs) -> Iterator[Page]:
    """The page of the runs. At the end: no error in it, and nothing beyond its width."""
    size = getattr(request, "param", DESKTOP)
    page = browser.new_page(viewport=size, has_touch=size == PHONE)
    page.set_default_timeout(60_000)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.expose_function("hacked", lambda: problems.append("a text of the run was executed"))
    with served([*runs.values()]) as url:
        page.goto(url)
        expect(value_of(page, "Mean reward")).to_have_text("0.3")
        yield page
        assert page.evaluate("document.documentElement.scrollWidth") == size["width"]
        page.close()
    assert problems == []


ON_PHONE = pytest.mark.parametrize("page", [PHONE], ids=["phone"], indirect=True)
ON_BOTH = pytest.mark.parametrize("page", [DESKTOP, PHONE], ids=["desktop", "phone"], indirect=True)


def value_of(page: Page, curve: str) -> Locator:
    return page.locator("figure", has_text=curve).locator(".value")


def show_rollouts(page: Page, place: str = "Step 3, group 0") -> None:
    page.keyboard.press("r")
    expect(page.locator("#place")).to_have_text(place)


@pytest.mark.full
def test_what_a_run_does_is_told_in_words(browser: Browser, tmp_path: Path) -> None:
    """An hour passes from look to look, and run-api is away."""
    run = WrittenRun(tmp_path / "mine", {"mode": "lora_only"}, seconds_per_look=HOUR_S)
    run.start("redis", "trainer", run_api_url="http://127.0.0.1:9")
    run.stage("compute", since=1)
    run.step(1, 0.25)
    run.step(2, 0.5)
    run.log("trainer", "error", "BatchBroken", "the newest", second=2)
    run.log("redis", "warning", "disk.full", "an earlier one", second=1)
    page = browser.new_page()
    with served([run]) as url:
        page.goto(url)
        panel = page.locator(".panel")
        expect(panel.locator(".word")).to_have_text("Training, step 2 of 40")
        expect(panel.locator(".rest")).to_have_text("about 57 s left")
        expect(panel.get_by_role("progressbar")).to_have_attribute("max", "40")
        services = panel.get_by_role("table", name="Services of mine").get_by_role("row")
        expect(services.nth(1)).to_have_text(re.compile("redisrunning .*[MG]iB"))
        expect(services.nth(2)).to_have_text(re.compile("trainertraining for .* d .*[MG]iB"))
        times = panel.get_by_role("table", name="Time of a step of mine").get_by_role("row")
        expect(times.nth(2)).to_have_text("train0.6 s0.6 s")
        expect(times.last).to_have_text("together0.95 s0.95 s")
        expect(panel).to_contain_text(
            re.compile(f"Tokens per second1.23 kTraining speed{SPEED}.*Queuenot known")
        )
        alert = re.compile(
            "Alert: The trainer has finished no step for 15 minutes more .* since .*look at"
        )
        expect(panel.locator(".alerts li").first).to_have_text(alert)
        warnings = panel.locator(".warnings li")
        expect(warnings).to_have_text(
            [
                re.compile("Warning .*run-api does not answer since .*the queue is not known"),
                re.compile("Error .* trainer BatchBroken the newest"),
                re.compile("Warning .* redis disk.full an earlier one"),
            ]
        )
        expect(panel.locator("summary")).to_have_text("Services, times, data, 1 error, 2 warnings")
        run.log("trainer", "error", "BatchBroken", "one more", second=3)
        expect(page.locator("#announcer")).to_have_text("mine: Error: one more")
        expect(warnings.nth(1)).to_contain_text("trainer BatchBroken, 2 times one more")
        expect(panel.locator("summary")).to_contain_text("2 errors, 2 warnings")
        page.close()


def test_curves_grow_and_the_newest_step_is_followed(page: Page, runs: Runs) -> None:
    show_rollouts(page)
    runs["a"].step(4, 0.75, rollouts(4))
    expect(value_of(page, "Mean reward")).to_have_text("0.75")
    expect(page.locator("#place")).to_have_text("Step 4, group 0")
    page.keyboard.press("p")
    expect(page.locator("#place")).to_have_text("Step 3, group 0")
    expect(page.locator("#follow")).not_to_be_checked()
    runs["a"].step(5, 0.875, rollouts(5))
    expect(page.locator("#scope")).to_contain_text(
        "apply to step 3, the one that is loaded. There are 2 newer steps."
    )
    assert page.locator("#place").inner_text() == "Step 3, group 0"
    page.get_by_label("Follow the newest step").check()
    expect(page.locator("#place")).to_have_text("Step 5, group 0")
    page.locator("#list button").nth(1).click()  # whoever reads a group stays
    expect(page.locator("#follow")).not_to_be_checked()


@pytest.mark.full
def test_points_of_repeated_steps_replace_the_earlier_ones(page: Page, runs: Runs) -> None:
    runs["a"].step(2, 0.25)
    expect(value_of(page, "Mean reward")).to_have_text("0.25")
    page.locator("#values summary").click()
    row = page.get_by_role("table", name="Values of the curves").get_by_role("row").nth(1)
    expect(row.locator("td")).to_have_text(["0.1", "0.25", "0.1", "0.25"])


@pytest.mark.full
def test_evaluations_have_intervals(page: Page, runs: Runs) -> None:
    runs["a"].evaluate(2, 0.5)
    evaluation = value_of(page, "Evaluation: pass@1 on sums")
    expect(evaluation).to_have_text("0.5 (0.375 to 0.625)")
    runs["a"].evaluate(3, 0.75)
    expect(evaluation).to_have_text("0.75 (0.625 to 0.875)")


@pytest.mark.full
def test_a_point_of_a_curve_leads_to_its_rollouts(page: Page) -> None:
    chart = page.locator("figure", has_text="Mean reward").locator("svg")
    chart.hover()
    expect(value_of(page, "Mean reward")).to_have_text("step 2: 0.2")
    chart.click()
    expect(page.locator("#place")).to_have_text("Step 2, group 0")
    expect(page.locator("#follow")).not_to_be_checked()


def test_two_runs_are_compared(page: Page, runs: Runs) -> None:
    page.get_by_label("Compare b").check()
    expect(page.locator("#lines")).to_have_text("a b")
    chart = page.locator("figure", has_text="Mean reward")
    expect(chart.locator(".line:not(.raw)")).to_have_count(4)  # two in the chart, two samples
    styles = chart.locator("svg[role] .line").evaluate_all(
        "all => all.map(one => getComputedStyle(one)).map(one => [one.stroke, one.strokeDasharray])"
    )
    colours, dashes = zip(*styles, strict=True)
    assert len({*colours}) == len({*dashes}) == 2
    expect(value_of(page, "Mean reward")).to_contain_text("0.3 0.2")
    runs["b"].step(3, 0.5)
    expect(value_of(page, "Mean reward")).to_contain_text("0.3 0.5")
    page.get_by_text("Time", exact=True).click()
    expect(chart.get_by_role("slider")).to_have_attribute("aria-label", re.compile("0.5 at 4.5 s"))
    settings = page.get_by_role("table", name="Settings that differ").get_by_role("row")
    expect(settings).to_have_text(["Settingab", "seed12"])
    show_rollouts(page)
    page.locator("#rollouts-run").select_option("b")
    expect(page.locator("#place")).to_have_text("Step 2, group 0")
    page.reload()
    expect(page.get_by_label("Compare b")).to_be_checked()


@pytest.mark.full
def test_the_page_connects_again(browser: Browser, runs: Runs) -> None:
    page = browser.new_page()
    with served([*runs.values()]) as url:
        page.goto(url)
        expect(value_of(page, "Mean reward")).to_have_text("0.3")
    expect(page.locator("#connection")).to_contain_text(
        re.compile(r"does not answer since \d\d:\d\d:\d\d")
    )
    runs["a"].step(4, 0.5, rollouts(4))
    with served([*runs.values()], int(url.rstrip("/").rpartition(":")[2])):
        expect(page.locator("#connection")).to_be_hidden()
        expect(value_of(page, "Mean reward")).to_have_text("0.5")
        page.close()


@pytest.mark.full
def test_the_services_of_a_finished_run_are_folded(browser: Browser, tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "mine", {})
    records = ProcessRecords(run.run)
    records.watch({"redis": 1, "model": 1, "trainer": 1})
    with records.of_the_end():
        pass
    page = browser.new_page()
    with served([run]) as url:
        page.goto(url)
        page.get_by_text("all 2 have ended").click()
        rows = page.get_by_role("table", name="Services of mine").get_by_role("row")
        expect(rows).to_contain_text(["Service", "redisended", "trainerended"])
        page.close()


@pytest.mark.full
def test_a_step_that_loads_says_so(page: Page) -> None:
    show_rollouts(page)
    held: list[Route] = []
    page.route("**/steps/2", lambda route: held.append(route))
    page.keyboard.press("p")
    details = page.locator("#details[aria-busy=true]")
    shown = details.evaluate("element => getComputedStyle(element, '::before').content")
    assert shown == '"Loading …"'
    held[0].continue_()
    expect(page.locator("#place")).to_have_text("Step 2, group 0")
    expect(details).to_have_count(0)


@pytest.mark.full
def test_only_what_is_looked_at_is_loaded(page: Page) -> None:
    page.set_viewport_size({"width": 1280, "height": 300})
    loaded: list[str] = []
    page.on("request", lambda request: loaded.append(request.url.rpartition("/api/runs/")[2]))
    page.reload()
    expect(value_of(page, "Mean reward")).to_have_text("0.3")
    assert [path for path in loaded if "steps/" in path] == []
    show_rollouts(page)
    page.keyboard.press("p")
    expect(page.locator("#place")).to_have_text("Step 2, group 0")
    page.keyboard.press("n")
    expect(page.locator("#place")).to_have_text("Step 3, group 0")
    assert [path for path in loaded if "steps/" in path] == ["a/steps/3", "a/steps/2"]


@pytest.mark.full
def test_the_keyboard_is_enough(page: Page) -> None:
    def focus(wanted: str) -> None:
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("id => document.activeElement.matches(id)", wanted):
                style = "getComputedStyle(document.activeElement).outlineStyle"
                assert page.evaluate(style) == "solid"
                return
        raise AssertionError(f"{wanted} cannot be reached")

    focus("#runs li:nth-child(2) button")
    page.keyboard.press("Enter")
    expect(value_of(page, "Mean reward")).to_have_text("0.2")
    focus("figure svg")
    page.keyboard.press("Home")
    expect(value_of(page, "Mean reward")).to_have_text("step 1: 0.1")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    expect(page.locator("#place")).to_have_text("Step 1, group 0")
    page.keyboard.press("f")
    expect(page.locator("#place")).to_have_text("Step 2, group 0")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#place")).to_have_text("Step 2, group 1")
    page.keyboard.press("/")
    page.keyboard.type("is 2")
    expect(page.locator("#found")).to_have_text("1 group, 1 completion")


@pytest.mark.full
@ON_PHONE
def test_a_thumb_is_enough(page: Page) -> None:
    show_rollouts(page)
    page.get_by_label("Compare b").check()
    expect(page.locator("#lines")).to_be_visible()
    assert page.evaluate(f"{CHECKS}; smallTargets()") == []


@pytest.mark.full
@ON_BOTH
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_are_readable(page: Page, scheme: str, runs: Runs) -> None:
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    runs["a"].start("trainer", run_api_url="http://127.0.0.1:9")
    for level in ("error", "warning"):
        runs["a"].log("trainer", level, f"{level}.event", "text")
    show_rollouts(page)
    expect(page.locator(".warnings .error")).to_be_visible()
    assert page.evaluate(f"{CHECKS}; hardToRead()") == []


@pytest.mark.full
def test_people_who_hear_the_page_find_their_way(page: Page) -> None:
    show_rollouts(page)
    assert page.evaluate(f"{CHECKS}; unnamed()") == []
    levels = page.locator("h1, h2, h3, h4").evaluate_all(
        "all => all.map(one => Number(one.tagName[1]))"
    )
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    for role, name in (
        ("main", None),
        ("banner", None),
        ("contentinfo", None),
        ("navigation", "Groups"),
    ):
        expect(page.get_by_role(role, name=name)).to_have_count(1)  # type: ignore[arg-type]
    expect(page.get_by_role("region", name="Curves")).to_be_visible()
    expect(
        page.get_by_role("slider", name="Mean reward: 0.1 at step 1, 0.3 at step 3")
    ).to_be_visible()


@ON_PHONE
def test_texts_of_a_run_are_shown_as_text(page: Page, runs: Runs) -> None:
    run, image = runs["b"], "<img src=x onerror=hacked()>"
    (run.run.path / "run-id").write_text(HOSTILE)
    run.run.config.write_text(json.dumps({"task": [HOSTILE], HOSTILE: HOSTILE, "seed": 1}))
    run.log(image, "error", image, HOSTILE)
    run.start(image, "trainer")
    run.stage(HOSTILE, since=1)
    run.step(3, 0.5, group(HOSTILE, [(HOSTILE, 1.0)], step=3, task=HOSTILE, reason=HOSTILE))
    page.reload()
    page.locator("#runs input").nth(1).check()
    expect(page.locator("#lines")).to_contain_text(HOSTILE)
    page.locator("#rollouts-run").select_option("b")
    page.locator(".panel summary").nth(1).click()
    panel = page.locator(".panel").last
    for part in ("h3", ".facts", ".stage"):
        expect(panel.locator(part).last).to_contain_text(HOSTILE)
    expect(panel.locator(".warnings")).to_contain_text(printable(HOSTILE))
    expect(page.locator("#settings")).to_contain_text(HOSTILE)
    show_rollouts(page)
    expect(page.locator(".prompt .tokens")).to_contain_text(HOSTILE.replace("\u202e", "U+202E"))
    assert page.locator("main img").count() == 0


@pytest.mark.full
def test_a_run_that_has_no_step_yet(browser: Browser, tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "mine", {})
    page = browser.new_page()
    with served([run]) as url:
        page.goto(url)
        expect(page.locator(".word")).to_have_text(re.compile("Not running.*, no step yet"))
        expect(page.locator("#curves-hint")).to_have_text("No steps yet.")
        expect(page.locator("#no-rollouts")).to_be_visible()
        run.start("trainer")
        expect(page.locator(".word")).to_have_text("Starting, no step yet")
        write_step(run.run.untrained / "sums/dropped", 1, rollouts(1)[:2])
        write_step(run.run.untrained / "sums/evaluation", 0, rollouts(0))
        page.get_by_text("dropped of sums").click()
        show_rollouts(page, "Step 1, group 0")
        expect(page.locator("#count")).to_have_text("1 of 1")
        write_step(run.run.untrained / "sums/dropped", 1, rollouts(1))
        expect(page.locator("#count")).to_have_text("1 of 2")
        run.step(1, 0.5, rollouts(1)[2:])
        expect(value_of(page, "Mean reward")).to_have_text("0.5")
        page.get_by_text("evaluation of sums").click()
        show_rollouts(page, "Step 0, group 0")
        page.get_by_text("trained on", exact=True).click()
        show_rollouts(page, "Step 1, group 1")
        page.close()
