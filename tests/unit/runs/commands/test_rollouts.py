"""`grpo-rollouts` on a directory that is written here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.cells import cell_len

from grpo_core.rollouts.files import write_step
from grpo_core.settings import load_settings
from grpo_runs.commands.rollouts import show_rollouts
from grpo_runs.run_directory import RunDirectory
from grpo_runs.settings.rollouts import RolloutsSettings
from grpo_tiny_model.model import build_tokenizer
from tests.support.conversations import record
from tests.unit.conftest import Refused
from tests.unit.runs.stand_ins import Shown


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Scores of step 1: 0, 0.5, 1; of step 2: 2, 0.5, -1. The second of a step has 9 tokens and
    belongs to another task."""
    for step, scores in ((1, (0.0, 0.5, 1.0)), (2, (2.0, 0.5, -1.0))):
        records = [
            record(
                **{"step": step, "index": index, "score": score, "reason": f"r{step}{index}"},
                task="other" if index == 1 else "sums",
                item="x" if index == 1 else "ab12",
                completion_tokens=9 if index == 1 else 2,
                part=[1, 2] if index == 1 else None,
            )
            for index, score in enumerate(scores)
        ]
        write_step(tmp_path / "run" / "rollouts", step, records)
    return tmp_path / "run"


def shown(run: Path, *words: str, status: int = 0) -> Shown:
    screen = Shown()
    settings = load_settings(RolloutsSettings, [str(run), *words], {}, at_start=True)
    assert show_rollouts(settings, screen) == status
    return screen


def test_a_sample_shows_all_that_is_known_of_it(run: Path) -> None:
    """|-0.5 + 0.25| and |-1 + 1.5| have the mean 0.375."""
    assert shown(run, "--step", "1", "--limit", "1").out.splitlines() == [
        "step 1  group 0.0  sums  score 0  accuracy 1  advantage +0.5",
        "  tokens 2 + 2 (stop)  staleness 0  |logprob difference| 3.8e-01",
        *("prompt", "  1 + 2?", "completion", "  3", "reason", "  r10", ""),
    ]
    assert "group 0.1 (part 1 of 2)  other" in shown(run, "--step", "1", "--limit", "2").out


def test_attempts_that_were_lost_are_told_with_the_items_that_lost_most(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_step(run / "rollouts", 3, [record(step=3, attempts={"tried": 3, "too_long": 2})])
    lost = [("a", "failed_rollout", 1), ("a", "too_long", 4), ("b", "too_long", 1)]
    file = run / "untrained" / "sums" / "lost.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text(
        '{"task": \n'  # of a disk that was full
        + "".join(
            json.dumps(
                {"task": "sums", "item": item, "place": f"row {item}", "reason": why, "attempt": at}
            )
            + "\n"
            for item, why, at in lost
        )
        + "{"  # of an environment that was killed
    )
    lines = shown(run).out.splitlines()
    assert any("  attempt 3 (lost: 2 too_long)" in line for line in lines)
    assert lines[-3:] == [
        "lost:     2 too_long, 1 failed_rollout, of 2 items; "
        f"lines in {run}/untrained/*/lost.jsonl",
        "          2 of 4 attempts at row a of sums: 1 failed_rollout, 1 too_long",
        "          1 of 1 attempts at row b of sums: 1 too_long",
    ]
    assert not RunDirectory(run).untrained_rollouts
    shown(run, "--json")
    assert json.loads(capsys.readouterr().out)["attempts"] == {"tried": 3, "too_long": 2}


@pytest.mark.parametrize(
    ("words", "reasons"),
    [
        ("", ["r20", "r21", "r22"]),
        ("--step 1", ["r10", "r11", "r12"]),
        ("--step all --limit 4", ["r10", "r11", "r12", "r20"]),
        ("--step 1-2 --worst --limit 2", ["r22", "r10"]),
        ("--step 1-9 --best --limit 4", ["r20", "r12", "r11", "r21"]),
        ("--step all --task other", ["r11", "r21"]),
        ("--step all --min-reward 0.5 --max-reward 1", ["r11", "r12", "r21"]),
        ("--min-tokens 9", ["r21"]),
        ("--max-tokens 8", ["r20", "r22"]),
    ],
)
def test_filters_and_orders(
    words: str, reasons: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shown(run, *words.split()).out
    assert [line.strip() for line in out.splitlines() if line.startswith("  r")] == reasons
    shown(run, *words.split(), "--json")
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [found["reason"] for found in printed] == reasons
    assert printed[0]["tokens"] == [5, 6, 7, 8]


def test_json_has_no_limit_unless_one_is_given(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_step(RunDirectory(run).path / "rollouts", 3, [record(step=3)] * 7)
    for words, count in (([], 7), (["--limit", "2"], 2)):
        shown(run, "--json", *words)
        assert capsys.readouterr().out.count("\n") == count


def test_the_directory_of_a_run_of_a_trainer_or_of_rollouts_may_be_named(run: Path) -> None:
    directory = run / "rollouts"
    expected = shown(run).out
    assert shown(directory).out == expected
    (run / "checkpoints").mkdir()
    directory.rename(run / "checkpoints" / "rollouts")
    assert shown(run).out == shown(run / "checkpoints").out == expected


def test_a_step_without_sequences_for_the_filters_is_told(run: Path) -> None:
    for words in (["--task", "none"], ["--min-reward", "3", "--json"], ["--diff=1,2", "--task=x"]):
        screen = shown(run, *words, status=1)
        assert screen.err.startswith("no sequence passes the filters")
        assert screen.out == ""


def test_lines_fit_80_columns_and_hold_no_control_characters(run: Path) -> None:
    """Wide characters count as two columns. Spaces and joiners of other scripts stay."""
    blanks = "oui\u202f! 数\u3000学 می\u200cروم"
    answer = f"{'数' * 99}\n\n\x1b[2J\r bell\x07 é\n{blanks}\u202e\u2028"
    said = [
        {"role": "user", "content": "word " * 100 + "x" * 200},
        {"role": "assistant", "content": answer},
    ]
    parts = {f"part_{i}": 0.5 for i in range(12)}
    for step in (1, 2):
        write_step(run / "rollouts", step, [record(step=step, messages=said, parts=parts)])
    for words in (["--step", "1"], ["--diff", "1", "2"]):
        out = shown(run, *words).out
        assert max(map(cell_len, out.splitlines())) == 80
        assert not {char for char in out if ord(char) < 32} - {"\n"}
        assert r"\x1b[2J\r bell\x07 é" in out
        assert blanks + r"\u202e\u2028" in out
        assert out.count("数") == 100 * (2 if "--diff" in words else 1)


def test_without_messages_the_tokens_are_decoded(run: Path, tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokens = [*tokenizer.encode("1+2="), *tokenizer.encode("3!")]
    bare = record(step=3, messages=[], tokens=tokens, mask=[0] * 4 + [1] * 2)
    write_step(run / "rollouts", 3, [bare])
    assert f"token ids: {' '.join(map(str, tokens[4:]))}" in shown(run).out
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").rename(run / "rollouts" / "tokenizer.json")
    lines = shown(run).out.splitlines()
    assert (lines[3], lines[5]) == ("  1+2=", "  3!")
    (run / "rollouts" / "tokenizer.json").write_text("{")
    assert "tokenizer.json cannot be read as a tokenizer: " in shown(run, status=1).err


def test_two_steps_are_compared_by_their_distributions_and_by_common_prompts(run: Path) -> None:
    """Scores 0, 0.5, 1 and 2, 0.5, -1; the task `sums` gains nothing, `other` neither."""
    out = shown(run, "--diff", "1", "2", "--limit", "1", "--worst").out.splitlines()
    rows = [line.split() for line in out]
    assert rows[1] == ["score", "1", "3", "0.5", "0", "0.25", "0.5", "0.75", "1"]
    assert rows[2] == ["2", "3", "0.5", "-1", "-0.25", "0.5", "1.25", "2"]
    assert rows[3] == ["completion", "tokens", "1", "3", *["4.33", "2", "2", "2", "5.5", "9"]]
    assert rows[5] == ["part", "accuracy", "1", "3", *["1", "1", "1", "1", "1", "1"]]
    assert out[7:] == [
        "",
        "prompts of both steps: 2",
        "sums: mean score 0.5 -> 0.5",
        "  1 + 2?",
        "step 1, score 0                        | step 2, score -1",
        "3                                      | 3",
        "",
    ]


@pytest.mark.parametrize(
    ("words", "first", "scores"),
    [
        ([], "a", ("0", "1")),
        (["--worst"], "b", ("1", "0")),
        (["--best"], "a", ("0", "1")),
    ],
)
def test_prompts_that_gained_or_lost_most_come_first(
    words: list[str], first: str, scores: tuple[str, str], tmp_path: Path
) -> None:
    """Without items, equal tokens before the first trained one are the same prompt."""
    for step, (of_a, of_b) in ((1, (0, 1)), (2, (1, 0))):
        asked = [[{"role": "user", "content": name}] for name in "abc"]
        write_step(
            tmp_path,
            step,
            [
                record(step=step, item=None, tokens=[5, 6, 7, 8], score=of_a, messages=asked[0]),
                record(step=step, item=None, tokens=[5, 9, 7, 8], score=of_b, messages=asked[1]),
                record(step=step, item=None, tokens=[step, 9, 7, 8], messages=asked[2]),
            ],
        )
    out = shown(tmp_path, "--diff", "1", "2", *words).out
    assert "prompts of both steps: 2" in out
    pair = out.partition("prompts of")[2].splitlines()[1:]
    assert pair[:2] == [f"sums: mean score {scores[0]} -> {scores[1]}", f"  {first}"]


def test_a_dry_run_prints_a_file_that_gives_the_same_settings(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["--step", "1-2", "--worst", "--limit", "3", "--json"], ["--diff", "1", "2"]):
        given = load_settings(RolloutsSettings, [*words, str(run)], {})
        with pytest.raises(SystemExit, match="0"):
            load_settings(RolloutsSettings, [str(run), *words, "--dry-run"], {})
        file = tmp_path / "config.yaml"
        file.write_text(capsys.readouterr().out)
        assert load_settings(RolloutsSettings, ["--config", str(file)], {}) == given


MISTAKES = {
    "--step 3-1": "--step: 3 is after 1; write 1-3",
    "--step x": "--step: expected a step, a range of steps such as 10-20, or all; got 'x'",
    "--step 7": "--step: no step 7; ",
    "--diff 1 7": "--diff: no step 7; ",
    "--diff 1": "--diff: expected two steps, for example --diff 1 40",
    "--diff 1 x": "--diff: expected a whole number; got 'x'",
    "--diff 1 2 --step 1": "--step: not together with --diff",
    "--diff 1 2 --json": "--diff: not together with --json",
    "--worst --best": "--best: not together with --worst",
    "--limit 0": "--limit: expected a whole number, at least 1; got '0'",
    "second": "'second': unexpected",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_ends_with_status_2_and_one_line(words: str, run: Path, refused: Refused) -> None:
    told = refused(shown, run, *words.split())
    assert told.count("\n") == 1
    assert MISTAKES[words] in told


def test_a_directory_without_rollouts_is_a_mistake(tmp_path: Path, refused: Refused) -> None:
    assert "contains no rollouts" in refused(shown, tmp_path)
    dropped = tmp_path / "untrained/my/dropped"
    dropped.mkdir(parents=True)
    assert f"; name {dropped}" in refused(shown, tmp_path)
    assert "no such directory" in refused(shown, tmp_path / "x")
