"""The faults: how each is injected, and the words by which the trainer must name its cause.

A fault of the environment, or of a relay behind it, begins with the second batch. A fault of the
trainer's code, of a file or of the server is there from the start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from grpo_trainer.checks.causes import Cause
from grpo_trainer.checks.findings import CheckName
from tests.silent_faults import in_the_trainer as trainer
from tests.silent_faults import on_the_way as way
from tests.silent_faults.producer import Change, unchanged

SHARED, LORA, KEPT_KV = "shared_vllm", "lora_only", "kept_kv"
"""Where a fault is tried: a mode of the trainer, or `lora_only` with a server that reuses the KV
cache of an earlier adapter."""


@dataclass(frozen=True)
class Fault:
    """Args:
    injected: what is done, for the table
    named: an error or a warning must contain one of these words
    thread: where users of another system met it: repository and number on GitHub
    change, producer: the faulty environment
    options, sabotage: the faulty trainer
    """

    injected: str
    named: tuple[str, ...]
    thread: str = ""
    change: Change = unchanged
    producer: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    sabotage: trainer.Sabotage = trainer.nothing
    mode: str = SHARED

    @property
    def is_of_environment(self) -> bool:
        return self.change is not unchanged or bool(self.producer)


COMPLETION = "tokens of the completion: the first difference"
PROMPT = "tokens of the prompt: the first difference"
LOGPROBS = "inference_logprobs: the first difference"
VERSIONS = "policy_version: "
"""Of the errors about receipts."""
TOKENS = (Cause.OTHER_TOKENS, PROMPT, COMPLETION)
UNPACED = {"paced": False}
"""No step is taken on such groups."""
PENALTY = {"kl_coef": 0.05}
COOLER = {"temperature": 0.7}
SYSTEM = "You are a calculator."
FAULTS = {
    # On the way from the server to the trainer.
    "shifted logprobs": Fault(
        "each token gets the logprob of its left neighbour",
        (Cause.LOGPROBS_LATE, LOGPROBS),
        change=way.late,
    ),
    "logprobs of another unit": Fault(
        "logprobs times 0.8", (Cause.SCALED, LOGPROBS), change=way.scaled
    ),
    "logprobs rounded to bfloat16": Fault(
        "each logprob is rounded to bfloat16",
        (Cause.ROUNDED, "rounding to bfloat16", LOGPROBS),
        change=way.rounded,
    ),
    "logprobs of four digits": Fault(
        "each logprob is rounded to four digits after the point",
        (LOGPROBS,),
        change=way.four_digits,
    ),
    "raw logprobs": Fault(
        "sampled at 0.7, which the group states, with logprobs of temperature 1",
        ("at temperature 1", LOGPROBS),
        "huggingface/trl#4159",
        producer={"sampling": COOLER, "states": COOLER, "rescores": True},
    ),
    "wrong temperature": Fault(
        "sampled at 0.7, stated as 1",
        (Cause.TEMPERATURE, "'temperature'", "temperature: sampled with 0.7"),
        producer={"sampling": {"temperature": 0.7}},
    ),
    "top-p logprobs not renormalised": Fault(
        "sampled with top_p 0.8, with the logprobs of the whole distribution",
        (CheckName.TRUNCATED_SAMPLING, "top_p: sampled with 0.8"),
        "huggingface/trl#6789",
        producer={"sampling": {"top_p": 0.8}, "rescores": True},
    ),
    "prompt trained on": Fault(
        "the masks begin within the prompt",
        ("prompt_trained_on", Cause.PROMPT_TRAINED, "masks: token"),
        change=way.prompt_trained,
        producer=UNPACED,
    ),
    "padding counted": Fault(
        "padding after the end token is in the masks",
        ("trained_after_end_token", "masks: token"),
        "bingreeky/MemGen#33",
        change=way.padded,
        producer=UNPACED,
    ),
    "end token masked": Fault(
        "the mask of each end token is -100",
        (CheckName.END_TOKEN_MASKED,),
        "mll-lab-nu/RAGEN#59",
        change=way.end_masked,
    ),
    "retokenised text": Fault(
        "a third of the completions have another token id than the sampled one",
        TOKENS,
        "huggingface/trl#5224",
        change=way.retokenised,
    ),
    "answer stripped": Fault(
        "the first token of each completion is left out, as a template strips a thought",
        TOKENS,
        "verl-project/verl#6854",
        change=way.stripped,
    ),
    "another prompt": Fault(
        "the prompt that is sent is not the one that was sampled from",
        TOKENS,
        change=way.another_prompt,
    ),
    "prompt begun twice": Fault(
        "the first token of the prompt is sent twice",
        TOKENS,
        "huggingface/open-r1#462",
        change=way.begun_twice,
    ),
    "system prompt dropped": Fault(
        "sampled with a system message, sent without it",
        TOKENS,
        change=way.without_system,
        producer={"system": SYSTEM},
    ),
    "off-by-one version": Fault(
        "groups state the version after the one that sampled them",
        (CheckName.VERSION_AHEAD, VERSIONS),
        change=way.version_ahead,
    ),
    "version of the start": Fault(
        "all groups state the version that was served when the environment started",
        (VERSIONS,),
        change=way.version_of_start,
    ),
    "scores in another order": Fault(
        "each completion gets the score of the next one of its group",
        ("assigns scores to the wrong completions", "score: the environment gave"),
        "verl-project/verl#2185",
        change=way.scores_moved,
    ),
    "duplicated batch": Fault(
        "run-api hands out the first batch again",
        ("were already in the batch of step 0",),
        producer={"repeats": True},
    ),
    "group sent twice under two keys": Fault(
        "each batch contains a group twice",
        ("trained_groups.received_again",),
        producer={"sends_twice": True},
    ),
    # In the environment.
    "NaN reward as 0": Fault(
        "30 % of the rewards are NaN, which the environment sends as 0",
        (CheckName.INCONSISTENT_SCORES,),
        "huggingface/trl#5773",
        change=way.failed_as_zero,
    ),
    "truncated answers scored as finished": Fault(
        "completions stop before the end token, and text without an end token gets full marks",
        (CheckName.UNFINISHED_SCORED,),
        producer={"cuts_off": True},
    ),
    "reward broadcast over a group": Fault(
        "each completion gets the mean score of its group",
        (CheckName.EQUAL_SCORES,),
        "huggingface/trl#6533",
        change=way.broadcast,
    ),
    # Between the trainer and the server.
    "stale weights": Fault(
        "updates never reach the server",
        (Cause.STALE_WEIGHTS, "does not serve the trainer's weights"),
        "huggingface/trl#5312",
        sabotage=trainer.train_a_copy,
    ),
    "update not written": Fault(
        "only the first update is written into the shared memory",
        ("parameters in shared memory differ from the optimizer's result",),
        sabotage=trainer.write_only_once,
    ),
    "one tensor not written": Fault(
        "updates leave out the embedding",
        (" 1 of ",),
        "PrimeIntellect-ai/prime-rl#2823",
        sabotage=trainer.embedding_left_out,
    ),
    "adapter without a layer": Fault(
        "the published adapter lacks a layer",
        ("does not apply the adapter's part of",),
        sabotage=trainer.adapter_without_layer,
        mode=LORA,
    ),
    "adapter with other keys": Fault(
        "the keys of the published adapter name modules that the model does not have",
        ("without any training", "language_model"),
        "vllm-project/vllm#34186",
        sabotage=trainer.adapter_renamed,
        mode=LORA,
    ),
    "wrong adapter scale": Fault(
        "the published adapter states twice its lora_alpha",
        ("lora_alpha",),
        sabotage=trainer.adapter_scaled,
        mode=LORA,
    ),
    "stale KV cache": Fault(
        "the server's prefix cache outlives an adapter",
        ("still in the server's KV cache",),
        "NVIDIA-NeMo/RL#4018",
        mode=KEPT_KV,
    ),
    # In the trainer.
    "lost update in bfloat16": Fault(
        "master weights are rounded to bfloat16 after each step",
        (CheckName.LOST_UPDATE,),
        options={"lr": 3e-5},
        sabotage=trainer.rounded_to_bfloat16,
    ),
    "dropout on in the check": Fault(
        "the pass compared with the server has dropout",
        ("dropout is on", Cause.TRAINING_PASS),
        options={"lora_dropout": 0.2},
        sabotage=trainer.dropout_in_the_check,
        mode=LORA,
    ),
    "reference that moves": Fault(
        "the reference model is the policy itself",
        (CheckName.REFERENCE_MOVED,),
        options=PENALTY,
        sabotage=trainer.reference_is_policy,
    ),
    "gradient of one micro-batch dropped": Fault(
        "every fourth micro-batch gives no gradient",
        ("a micro-batch is left out",),
        sabotage=trainer.micro_batch_dropped,
    ),
    "loss divided again": Fault(
        "each loss is divided by the number of micro-batches once more",
        ("divided by the number of micro-batches",),
        "modelscope/ms-swift#10117",
        sabotage=trainer.divided_again,
    ),
    "mean over each micro-batch": Fault(
        "each micro-batch has the same weight, however many tokens it has",
        ("the loss of micro-batches of one sequence each differs",),
        "NVIDIA-NeMo/RL#3791",
        sabotage=trainer.mean_of_micro_batch,
    ),
    "KL penalty with the wrong sign": Fault(
        "the loss gains less the further the policy is from the reference model",
        ("the KL penalty",),
        "qiancheng0/ToolRL#52",
        options=PENALTY,
        sabotage=trainer.kl_turned,
    ),
    "clip bounds exchanged": Fault(
        "--clip-eps is used above 1, and --clip-eps-high below",
        ("--clip-eps",),
        options={"clip_eps": 0.2, "clip_eps_high": 0.3},
        sabotage=trainer.bounds_exchanged,
    ),
    "ratio to itself": Fault(
        "the importance ratio compares the policy with itself, so it is always 1",
        ("importance ratio",),
        "GMISWE/tinker-cloud#66",
        sabotage=trainer.ratio_to_itself,
    ),
    "advantages over the batch": Fault(
        "scores are centred over the batch instead of their group",
        ("the advantages of a group",),
        "XU-YIJIE/grpo-flat#2",
        sabotage=trainer.advantages_of_batch,
    ),
}
ALSO = {
    "another chat template": Fault(
        "the newline after the question's role is sent as a space",
        TOKENS,
        change=way.another_template,
    ),
    "one token retokenised": Fault(
        "in one completion of each batch, one token is another id than the sampled one",
        (*TOKENS, CheckName.SINGLE_TOKENS),
        change=way.one_retokenised,
        producer={"changes_one": True},
    ),
    "KL penalty left out": Fault(
        "--kl-coef is above 0, and the loss has no penalty",
        ("the KL penalty",),
        "THUDM/slime#1247",
        options=PENALTY,
        sabotage=trainer.kl_left_out,
    ),
}
