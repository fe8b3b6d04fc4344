"""Keys of TRL's ScriptArguments, and those of data sets and rewards besides them."""

from __future__ import annotations

from typing import Any

from grpo_offline.recipe.key import Key, idle, refused, ruled

_ROWS = "rows of training"

SCRIPT_KEYS: tuple[Key, ...] = (
    ruled(
        "dataset_name",
        str | None,
        None,
        f"{_ROWS}: a file (JSON lines, CSV or Parquet), a directory with train.jsonl, or an id "
        "on the hub",
    ),
    ruled("dataset_config", str | None, None, "the data set's configuration on the hub"),
    ruled("dataset_train_split", str, "train", f"{_ROWS}: their split"),
    ruled("dataset_test_split", str, "test", "rows of evaluation, if `dataset_name` has the split"),
    refused("dataset_streaming", bool, False, "rows are read once, at the start"),
    idle("ignore_bias_buffers", bool, False, "ranks exchange sums in the trainer's own way"),
    ruled(
        "dataset_mixture",
        dict[str, Any] | None,
        None,
        "several data sets, in the place of `dataset_name`; see `DatasetMixtureConfig`",
    ),
    ruled("columns", list[str] | None, None, "columns of `dataset_name` that are kept"),
    ruled(
        "dataset_prompt_column",
        str | None,
        None,
        "column of the prompt; default: prompt, messages, question or problem",
    ),
    ruled(
        "dataset_solution_column",
        str | None,
        None,
        "column of the right answer; default: answer, final_answer or solution",
    ),
    ruled("eval_dataset_name", str | None, None, "rows of evaluation, as `dataset_name`"),
    ruled("eval_dataset_config", str | None, None, "as `dataset_config`"),
    ruled("eval_dataset_split", str, "test", "rows of evaluation: their split"),
    ruled("eval_dataset_prompt_column", str | None, None, "default: `dataset_prompt_column`"),
    ruled("eval_dataset_solution_column", str | None, None, "default: `dataset_solution_column`"),
    ruled(
        "reward_funcs",
        list[str],
        ("exact_answer",),
        "names in `src/rewards.py`, or my.py:reward; each is a part of the reward",
    ),
    ruled("vllm_stop_sequences", list[str] | None, None, "texts that end a completion"),
)
