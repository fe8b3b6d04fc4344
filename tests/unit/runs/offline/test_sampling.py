"""Rollouts of this process have the policy's logprobs, lost groups are replaced, stale rollouts are
refused, and batches hold each sequence. The server says how new weights can reach it;
stock vLLM is sampled from as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_core.clients.inference import Completion
from grpo_core.errors import ProtocolViolation
from grpo_core.tree.objectives import Objective
from grpo_core.tree.trainer import ForwardOptions
from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.scored_group import ScoredGroup
from grpo_env.pacing import RolloutsFail
from grpo_env.rollout.groups import FailureReason, GroupLost, SampledGroup, SamplingPlan
from grpo_env.tasks import Task, TaskOptions
from grpo_env.tasks.item_stream import ItemStream
from grpo_env.tasks.items import Item
from grpo_runs.offline import local
from grpo_runs.offline.data import optimizer_batches
from grpo_runs.offline.errors import KeysInvalid, ServerUnsuitable, StaleServer
from grpo_runs.offline.keys import OfflineKeys
from grpo_runs.offline.local import LocalGeneration
from grpo_runs.offline.sampling import Sampler, require_fresh, require_own_policy, versions_of
from grpo_runs.offline.servers import Sampling, StockVllm, choose
from grpo_trainer.advantages import group_advantages
from grpo_trainer.data.groups import GroupLimits
from grpo_trainer.errors import PolicyMismatch
from grpo_trainer.model.forward import _probe_batch, build_forward_pass
from grpo_trainer.model.logprobs import logprobs_of
from grpo_trainer.model.policy import vocabulary_of
from tests.support.http_stub import Answer, stub_server

OURS = {"policy_version": [0, 0], "paused": False, "weights_intact": True}


def keys(url: str, backend: str = "vllm_server", mode: str = "auto") -> OfflineKeys:
    generation = {"backend": backend, "base_url": url}
    return OfflineKeys.model_validate({"generation": generation, "sync": {"mode": mode}})


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"weights_socket": "/s", "lora_enabled": False}, "shared_vllm"),
        ({"weights_socket": None, "lora_enabled": True}, "lora_only"),
        ({"weights_socket": None, "lora_enabled": False}, "none"),
    ],
)
def test_our_server_is_asked_for_its_mode(said: dict[str, Any], expected: str) -> None:
    with stub_server({"GET /bridge/info": lambda _: (200, OURS | said)}) as stub:
        assert choose(keys(stub.url)) == Sampling("ours", expected)  # type: ignore[arg-type]
        assert choose(keys(stub.url, mode="lora_restart")).mode == "lora_restart"
        assert choose(keys(stub.url, mode="frozen")).is_frozen


def test_another_vllm_server_keeps_its_weights() -> None:
    routes = {"GET /bridge/info": lambda _: (404, {}), "GET /v1/models": lambda _: (401, {})}
    with stub_server(routes) as stub:
        assert choose(keys(stub.url)) == Sampling("stock_vllm", "frozen")
        with pytest.raises(ServerUnsuitable, match="start vllm-api-server at"):
            choose(keys(stub.url, mode="shared_vllm"))


@pytest.mark.parametrize("answer", [(404, {}), (200, {"hello": "world"})])
def test_another_program_is_no_server(answer: Answer) -> None:
    routes = dict.fromkeys(("GET /bridge/info", "GET /v1/models"), lambda _: answer)
    with (
        stub_server(routes) as stub,
        pytest.raises(ServerUnsuitable, match="is no vLLM, SGLang or OpenAI API; check generation"),
    ):
        choose(keys(stub.url))


@pytest.mark.parametrize("mode", ["shared_vllm", "frozen"])
def test_sampling_in_this_process_has_one_mode(mode: str) -> None:
    assert choose(keys("http://h:1", "local")) == Sampling("local", "local")
    with pytest.raises(ServerUnsuitable, match="has no server"):
        choose(keys("http://h:1", "local", mode))


async def generated_by_stock_vllm(*choices: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Its answer as the client reads it, and the request."""
    with stub_server({"POST /v1/completions": lambda _: (200, {"choices": [*choices]})}) as stub:
        async with StockVllm(stub.url, "m", 10.0, 4) as client:
            answer = await client.generate([1, 2, 3], n=2, max_tokens=4, temperature=0.5)
        (body,) = stub.bodies("POST /v1/completions")
    return answer, body


CHOICE = {"text": "7", "finish_reason": "stop"}


async def test_stock_vllm_is_asked_for_token_ids_and_gives_no_logprobs() -> None:
    stopped = CHOICE | {"token_ids": [5, 2]}
    answer, body = await generated_by_stock_vllm(stopped, stopped | {"finish_reason": "length"})
    assert body["prompt"] == [1, 2, 3]
    assert (body["model"], body["n"], body["temperature"]) == ("m", 2, 0.5)
    assert answer.token_ids == [[5, 2], [5, 2]]
    assert answer.finish_reasons == ["stop", "length"]
    assert [c.logprobs for c in answer.completions()] == [[0.0, 0.0]] * 2


async def test_an_old_vllm_without_token_ids_is_named() -> None:
    with pytest.raises(ProtocolViolation, match=r"use vLLM 0\.10\.2 or later"):
        await generated_by_stock_vllm(CHOICE, CHOICE)


PLAN = SamplingPlan(2, 1.0, 64, 4, drop_equal_scores=False)
TASK = Task(TaskOptions())
START = PolicyVersion(1, 0)
LIMITS = GroupLimits(vocab_size=100, seq_len=64)


def group(scores: Sequence[float], version: PolicyVersion = START) -> ScoredGroup:
    count = len(scores)
    return ScoredGroup(
        tokens=[[1, 2, 3]] * count,
        masks=[[-100, 2, 3]] * count,
        inference_logprobs=[[1.0, -0.5, -0.5]] * count,
        scores=[*scores],
        group_overrides={"policy_version": [[[*version], [*version]]] * count},
    )


class Engine:
    """Fails for the items whose prompts it is given."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.asked: list[str] = []

    async def roll_out(self, item: Item, _plan: SamplingPlan) -> SampledGroup:
        self.asked.append(str(item.prompt))
        if item.prompt in self.failing:
            return SampledGroup(lost=GroupLost(FailureReason.REFUSED, f"no {item.prompt}"))
        return SampledGroup(group=group([0.0, 1.0]))


async def sampled(engine: Engine, *prompts: str, has_logprobs: bool = True) -> list[ScoredGroup]:
    """The groups of an iteration with one spare item."""
    sampler = Sampler(engine, PLAN, 2, has_logprobs)  # type: ignore[arg-type]
    *items, spare = (Item(TASK, {}, prompt) for prompt in (*prompts, "spare"))
    return await sampler.groups(items, ItemStream([([spare], 1.0)], seed=0))


async def test_a_lost_group_is_replaced_by_one_of_a_spare_item() -> None:
    engine = Engine("bad")
    assert len(await sampled(engine, "good", "bad", "fine")) == 3
    assert engine.asked == ["good", "bad", "fine", "spare"]


async def test_an_iteration_gives_up_when_two_of_three_groups_are_lost() -> None:
    with pytest.raises(RolloutsFail, match="because: no spare"):
        await sampled(Engine("bad", "spare"), "bad", "bad")


async def test_logprobs_that_are_placeholders_do_not_reach_the_trainer() -> None:
    [group] = await sampled(Engine(), "good", has_logprobs=False)
    assert group.inference_logprobs is None


def test_rollouts_of_other_weights_are_refused() -> None:
    groups = [group([0, 1]), group([0, 1], PolicyVersion(1, 1))]
    require_fresh(versions_of(groups[:1]), {START})
    with pytest.raises(StaleServer, match=r"version \(1, 1\), but the trainer holds .*\(1, 0\)"):
        require_fresh(versions_of(groups), {START})


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 12])
def test_batches_hold_every_sequence_once_with_the_advantage_of_its_whole_group(steps: int) -> None:
    groups = [group([0, 1, 2, 4]), group([1, 0, 0, 0]), group([3, 1, 2, 2])]
    objective = Objective()
    batches = optimizer_batches(groups, steps, objective, LIMITS)
    sizes = [sum(part.size for part in batch) for batch in batches]
    assert max(sizes) - min(sizes) <= 1
    assert sum(sizes) == 12
    parts = [part for batch in batches for part in batch]
    assert [s for part in parts for s in part.scores] == [s for one in groups for s in one.scores]
    whole = group_advantages(groups, objective)
    expected = [value for advantages in whole for value in advantages.tolist()]
    assert [value for part in parts for value in advantages_of(part, objective)] == expected


def advantages_of(part: ScoredGroup, objective: Objective) -> list[float]:
    if part.advantages:
        return [row[0] for row in part.advantages]
    (computed,) = group_advantages([part], objective)
    found: list[float] = computed.tolist()
    return found


@pytest.mark.parametrize(
    "objective",
    [
        Objective(advantage="maxent"),
        Objective(advantage="batch_std"),
        Objective(advantage="my.py:advantage"),
        Objective(kl_coef=0.1, kl_in="reward"),
    ],
)
def test_some_objectives_need_whole_groups(objective: Objective) -> None:
    assert len(optimizer_batches([group([0, 1]), group([1, 0])], 2, objective, LIMITS)) == 2
    with pytest.raises(KeysInvalid, match="whole groups"):
        optimizer_batches([group([0, 1, 2]), group([1, 0, 0])], 4, objective, LIMITS)


PROMPT = [10, 20, 30]


def policy_of(model: str, gradient_checkpointing: bool = False) -> Any:
    policy: Any = AutoModelForCausalLM.from_pretrained(model).eval()
    options = ForwardOptions(gradient_checkpointing=gradient_checkpointing)
    forward = build_forward_pass(policy, options)
    # As after a training step.
    forward(policy, _probe_batch(vocabulary_of(policy))).logp.sum().backward()  # type: ignore[no-untyped-call]
    return policy


class LocalEngine(LocalGeneration):
    """Samples with one policy."""

    def __init__(self, model: str, policy: Any) -> None:
        super().__init__(policy, AutoTokenizer.from_pretrained(model), lambda: START, seed=0)

    async def sample(self, prompt: list[int], **sampling: Any) -> list[Completion]:
        return (await self.generate(prompt, **sampling)).completions()

    async def sample_plainly(self, prompt: list[int], max_tokens: int) -> Completion:
        return (await self.sample(prompt, max_tokens=max_tokens))[0]


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
async def test_logprobs_are_those_of_the_policy(model: str, gradient_checkpointing: bool) -> None:
    policy = policy_of(model, gradient_checkpointing)
    for completion in await LocalEngine(model, policy).sample(PROMPT, max_tokens=16, n=4):
        ours = logprobs_of(policy, [*PROMPT, *completion.token_ids])[len(PROMPT) - 1 :]
        torch.testing.assert_close(torch.tensor(completion.logprobs), ours, atol=1e-4, rtol=0)


async def test_a_token_that_the_model_does_not_have_is_named(model: str) -> None:
    policy = policy_of(model)
    size = policy.config.vocab_size
    with pytest.raises(PolicyMismatch, match=rf"token id {size}, but .* has {size} tokens"):
        await LocalEngine(model, policy).sample([*PROMPT, size], max_tokens=1)


def test_a_model_without_an_end_token_is_named(model: str) -> None:
    policy = policy_of(model)
    policy.config.eos_token_id = policy.generation_config.eos_token_id = None
    with pytest.raises(PolicyMismatch, match="names no end token"):
        LocalEngine(model, policy)


async def test_completions_beyond_the_limit_are_sampled_in_further_passes(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_of(model)
    monkeypatch.setattr(local, "LOGITS_AT_ONCE", 2 * 16 * policy.config.vocab_size)
    sizes = []
    generate = policy.generate
    monkeypatch.setattr(
        policy,
        "generate",
        lambda *a, **k: sizes.append(k["num_return_sequences"]) or generate(*a, **k),
    )
    assert len(await LocalEngine(model, policy).sample(PROMPT, max_tokens=16, n=5)) == 5
    assert sizes == [2, 2, 1]


async def test_sampling_ignores_the_parameters_that_a_model_brings(model: str) -> None:
    policy = AutoModelForCausalLM.from_pretrained(model)
    policy.generation_config.top_p = 1e-6
    found = await LocalEngine(model, policy).sample([65, 66], n=8, max_tokens=4, temperature=1.0)
    assert len({tuple(one.token_ids) for one in found}) > 1
    assert policy.generation_config.top_p == 1e-6


async def test_tokens_of_another_policy_are_named_however_rollouts_are_sampled(model: str) -> None:
    policy, other = policy_of(model), policy_of(model)
    await require_own_policy(LocalEngine(model, policy), policy)  # type: ignore[arg-type]
    with torch.no_grad():
        for weights in other.parameters():
            weights.mul_(1.5)
    with pytest.raises(StaleServer, match="differ from those of the trainer's policy by"):
        await require_own_policy(LocalEngine(model, other), policy)  # type: ignore[arg-type]
