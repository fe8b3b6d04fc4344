"""Sends the faults of environments to the API server of the archived trainer, atroposlib 0.4.0, and
tells what its trainer's documents say of each.

The package index has the API server and the base of environments, and not the trainer. So the
server's answers are measured, and the trainer's reports are those of its documents.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
from transformers import AutoTokenizer

from benchmarks.run_api_bench.servers import running
from grpo_core.wire.fields import MASKED, PROMPT_LOGPROB
from grpo_core.wire.scored_group import ScoredGroup
from grpo_tiny_model.model import ensure_tiny_model
from tests.silent_faults.exercise import GROUP_SIZE, TINY, TokenIds
from tests.silent_faults.faults import ALSO, FAULTS, Fault

SECTION = "The same faults in the archived trainer"
REGISTRATION = {
    "wandb_group": "faults",
    "wandb_project": "faults",
    "batch_size": GROUP_SIZE,
    "max_token_len": 128,
    "checkpoint_dir": "",
    "save_checkpoint_interval": 0,
    "starting_step": 0,
    "num_steps": 10,
}
NOT_PUBLISHED = "not tried: the trainer is in no package index"
DIFF = "the metric `alignment/diff_abs_mean`, without a warning"
MISMATCH = "`LogProb Alignment: MISMATCH!` in the log of mode `shared_vllm`; the run goes on"
NOTHING = "nothing"
POSITIVE = "the warning `ref_logprobs at generated positions avg …`"
"""The documents name no other reports. The metric is compared at the start of a step."""
SEEN_IN_LOGPROBS = {
    "shifted logprobs",
    "logprobs of another unit",
    "raw logprobs",
    "wrong temperature",
    "prompt trained on",
    "retokenised text",
    "one token retokenised",
    "answer stripped",
    "another prompt",
    "prompt begun twice",
    "system prompt dropped",
    "another chat template",
}
OTHER_WEIGHTS = {"stale weights", "one tensor not written"}


def table(faults: Collection[str], _state: Path | None = None) -> list[str]:
    """Lines of markdown."""
    known = FAULTS | ALSO
    sent = [name for name in faults if known[name].is_of_environment]
    answers = _sent({name: known[name] for name in sent})
    refused = [name for name in sent if not answers[name].startswith("accepted")]
    lines = [
        "The package index has the archived trainer's API server and its base of environments",
        "(atroposlib 0.4.0), and not the trainer itself. So a group with each of the",
        f"{len(sent)} faults of environments and relays is sent to that API server, which refuses",
        f"{len(refused)} of them. The last column is the report that the trainer's documents",
        "describe for such data. No code of the trainer was run.",
        "",
        "| Fault | API server | Report that the documents describe |",
        "|---|---|---|",
    ]
    for name in faults:
        answer = answers.get(name, NOT_PUBLISHED)
        lines.append(f"| {name} | {answer} | {_documented(name, known[name])} |")
    return lines


def _documented(name: str, fault: Fault) -> str:
    if name in OTHER_WEIGHTS:
        return MISMATCH
    if fault.is_of_environment:
        group = fault.change(_group(), _ids())
        pairs = zip(group.masks, group.inference_logprobs or [], strict=True)
        logged = [
            v for row, values in pairs for m, v in zip(row, values, strict=True) if m != MASKED
        ]
        if fmean(logged) > 0:
            return POSITIVE
    return DIFF if name in SEEN_IN_LOGPROBS else NOTHING


def _sent(faults: dict[str, Fault]) -> dict[str, str]:
    """What the API server makes of a group with each fault, by name."""
    found = {}
    with running("atroposlib") as server, httpx.Client(timeout=60) as http:
        url = f"http://127.0.0.1:{server.port}"
        http.post(f"{url}/register", json=REGISTRATION).raise_for_status()
        for name, fault in faults.items():
            group = fault.change(_group(), _ids()).model_dump()
            times = 2 if fault.producer.keys() & {"sends_twice", "repeats"} else 1
            for _ in range(times):
                answer = http.post(f"{url}/scored_data", json=group)
            if answer.is_error:
                found[name] = f"refused with status {answer.status_code}"
                continue
            batches = [http.get(f"{url}/batch").json()["batch"] for _ in range(times)]
            is_equal = all(batch and _fields(batch[0]) == _fields(group) for batch in batches)
            told = "handed on" if times == 1 else f"handed on {times} times"
            found[name] = f"accepted, {told} as it is" if is_equal else "accepted, changed"
    return found


def _fields(group: dict[str, Any]) -> list[Any]:
    return [group[name] for name in ("tokens", "masks", "scores", "inference_logprobs")]


def _ids() -> TokenIds:
    return TokenIds.of(AutoTokenizer.from_pretrained(ensure_tiny_model()))


def _group() -> ScoredGroup:
    """Eight answers to one sum, with plausible logprobs."""
    tokenizer = AutoTokenizer.from_pretrained(ensure_tiny_model())
    system = {"role": "system", "content": "Add."}
    text = tokenizer.apply_chat_template(
        [system, *TINY.question(3, 9)], tokenize=False, add_generation_prompt=True
    )
    prompt = tokenizer.encode(text)
    answers = [[*tokenizer.encode(str(8 + i)), tokenizer.eos_token_id] for i in range(GROUP_SIZE)]
    return ScoredGroup(
        tokens=[prompt + answer for answer in answers],
        masks=[[MASKED] * len(prompt) + answer for answer in answers],
        scores=[float(8 + i == 12) for i in range(GROUP_SIZE)],
        inference_logprobs=[
            [PROMPT_LOGPROB] * len(prompt) + [-0.1234567 - i / 7 for i in range(len(answer))]
            for answer in answers
        ],
        generation_params={"temperature": 1.0, "max_tokens": TINY.max_tokens},
        group_overrides={"policy_version": [[[1, 3], [1, 3]]] * GROUP_SIZE},
    )
