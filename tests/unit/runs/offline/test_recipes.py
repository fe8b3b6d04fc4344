"""The keys of a recipe: each does what the table says. The recipes of the repository."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_core.tree.objectives import Objective, resolved
from grpo_runs.offline import loop
from grpo_runs.offline.errors import RecipeInvalid
from grpo_runs.offline.keys import OfflineKeys, value_of
from grpo_runs.recipe import main
from grpo_runs.recipe.keys import (
    KEYS,
    MAIN_KEYS,
    TABLE,
    GRPOConfig,
    Key,
    Script,
    ScriptArguments,
    TrainingRecipe,
    load_configs,
    read_recipe,
)
from grpo_runs.recipe.server_plan import server_plan
from grpo_runs.recipe.translation import notes, rank_count, run_directory, translate
from grpo_trainer.losses import bounds
from tests.unit.runs.offline.conftest import Recipes

ROOT = Path(__file__).parents[4]
TINY = ROOT / "recipes/tiny/grpo/config.yaml"
RECIPES = sorted((ROOT / "recipes").glob("*/*/*.yaml"))
BASE = {
    "model_name_or_path": "model",
    "dataset_name": "rows.jsonl",
    "eval_strategy": "steps",
    "max_steps": 100,
    "use_vllm": True,
}
ROWS = 1000

OTHER: dict[str, Any] = yaml.safe_load("""{
output_dir: elsewhere, resume_from_checkpoint: runs/earlier, log_level: debug,
report_to: [tensorboard], num_train_epochs: 5.0, lr_scheduler_type: cosine, optim: adafactor,
warmup_steps: 7, dtype: float32, eval_strategy: "no", save_strategy: "no", eval_steps: 50.0,
save_steps: 30.0, num_generations: 4, generation_batch_size: 64, steps_per_generation: 16,
top_p: 0.5, use_vllm: false, vllm_server_base_url: "http://other:1",
vllm_stop_sequences: [</answer>], loss_type: grpo, importance_sampling_level: sequence,
vllm_importance_sampling_mode: token_truncate, reward_funcs: [exact_completion],
reward_weights: [0.5], scale_rewards: none, sync_mode: none, grpo: {max_staleness: 3},
env_server: {reward_deadline_s: 5.0}, gradient_checkpointing_kwargs: {use_reentrant: false},
dataset_mixture: {datasets: [{id: a.jsonl}, {id: b.jsonl, weight: 0.5}]},
}""")
"""A value besides the default, for keys whose kind names none."""

NEEDED: dict[str, dict[str, Any]] = yaml.safe_load("""
num_train_epochs: {max_steps: -1}
eval_dataset_config: &hub {eval_dataset_name: org/rows}
eval_dataset_split: *hub
eval_dataset_prompt_column: &file {eval_dataset_name: rows.jsonl}
eval_dataset_solution_column: *file
dataset_test_split: {dataset_name: org/rows}
kl_target: &kl {beta: 0.1}
kl_horizon: {beta: 0.1, kl_target: 0.1}
use_bias_correction_kl: *kl
maxent_length_normalize_ref: *kl
maxent_tau_lr: &entropy {maxent_target_entropy: 1.0}
maxent_tau_warmup_steps: *entropy
lora_r: &peft {use_peft: true}
lora_alpha: *peft
lora_dropout: *peft
lora_target_modules: *peft
project: {report_to: [trackio]}
""")
"""Other keys without which a key changes nothing."""

AROUND_THE_RUN = {
    *("push_to_hub", "hub_model_id", "hub_token", "hub_private_repo", "hub_revision"),
    *("hub_model_revision", "overwrite_hub_revision", "push_to_hub_revision"),
    *("wandb_entity", "chat_template", "benchmarks", "overwrite_output_dir", "env"),
    *("vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size"),
}
"""Used before or after the loop, or by training.sh; tested elsewhere."""

USED = [key for key in MAIN_KEYS if key.use == "used" and key.name not in AROUND_THE_RUN]


def translated(recipe: TrainingRecipe, script: Script = "grpo") -> OfflineKeys:
    return translate(replace(recipe, script=script), lambda _: ROWS)


def another_value(key: Key) -> Any:
    if key.name in OTHER:
        return OTHER[key.name]
    if isinstance(key.default, bool) or key.kind_name.startswith("bool"):
        return not key.default
    if isinstance(key.default, int | float):
        return type(key.default)(key.default * 2 or 1)
    if "list" in key.kind_name:
        return ["problem", "answer"]
    return 3 if "int" in key.kind_name else 0.25 if "float" in key.kind_name else "other"


by_name = attrgetter("name")


@pytest.mark.parametrize("key", USED, ids=by_name)
def test_a_used_key_changes_the_run(recipe_of: Recipes, key: Key) -> None:
    is_maxent = "maxent" in key.name or key.name == "train_grpo_objective"
    script: Script = "maxent" if is_maxent else "grpo"
    base = BASE | ({"maxent_tau": 0.1} if script == "maxent" else {}) | NEEDED.get(key.name, {})
    before = recipe_of(**base)

    changed = base | {key.name: another_value(key)}
    if key.name == "dataset_mixture":
        changed["dataset_name"] = None
    after = recipe_of(**changed)

    is_moved = run_directory(after) != run_directory(before)
    assert is_moved or translated(after, script) != translated(before, script)
    assert not [n for n in notes(replace(after, script=script)) if n.startswith(f"{key.name}:")]


@pytest.mark.parametrize("key", [k for k in KEYS if k.use == "without effect"], ids=by_name)
def test_a_key_without_effect_is_named_and_changes_nothing(recipe_of: Recipes, key: Key) -> None:
    recipe = recipe_of(**BASE, **{key.name: another_value(key)})

    assert [*notes(recipe)] == [f"{key.name}: {key.text}"]
    assert translated(recipe) == translated(recipe_of(**BASE))


@pytest.mark.parametrize(
    ("key", "script", "more", "reason"),
    [
        ("maxent_tau", "grpo", {}, "only src/maxent-grpo.py uses it"),
        ("scale_rewards", "maxent", {"maxent_tau": 0.1}, "MaxEnt-GRPO has no such part"),
        ("epsilon", "grpo", {"loss_type": "cispo"}, "loss_type cispo has no such bound"),
        ("lora_r", "grpo", {}, "needs use_peft"),
        ("kl_horizon", "grpo", {"beta": 0.1}, "needs kl_target and kl_horizon above 0"),
    ],
)
def test_a_key_whose_condition_does_not_hold_is_named_and_changes_nothing(
    recipe_of: Recipes, key: str, script: Script, more: dict[str, Any], reason: str
) -> None:
    recipe = recipe_of(**BASE, **more, **{key: another_value(TABLE[key])})

    assert [*notes(replace(recipe, script=script))] == [f"{key}: {reason}"]
    assert translated(recipe, script) == translated(recipe_of(**BASE, **more), script)


@pytest.mark.parametrize("key", [k for k in MAIN_KEYS if k.words], ids=by_name)
def test_every_word_is_translated_or_refused_and_others_are_mistakes(
    recipe_of: Recipes, key: Key
) -> None:
    base = BASE | NEEDED.get(key.name, {})
    for word, sets in key.words.items():
        if not isinstance(sets, str):
            found = translated(recipe_of(**base | {key.name: word})).model_dump()
            for path, value in sets.items():
                assert value_of(found, path) == value
    if "bool" not in key.kind_name:
        with pytest.raises(RecipeInvalid, match=f"{key.name}: expected one of .*; got 'other'"):
            translated(recipe_of(**base | {key.name: "other"}))
    with pytest.raises(RecipeInvalid, match="'batch' is not supported: TRL's batch centres"):
        translated(recipe_of(**BASE, scale_rewards="batch"))


@pytest.mark.parametrize("key", [k for k in MAIN_KEYS if k.use == "refused"], ids=by_name)
def test_a_refused_key_is_refused_with_the_reason_unless_it_asks_for_nothing(
    recipe_of: Recipes, key: Key
) -> None:
    value = {"a": 1} if key.kind_name.startswith("dict") else another_value(key)

    with pytest.raises(RecipeInvalid, match=f"{key.name}: ") as raised:
        translated(recipe_of(**BASE, **{key.name: value}))

    assert key.text in str(raised.value)
    plain = translated(recipe_of(**BASE))
    for harmless in key.harmless:
        assert translated(recipe_of(**BASE, **{key.name: harmless})) == plain


def test_an_alias_means_its_key_and_must_not_differ_from_it() -> None:
    for key in KEYS:
        if key.alias_of:
            assert TABLE[key.alias_of].use == key.use
    assert read_recipe(["--gen_temperature", "0.5"])["temperature"] == 0.5
    with pytest.raises(RecipeInvalid, match="torch_dtype: differs from dtype"):
        load_configs(["--dtype", "float32", "--torch_dtype", "bfloat16"])
    with pytest.raises(RecipeInvalid, match="init_kl_coeff: differs from beta"):
        objective_of("--beta", "0.1", "--init_kl_coeff", "0.2")


def test_every_mistake_is_named_at_once_with_its_line(tmp_path: Path) -> None:
    """Of the reading, of rules and of the offline trainer's own limits; the rows are not read."""
    file = tmp_path / "recipe.yaml"
    file.write_text("model_name_or_path: m\nseed: x\ngen_temperature: 0\noptim: lion\ntop_p: 1\n")
    words = ["--learnin_rate", "1", "--lr", "1", "--deepspeed", "zero3.json", "--top_p", "2"]
    words += ["--bf16", "--fp16"]

    with pytest.raises(RecipeInvalid) as raised:
        translate(read_recipe(["--config", str(file), *words]), lambda _: pytest.fail("rows"))

    seed, learning_rate, lr, deepspeed, optim, *others = str(raised.value).splitlines()
    assert seed.startswith(f"{file}:2: seed: expected int, got 'x'")
    assert learning_rate == "learnin_rate: no such key; did you mean learning_rate?"
    assert lr == "lr: no such key; did you mean learning_rate?"
    assert deepspeed.startswith("deepspeed: 'zero3.json' is not supported")
    assert optim.startswith(f"{file}:4: optim: expected one of adamw_torch, ")
    assert others == [
        "bf16: excludes fp16",
        "dataset_name: it or dataset_mixture is required",
        f"{file}:3: temperature: Input should be greater than 0",
        "top_p: Input should be less than or equal to 1",
    ]


def test_flags_win_over_the_file_and_take_the_forms_of_trls_parser(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("seed: 1\nlearning_rate: 1e-5\nenv: {SOME_VARIABLE: 7}\neval_strategy: no\n")
    words = [
        *("--config", str(file), "--use_vllm", "--seed=2", "--no_gradient_checkpointing"),
        *("--reward_funcs", "a", "b", "--bf16", "false", "--report-to", "none"),
        *("--dataset_mixture", '{"datasets": [{"id": "x"}]}'),
    ]

    recipe = read_recipe(words)

    assert recipe.given == {
        **{"seed": 2, "learning_rate": 1e-5, "eval_strategy": "no", "use_vllm": True},
        **{"gradient_checkpointing": False, "reward_funcs": ["a", "b"], "bf16": False},
        **{"report_to": ["none"], "dataset_mixture": {"datasets": [{"id": "x"}]}},
        "env": {"SOME_VARIABLE": 7},
    }


def objective_of(*keys: str) -> Objective:
    words = ["--model_name_or_path", "x", "--dataset_name", "x.jsonl", *keys]
    options: dict[str, Any] = translated(read_recipe(words)).grpo
    names = {field.name for field in fields(Objective)}
    chosen = {name: value for name, value in options.items() if name in names}
    return resolved(options.get("objective", "grpo"), chosen)


@pytest.mark.parametrize(
    ("keys", "low", "high"),
    [
        # torch.clamp(ratio, 1 - epsilon, 1 + epsilon_high), where epsilon_high defaults to epsilon
        (("--loss_type", "grpo", "--epsilon", "0.1"), 0.9, 1.1),
        (("--loss_type", "dapo", "--epsilon", "0.1", "--epsilon_high", "0.28"), 0.9, 1.28),
        (("--loss_type", "dr_grpo", "--epsilon_high", "0.3"), 0.8, 1.3),
        # torch.clamp(ratio, max=epsilon_high)
        (("--loss_type", "cispo", "--epsilon_high", "5.0"), 0.0, 5.0),
        (("--loss_type", "cispo", "--epsilon_high", "2.5"), 0.0, 2.5),
        (("--loss_type", "cispo"), 0.0, 5.0),
    ],
)
def test_importance_ratios_have_trls_bounds(keys: tuple[str, ...], low: float, high: float) -> None:
    assert bounds(objective_of(*keys)) == (pytest.approx(low), pytest.approx(high))


def test_a_bound_below_one_is_refused_with_cispo() -> None:
    with pytest.raises(RecipeInvalid, match=r"epsilon_high: .* above 1, for example 5.0; got 0.28"):
        objective_of("--loss_type", "cispo", "--epsilon_high", "0.28")


@pytest.mark.parametrize(
    ("mode", "kind", "level"),
    [("token_truncate", "truncate", "token"), ("sequence_mask", "mask", "sequence")],
)
def test_the_cap_of_the_correction_is_trls(mode: str, kind: str, level: str) -> None:
    found = objective_of(
        *("--vllm_importance_sampling_mode", mode, "--vllm_importance_sampling_clip_max", "2.0")
    )
    assert (found.importance_correction, found.importance_correction_level) == (kind, level)
    assert found.importance_correction_cap == 2.0


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: str(file.relative_to(ROOT)))
@pytest.mark.parametrize(
    ("gpus", "server", "training"), [("", "", ""), ("0", "0", "0"), ("0,1,2", "0", "1,2")]
)
def test_every_recipe_is_valid_and_each_gpu_besides_the_servers_has_a_rank(
    file: Path, gpus: str, server: str, training: str
) -> None:
    recipe = read_recipe(["--config", str(file)], "maxent" if "maxent" in str(file) else "grpo")

    plan = server_plan(recipe, {"GPUS": gpus})

    assert not [*notes(recipe)]
    assert plan.mode == ("none" if gpus == "0,1,2" else "shared_vllm")
    assert (plan.server_gpus, plan.train_gpus) == (server, training)
    assert plan.ranks == (2 if gpus == "0,1,2" else 1)
    assert server_plan(recipe, {"TRAIN_RANKS": "2"}).mode == "none"


def test_batches_count_as_in_trl(recipe_of: Recipes) -> None:
    """8 sequences in each of 4 micro-batches are 32 completions, of 4 prompts with 8 each."""
    content = BASE | {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "num_generations": 8,
        "max_steps": -1,
        "num_train_epochs": 2,
    }
    keys = translated(recipe_of(**content))
    assert (keys.data.problems_per_iteration, keys.steps_per_iteration) == (4, 1)
    assert keys.train.iterations == 2 * ROWS // 4

    keys = translated(recipe_of(**content | {"steps_per_generation": 8, "max_steps": 10}))
    assert (keys.data.problems_per_iteration, keys.steps_per_iteration) == (8, 2)
    assert keys.train.iterations == 5

    with pytest.raises(RecipeInvalid, match="num_generations: 7 does not divide the 32"):
        translated(recipe_of(**content | {"num_generations": 7}))


def test_the_server_fits_the_recipe_and_the_variables_win(recipe_of: Recipes) -> None:
    recipe = recipe_of(**BASE, use_peft=True, lora_r=20, vllm_max_model_length=512)

    plan = server_plan(recipe, {"GPUS": "4,5,6", "VLLM_TP_SIZE": "2"})
    assert (plan.mode, plan.server_gpus, plan.train_gpus) == ("lora_only", "4,5", "6")
    assert plan.redis == "yes"
    words = " ".join(plan.arguments)
    for word in ("--max-lora-rank 32", "--max-model-len 512", "--gpu-memory-utilization 0.9"):
        assert word in words

    variables = {"GPUS": "0,1", "VLLM_MAX_LEN": "99", "VLLM_MEM_UTIL": "0.5"}
    words = " ".join(server_plan(recipe, variables).arguments)
    assert "--max-model-len 99" in words
    assert "--gpu-memory-utilization 0.5" in words

    wrong = recipe_of(**BASE, grpo={"clip_epss": 1}, env_server={"held_out": 2})
    with pytest.raises(RecipeInvalid, match=r"clip.epss: no such(.|\n)*held.out: expected"):
        server_plan(wrong, {})
    with pytest.raises(RecipeInvalid, match="1 GPUs"):
        server_plan(recipe, {"GPUS": "0", "VLLM_TP_SIZE": "2"})


def test_each_rank_has_its_share_of_a_step() -> None:
    recipe = read_recipe(["--config", str(TINY), "--fsdp", "full_shard"])

    one, three = (translate(recipe, lambda _: 100, ranks) for ranks in (1, 3))

    assert three.sequences_per_iteration == 3 * one.sequences_per_iteration
    assert three.train.grad_accum_steps == 3 * one.train.grad_accum_steps
    assert three.train.batch_size == one.train.batch_size
    assert three.steps_per_iteration == one.steps_per_iteration
    assert three.grpo["fsdp"] is True


def test_the_number_of_ranks_and_sharding_by_others() -> None:
    assert rank_count({}) == 1
    assert rank_count({"WORLD_SIZE": "6", "ACCELERATE_USE_FSDP": "false"}) == 6
    with pytest.raises(RecipeInvalid, match="does not use DeepSpeed"):
        rank_count({"ACCELERATE_USE_DEEPSPEED": "true"})


@pytest.mark.usefixtures("unchanged_process")
def test_a_rank_above_0_follows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    followed: list[Path] = []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(main, "configure_logging", lambda *_: None)
    monkeypatch.setattr(main, "prepare_cpu", lambda: None)
    monkeypatch.setattr(loop, "follow_offline", lambda _, directory: followed.append(directory))

    main.main("grpo", ["--config", str(TINY), "--output_dir", str(tmp_path / "run")])

    assert followed == [tmp_path / "run"]
    assert not [*tmp_path.iterdir()]


def test_the_dataclasses_hold_the_values_of_a_recipe() -> None:
    configs = load_configs(["--config", str(RECIPES[0]), "--seed", "7"])

    assert configs.training.seed == 7
    assert configs.model.model_name_or_path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert configs.script.reward_funcs == ["exact_answer"]
    assert GRPOConfig().learning_rate == 1e-6
    assert ScriptArguments(dataset_name="x").reward_funcs == ["exact_answer"]


def test_help_and_mistakes_need_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['src/grpo.py', '--help']; sys.path.insert(0, 'src'); "
        "import rewards; from grpo_runs.recipe.main import main; main('grpo'); "
        "sys.exit('torch' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    for key in KEYS:
        assert f"--{key.name} " in done.stdout


@pytest.mark.parametrize("name", ["num_train_epochs", "warmup_steps", "eval_steps", "save_steps"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_length_that_is_no_number_is_a_mistake(recipe_of: Recipes, name: str, value: str) -> None:
    with pytest.raises(RecipeInvalid, match=f"{name}: expected a finite number"):
        translated(recipe_of(**BASE | {name: float(value)}))
