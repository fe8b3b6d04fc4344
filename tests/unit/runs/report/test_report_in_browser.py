"""The page of a run in a real browser, on a desktop and on a phone: what one sees and does."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from grpo_core.rollouts.files import write_step
from grpo_core.rollouts.record import RolloutRecord
from grpo_runs.report.page import write_report
from grpo_runs.run_directory import RunDirectory
from tests.support.conversations import TOKENIZER, conversation, group
from tests.unit.runs.records import SPEED, evaluation, metrics_line

DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
LONG = "0123456789" * 10_000
HOSTILE = "</script><script>hacked()</script><img src=x onerror=hacked()>\u202egnp.exe & \x1b[31m"
RIGHT_TO_LEFT = "مرحبا, 世界 🙂"

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
expect.set_options(timeout=60_000)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no browser: install chromium to test the page (apt-get install)"
)


def rollouts() -> Iterator[list[RolloutRecord]]:
    """Three steps. Step 2 has a conversation with a tool; step 3 has texts that break pages."""
    yield [
        *group("2+2=", [("4", 1.0), ("5", 0.0)], parts={"accuracy": 0.5}),
        *group("3+3=", [("7", -1.0), ("6", 1.0)], group=1, reason="the reference is 6"),
    ]
    turns = [("user", "use it"), ("assistant", "call"), ("tool", "42"), ("assistant", "done")]
    yield [conversation(*turns, step=2, task="tools", finish_reason="length", score=0.25)]
    yield [
        *group(HOSTILE, [(HOSTILE, 0.5), (RIGHT_TO_LEFT, 0.5)], step=3, reason=HOSTILE),
        *group("long", [(LONG, 0.0), ("", 2.0)], step=3, group=1, task=HOSTILE),
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    run = RunDirectory(tmp_path_factory.mktemp("runs") / "first run")
    directory = run.path / "rollouts"
    for step, records in enumerate(rollouts(), start=1):
        write_step(directory, step, records)
    TOKENIZER.save(str(directory / "tokenizer.json"))
    run.metrics.write_text("".join(metrics_line(step) for step in range(1, 41)))
    run.config.write_text("task: [sums, tools]\nmode: lora_only\nmodel: null\nseed: 3\n")
    lines = [evaluation(0, 0.25), evaluation(40, 0.75)]
    run.evaluations.write_text("".join(f"{line.model_dump_json()}\n" for line in lines))
    write_report(run)
    return run


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER)
        yield browser
        browser.close()


def on_both(first: dict[str, int], other: dict[str, int]) -> pytest.MarkDecorator:
    """Args: first: the size that `make test` tries; another test tries the other one"""
    sizes = [first, pytest.param(other, marks=pytest.mark.full)]
    return pytest.mark.parametrize(
        "page", sizes, ids=lambda size: f"{size['width']}", indirect=True
    )


@pytest.fixture
def page(request: pytest.FixtureRequest, browser: Browser, run: RunDirectory) -> Iterator[Page]:
    """The page of the run. At the end: no error in it, no request to anywhere else, and
    nothing beyond its width."""
    size = getattr(request, "param", DESKTOP)
    page = browser.new_page(viewport=size, has_touch=size == PHONE)
    page.set_default_timeout(60_000)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.expose_function("hacked", lambda: problems.append("a text of the run was executed"))
    page.goto(run.report.as_uri())
    expect(page.locator("#place")).to_have_text("Step 3, group 0")
    yield page
    assert page.evaluate("document.documentElement.scrollWidth") == size["width"]
    page.close()
    assert problems == []
    assert requests == [run.report.as_uri()]


BOTH_FIELDS = """step => ["from", "to"].forEach((id) => {
  document.getElementById(id).value = step;
  document.getElementById(id).dispatchEvent(new Event("input"));
})"""


def show_step(page: Page, step: int) -> None:
    page.evaluate(BOTH_FIELDS, step)  # at once: a pause between them would show the steps twice
    expect(page.locator("#place")).to_contain_text(f"Step {step},")


def texts(page: Page, selector: str) -> list[str]:
    """Of all such elements, with plain minus signs."""
    shown = page.locator(selector).all_inner_texts()
    return [text.replace("\N{MINUS SIGN}", "-") for text in shown]


def facts(page: Page) -> dict[str, str]:
    names = page.locator("#facts dt").all_inner_texts()
    return dict(zip(names, page.locator("#facts dd").all_inner_texts(), strict=True))


@on_both(DESKTOP, PHONE)
def test_facts_and_curves(page: Page) -> None:
    assert page.title() == "GRPO on sums and tools: tiny model"
    assert facts(page) == {
        **{"Run": "first run", "Mode": "lora_only", "Model": "tiny model", "Seed": "3"},
        **{"Steps": "40", "Reward": "0.250 (first 4 steps) → 3.850 (last 4 steps)"},
        "Pass@1 on sums": "0.25 (0.12 to 0.38) → 0.75 (0.62 to 0.88)",
        "Training speed": SPEED,
    }
    curves = page.locator("figure")
    curves.first.locator(".name").evaluate("name => name.textContent = 'Mean reward '.repeat(9)")
    heights = curves.evaluate_all("all => all.map((one) => one.getBoundingClientRect().height)")
    assert len({round(height) for height in heights}) == 1
    curves.first.locator(".name").evaluate("name => name.textContent = 'Mean reward'")
    assert page.locator("figcaption .name").all_inner_texts() == [
        "Mean reward",
        "Evaluation: pass@1 on sums",
        "Reward part: accuracy",
        "Completion length",
        "Logprob difference",
        "Clipped fraction",
        "Staleness",
        "Training speed",
        "Share of the device's measured rate (MFU)",
    ]
    reward, evaluation = curves.nth(0), curves.nth(1)
    expect(reward.locator(".value")).to_have_text("4")
    expect(evaluation.locator(".value")).to_have_text("0.75 (0.625 to 0.875)")
    box = reward.locator("svg").bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] - 1, box["y"] + 40)
    expect(reward.locator(".value")).to_contain_text("step 40: 4")
    page.mouse.move(box["x"] + 1, box["y"] + 40)
    expect(reward.locator(".value")).to_contain_text("step 1: 0.1")
    expect(evaluation.locator(".value")).to_contain_text("step 0: 0.25 (0.125 to 0.375)")
    reward.locator("svg").click(position={"x": 1, "y": 40})
    expect(page.locator("#place")).to_have_text("Step 1, group 0")


def test_a_group_shows_its_prompt_and_every_completion(page: Page) -> None:
    show_step(page, 1)
    expect(page.locator("#found")).to_have_text("2 groups, 4 completions")
    expect(page.locator(".prompt")).to_contain_text("2+2=")
    first = page.locator(".completion").first
    expect(first).to_contain_text("reward 1")
    expect(first.locator("li")).to_have_text(
        ["advantage +0.5", "parts: accuracy 0.5", "2 tokens", "stop", "version 1.0", "staleness 0"]
    )
    page.keyboard.press("ArrowRight")
    expect(page.locator("#place")).to_have_text("Step 1, group 1")
    expect(page.locator(".reason").first).to_have_text("the reference is 6")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#place")).to_have_text("Step 1, group 1")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#place")).to_have_text("Step 1, group 0")


FRAMES = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


@on_both(PHONE, DESKTOP)
def test_a_token_tells_its_numbers(page: Page) -> None:
    """The third token of "done" has seven trained ones before it: server -2, trainer -2.25."""
    show_step(page, 2)
    token = page.locator(".completion .token", has_text=re.compile("^n$")).last
    token.scroll_into_view_if_needed()
    page.evaluate(FRAMES)  # a scroll event that is still to come would hide the tip
    token.tap() if page.evaluate("navigator.maxTouchPoints") else token.hover()
    expect(page.locator("#tip")).to_be_visible()
    told = texts(page, "#tip dd")
    assert told == ['"n"', "77", "-2.2500 (10.5 %)", "-2.0000 (13.5 %)", "0.7788", "+0.5"]
    page.locator(".completion .token.still", has_text="2").first.hover()
    expect(page.locator("#tip")).to_contain_text("not trained on")
    page.keyboard.press("Escape")
    expect(page.locator("#tip")).to_be_hidden()


def test_colours_show_what_one_chooses(page: Page) -> None:
    """The server's logprobs are 0, -1, ... -4; at -5 the colour is full, level 8. Ratios are 1 and
    e^-0.25; at 1 / 1.5 the colour is full. The advantage is half of the run's largest one."""
    show_step(page, 2)
    classes = """spans => spans.map(span => (span.className.match(/(low|high) l./) ?? [""])[0])"""
    tokens = page.locator(".completion .token:not(.still)")

    def chosen(colouring: str) -> list[str]:
        page.locator(f"#colourings label:has(input[value={colouring}])").click()
        found: list[str] = tokens.evaluate_all(classes)
        return found

    assert chosen("server")[:5] == ["", "low l2", "low l3", "low l5", "low l6"]
    assert chosen("ratio")[:4] == ["", "low l5", "", "low l5"]
    assert set(chosen("advantage")) == {"high l4"}
    assert texts(page, "#legend .ends span") == ["-1", "0", "+1"]
    assert set(chosen("mask")) == {"high l5"}
    background = tokens.first.evaluate("(e) => getComputedStyle(e).backgroundColor")
    assert background != "rgba(0, 0, 0, 0)"


def test_a_search_finds_prompts_and_completions(page: Page) -> None:
    page.locator("#all-steps").click()
    expect(page.locator("#found")).to_have_text("5 groups, 9 completions")
    page.locator("#search").fill("DON")
    expect(page.locator("#place")).to_have_text("Step 2, group 0")
    expect(page.locator(".token.hit")).to_have_text(["d", "o", "n"])
    page.locator("#search").fill("3+3")
    expect(page.locator("#found")).to_have_text("1 group, 2 completions")
    expect(page.locator(".prompt .token.hit")).to_have_text(["3", "+", "3"])
    page.locator("#search").fill("7<|im_end|>")
    expect(page.locator("#found")).to_have_text("1 group, 1 completion")
    page.locator("summary").click()
    expect(page.locator("details .completion")).to_have_count(1)
    page.locator("#search").fill("in no rollout")
    expect(page.locator("#details")).to_have_text("No completion matches the filters.")


def test_filters_and_orders(page: Page) -> None:
    def scores() -> list[str]:
        return texts(page, "#details > .completion .score")

    page.locator("#all-steps").click()
    page.locator("#order").select_option("worst")
    expect(page.locator("#place")).to_have_text("Step 1, group 1")
    assert scores() == ["reward -1", "reward 1"]
    page.locator("#order").select_option("best")
    expect(page.locator("#place")).to_have_text("Step 3, group 1")
    assert scores() == ["reward 2", "reward 0"]
    page.locator("#order").select_option("advantage")
    expect(page.locator("#list button").first).to_contain_text("step 1 · group 1")
    page.locator("#low").fill("0.2")
    page.locator("#high").fill("0.6")
    expect(page.locator("#found")).to_have_text("2 groups, 3 completions")
    page.locator("#task").select_option("tools")
    expect(page.locator("#found")).to_have_text("1 group, 1 completion")


@on_both(PHONE, DESKTOP)
def test_hostile_and_long_texts_are_shown_as_text(page: Page) -> None:
    shown = HOSTILE.replace("\u202e", "U+202E").replace("\x1b", "U+001B")
    expect(page.locator(".prompt .tokens")).to_contain_text(shown)
    expect(page.locator(".completion .tokens").first).to_contain_text(shown)
    expect(page.locator(".completion .reason").first).to_have_text(shown)
    expect(page.locator(".completion .tokens").nth(1)).to_contain_text("مرحبا")
    assert page.locator("main img").count() == 0
    page.keyboard.press("ArrowRight")
    expect(page.locator("#place")).to_have_text("Step 3, group 1")
    tokens = page.locator(".completion").first.locator(".token")
    expect(tokens).to_have_count(600)
    page.get_by_text("Show 5000 more of 100001 tokens").click()
    expect(tokens).to_have_count(5600)


def test_a_run_without_rollouts_has_curves(
    browser: Browser, tmp_path: Path, run: RunDirectory
) -> None:
    other = RunDirectory(tmp_path)
    shutil.copy(run.metrics, other.metrics)
    page = browser.new_page()
    page.goto(write_report(other).as_uri())
    expect(page.locator("figure")).to_have_count(6)
    expect(page.locator("#rollouts-section")).to_be_hidden()
    page.close()
