"""Agents of libraries from PyPI run unmodified as rollouts, in the sandbox, and every token that
was sampled is recorded once: examples/agents/, each in an environment of its own."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_core.tree.environment_values import AGENT
from grpo_env.loading import find_task
from grpo_env.rollout.chat_template import load_template
from grpo_env.rollout.groups import SampledGroup
from grpo_env.tasks import TaskOptions
from tests.compat.upstream_processes import installed
from tests.unit.env.conftest import tokenizer_dir as tokenizer_dir
from tests.unit.env.rollout.rig import PLAN, sample, submitted
from tests.unit.env.rollout.test_conversation import SAID, scripted
from tests.unit.env.sandbox.conftest import bubblewrap as bubblewrap

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]  # the first use installs the library

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples/agents"
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "20+55"}}</tool_call>'
FINAL = '<tool_call>{"name": "final_answer", "arguments": {"answer": "75"}}</tool_call>'
COMMAND = "I add.\n```bash\necho $((20+55))\n```"


async def rollout(library: str, program: str, directory: Path, *texts: str) -> SampledGroup:
    """The program's rollout with a policy that says these texts."""
    python = installed(ROOT / f"requirements/agents/{library}.txt").python
    how = {"calls": 4, "deadline_s": 300.0, "rollouts": 1, "sequences": 2}
    command = shlex.join([str(python), str(EXAMPLES / program)])
    reward = f"{ROOT}/examples/calculator.py:Calculator"
    task = find_task(AGENT)(TaskOptions(args={"command": command, "reward": reward, **how}))
    template = load_template(str(directory))
    plan = replace(PLAN, group_size=1, drop_equal_scores=False, max_sequences=2)
    plan = replace(plan, max_token_length=2000)
    try:
        outcome, _ = await sample(scripted(*texts), task, plan, template=template)
    finally:
        task.close()
    return outcome


@pytest.mark.usefixtures("bubblewrap")
@pytest.mark.parametrize(
    ("library", "program", "first", "last", "sequences"),
    [
        ("openai-agents", "openai_agents.py", CALL, "75!", 1),
        ("pydantic-ai", "pydantic_ai_agent.py", CALL, "75!", 1),
        ("langgraph", "langgraph_agent.py", CALL, "75!", 1),
        ("smolagents", "smolagents_agent.py", CALL, FINAL, 2),  # it writes the call in other words
        ("mini-swe-agent", "mini_swe_agent.py", COMMAND, "done", 1),
        ("anthropic", "anthropic_agent.py", CALL, "75!", 1),
    ],
)
async def test_its_calls_are_recorded_as_they_were_sampled(
    library: str, program: str, first: str, last: str, sequences: int, tokenizer_dir: Path
) -> None:
    outcome = await rollout(library, program, tokenizer_dir, first, last)
    group = submitted(outcome)
    assert group.overrides
    reasons = [override["finish_reason"] for override in group.overrides]
    assert reasons == ["stop"] * sequences + ["padding"] * (2 - sequences)
    # No tokenizer would make these ids: only what was sampled may come back, and each once.
    assert sum(mask.count(SAID[0]) for mask in group.masks) == 2
    assert group.messages
    shown = [message["content"] for conversation in group.messages for message in conversation]
    assert {first, last} <= {*shown}
    assert any("75" in text for text in shown if text not in (first, last))
    (answer,) = outcome.answers
    assert "75" in answer.state["output"]
