"""Rewards that a recipe names in `reward_funcs`. The default is `exact_answer`: 1 if the last
`<answer>…</answer>` of the completion holds the row's answer, apart from white space.

Add a reward of your own here:

    @register("short")
    def short(answer, row):
        return float(len(answer) < 400)

`answer` is the completion, `row["answer"]` the right answer, `row` has the other columns too. A
function in TRL's form is added with `REWARDS["name"] = from_trl(function)`.
"""

from grpo_runs.recipe.task import (
    REWARDS,
    canonical,
    exact_answer,
    exact_completion,
    from_trl,
    register,
    tagged_answer,
)

__all__ = [
    "REWARDS",
    "canonical",
    "exact_answer",
    "exact_completion",
    "from_trl",
    "register",
    "tagged_answer",
]
