"""Chooses, when a run begins, how the logprobs of a micro-batch are computed.

A faster way must give the same numbers as the plain way. This is tested on the actual model with a
few tokens before training, so unsupported features of a model are found.

Legend: B sequences, T positions after the causal shift, K positions that are trained on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import structlog
import torch
from torch import Tensor, nn

from grpo_core.tree.trainer import Choice, ForwardOptions
from grpo_core.wire.fields import PROMPT_LOGPROB
from grpo_trainer.data.collate import MicroBatch
from grpo_trainer.errors import FastPathRefused
from grpo_trainer.model import fused_head, onednn, packed_attention
from grpo_trainer.model.division import division_of
from grpo_trainer.model.fused_head import EAGER, HeadArithmetic, LogitChange, linear_logprobs
from grpo_trainer.model.logprobs import (
    TokenValues,
    probability_above,
    probe_tokens,
    token_values,
    tolerance_of,
    values_of,
)
from grpo_trainer.model.packing import PACKED, PADDED, Layout
from grpo_trainer.model.policy import (
    CausalLM,
    base_model,
    compile_choice,
    compile_layers,
    device_of,
    missing_compiler,
    prepare_recomputing,
    recomputing,
    undo_compiling,
    vocabulary_of,
)

log = structlog.get_logger()

ABOVE_TARGETS, ABOVE_LOGITS = 256, 1 << 22
"""Targets of a micro-batch for which the probability above them is computed, and their logits, at
most: 16 MiB, and as much again for their distribution and for its upper part."""

_PROBE_LENGTHS = (7, 1, 12, 9)
_PROBE_SHARED = (0, 0, 0, 5)
_PROBE_TEMPERATURES = (1.0, 0.7, 1.4, 1.0)
COPIES = {"cuda": 171}
"""How often compiled code is also probed with these sequences at once, by type of device: 4,104
tokens. On a GPU, inductor compiles other code for 4,096 tokens and more."""


ForwardPass = Callable[[CausalLM, MicroBatch], TokenValues]
"""Computes [B, T] each: the logprob and the entropy of each trained target, and some finite number
for other targets. The batch is on the policy's device."""


def plain_forward(policy: CausalLM, micro: MicroBatch) -> TokenValues:
    """Compute padded rows with all logits at once, for every target."""
    return token_values(policy, micro.inputs, micro.targets, micro.temperature)


@dataclass(frozen=True)
class FastForward:
    """Computes only the positions that are trained on.

    Args:
        layout: of the sequences in the model call
        head: computes the logits of some positions at a time; None: all logits of the call at once
        differentiates_entropy: the loss depends on the entropies
        recomputes: each layer is computed again in the backward pass
    """

    layout: Layout = PADDED
    head: HeadArithmetic | None = None
    differentiates_entropy: bool = False
    recomputes: bool = False

    def __call__(self, policy: CausalLM, micro: MicroBatch) -> TokenValues:
        if self.recomputes and torch.is_grad_enabled():
            with recomputing(base_model(policy)):
                return self._within(policy, micro)
        return self._within(policy, micro)

    def _within(self, policy: CausalLM, micro: MicroBatch) -> TokenValues:
        """Only the head needs weights outside the layers that no call of the model collects."""
        division = None if self.head is None else division_of(policy)
        if division is None:
            return self._values(policy, micro)
        return division.run(partial(self._values, policy, micro))

    def _values(self, policy: CausalLM, micro: MicroBatch) -> TokenValues:
        row, column = micro.trained()  # [K] each
        targets, temperature = micro.targets[row, column], micro.temperature[row]
        inputs = self.layout.inputs(micro)
        positions = inputs.places[row, column]  # [K]
        if self.head is None:
            logits = policy(**inputs.arguments).logits.flatten(0, 1)[positions]  # [K, V]
            scaled = logits.float() / temperature.unsqueeze(-1)
            values = values_of(scaled, targets, self.differentiates_entropy)
            above = _above(lambda some: scaled[some], targets, scaled.shape[-1])
            values = values._replace(above=above)
        else:
            model = base_model(policy)
            hidden = model.get_decoder()(**inputs.arguments).last_hidden_state
            chosen = hidden.flatten(0, 1)[positions]  # [K, H]
            output = model.get_output_embeddings()
            assert isinstance(output, nn.Linear)  # `fused_head.obstacles` excludes others
            change = LogitChange.of(model)
            logp, entropy = linear_logprobs(chosen, output, targets, temperature, self.head, change)

            def scaled_of(some: Tensor) -> Tensor:
                return change(output(chosen[some]).float()) / temperature[some].unsqueeze(-1)

            values = TokenValues(logp, entropy, _above(scaled_of, targets, output.out_features))
        zeros = values.logp.new_zeros(micro.targets.shape)
        return TokenValues(*(zeros.index_put((row, column), found) for found in values))


@torch.no_grad()
def _above(scaled_of: Callable[[Tensor], Tensor], targets: Tensor, vocabulary: int) -> Tensor:
    """[K] see `TokenValues`; computed for some targets, which is enough to check how they were
    sampled.

    Args: scaled_of: [n] indices of targets → [n, V] their logits
    """
    found = torch.full(targets.shape, torch.nan, device=targets.device)
    count = max(1, min(ABOVE_TARGETS, ABOVE_LOGITS // vocabulary))
    stride = max(1, -(-len(targets) // count))
    some = torch.arange(0, len(targets), stride, device=targets.device)
    if len(some):
        found[some] = probability_above(scaled_of(some), targets[some])
    return found


def build_forward_pass(
    policy: CausalLM, options: ForwardOptions, differentiates_entropy: bool = False
) -> FastForward:
    """Choose the fastest way that the options and the model allow; the log names it.

    The policy's attention and layers change only if an option needs it; its linear layers, if
    oneDNN computes them faster.

    Args: differentiates_entropy: the loss depends on the entropies

    Raises:
        FastPathRefused: the model does not support a way that was explicitly requested.
        MissingPackage: there is no compiler.
    """
    device_type = device_of(policy).type
    compiling = compile_choice(options.compile, device_type, missing_compiler(device_type))
    probe = _Probe(policy)
    _try_onednn(base_model(policy), probe)
    is_packed = is_enabled("packing", options.packing, lambda: _enable_packing(policy, probe))
    is_fused = is_enabled(
        "fused-head", options.fused_head, lambda: _probe_fused_head(policy, probe)
    )
    forward = FastForward(
        PACKED if is_packed else PADDED,
        EAGER if is_fused else None,
        differentiates_entropy,
    )
    if options.gradient_checkpointing:
        prepare_recomputing(base_model(policy))
        forward = replace(forward, recomputes=True)
        try:
            # Nothing is recomputed without a gradient.
            probe.require_equal(forward, "recomputed layers", differentiates=True)
        except FastPathRefused as refusal:
            option = "--gradient-checkpointing"
            raise FastPathRefused(f"{option}: {refusal}; omit {option}") from refusal
    start = time.perf_counter()
    compiled = None if compiling == "off" else _compiled(policy, forward, probe, compiling)
    seconds = {"compile_seconds": round(time.perf_counter() - start, 1)} if compiled else {}
    log.info(
        "forward.chosen",
        packed=is_packed,
        fused_head=is_fused,
        compiled=compiled is not None,
        gradient_checkpointing=options.gradient_checkpointing,
        **seconds,
    )
    return compiled or forward


def _compiled(
    policy: CausalLM, forward: FastForward, probe: _Probe, choice: Choice
) -> FastForward | None:
    """None: compiled code was refused, and the layers are as they were.

    Raises:
        FastPathRefused: it was explicitly requested.
    """
    model = base_model(policy)
    compiled = replace(forward, head=forward.head and HeadArithmetic.compiled())
    probes = [probe]
    if copies := COPIES.get(device_of(policy).type):
        probes.append(_Probe(policy, forward, copies))
    try:
        compile_layers(model)
        # Errors of the compiler, or wrong results, must appear now and not in the first step.
        for each in probes:
            each.require_equal(compiled, "torch.compile", differentiates=True)
    except FastPathRefused as refusal:
        undo_compiling(model)
        if choice == "on":
            raise FastPathRefused(f"--compile: {refusal}; omit --compile") from refusal
        reason = " ".join(str(refusal).split())  # a compiler's message has many lines
        log.warning("fast_path.refused", option="--compile", reason=reason)
        return None
    return compiled


def is_enabled(option: str, choice: Choice, enable: Callable[[], None]) -> bool:
    """Whether a faster way was chosen and is possible.

    Args:
        enable: raises `FastPathRefused` if the model does not support it

    Raises:
        FastPathRefused: it was explicitly requested.
    """
    if choice == "off":
        return False
    try:
        enable()
    except FastPathRefused as refusal:
        if choice == "on":
            raise FastPathRefused(
                f"--{option} on is not possible: {refusal}; pass --{option} off"
            ) from refusal
        log.info("fast_path.refused", option=f"--{option}", reason=str(refusal))
        return False
    return True


def _try_onednn(model: CausalLM, probe: _Probe) -> None:
    onednn.enable(model)
    try:
        probe.require_equal(plain_forward, "oneDNN")
    except FastPathRefused as refusal:
        onednn.disable(model)
        log.warning("fast_path.refused", reason=str(refusal))


def _enable_packing(policy: CausalLM, probe: _Probe) -> None:
    model = base_model(policy)
    _require_none(model, "packing", packed_attention.obstacles(model))
    packed_attention.enable(model)
    try:
        probe.require_equal(FastForward(layout=PACKED), "packing")
        # The checks compute padded rows.
        probe.require_equal(plain_forward, "the attention for packing")
    except FastPathRefused:
        model.set_attn_implementation(packed_attention.DEFAULT)
        raise


def _probe_fused_head(policy: CausalLM, probe: _Probe) -> None:
    model = base_model(policy)
    _require_none(model, "a fused head", fused_head.obstacles(model))
    probe.require_equal(FastForward(head=EAGER), "a fused head")


def _require_none(model: CausalLM, way: str, obstacles: list[str]) -> None:
    if obstacles:
        raise FastPathRefused(
            f"the model {type(model).__name__} does not support {way}: {'; '.join(obstacles)}"
        )


class _Probe:
    """Short sequences, two of four of which begin alike, and their expected logprobs."""

    def __init__(
        self, policy: CausalLM, expected: ForwardPass = plain_forward, copies: int = 1
    ) -> None:
        self._policy = policy
        self._micro = _probe_batch(vocabulary_of(policy), copies).to(device_of(policy))
        self._expected = self._logprobs(expected)
        self._tolerance = tolerance_of(policy)

    def require_equal(self, forward: ForwardPass, way: str, differentiates: bool = False) -> None:
        """Raises `FastPathRefused` if `forward`, or with `differentiates` its backward pass, fails,
        or if its logprobs differ by more than rounding. `way` names what it tests."""
        try:
            if differentiates:
                self._differentiate(forward)
            found = self._logprobs(forward)
        except (torch.OutOfMemoryError, torch.AcceleratorError):  # of the GPU, not of the way
            raise
        except Exception as error:  # a family whose parts have other names or arguments
            raise FastPathRefused(
                f"{type(base_model(self._policy)).__name__} with {way} fails: "
                f"{type(error).__name__}: {error}"
            ) from error
        off = float((found - self._expected).abs().mean())
        if not off <= self._tolerance:
            raise FastPathRefused(
                f"the logprobs of {type(base_model(self._policy)).__name__} with and without "
                f"{way} differ by {off:.2g} on average (tolerance {self._tolerance:g})"
            )

    def _differentiate(self, forward: ForwardPass) -> None:
        """Run a backward pass through all layers. It keeps no gradient and calls no hook."""
        loss = forward(self._policy, self._micro).logp.sum()
        trained = [p for p in self._policy.parameters() if p.requires_grad]
        if division_of(self._policy) is None:
            torch.autograd.grad(loss, trained[0])
            return
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in trained:  # which have no hook yet
            parameter.grad = None

    @torch.no_grad()
    def _logprobs(self, forward: ForwardPass) -> Tensor:
        return forward(self._policy, self._micro).logp[self._micro.token_weight > 0]


def _probe_batch(vocabulary: int, copies: int = 1) -> MicroBatch:
    lengths, shared = _PROBE_LENGTHS * copies, _PROBE_SHARED * copies
    rows, width = len(lengths), max(lengths)
    tokens = torch.tensor(probe_tokens(vocabulary, rows * (width + 1))).view(rows, width + 1)
    for number, beginning in enumerate(shared):
        tokens[number, :beginning] = tokens[number - 1, :beginning]
    is_trained = torch.arange(width) < torch.tensor(lengths).unsqueeze(-1)
    return MicroBatch(
        inputs=tokens[:, :-1],
        targets=tokens[:, 1:],
        behaviour_logp=torch.full((rows, width), PROMPT_LOGPROB),
        token_weight=is_trained.float(),
        advantages=torch.zeros(rows, 1),
        temperature=torch.tensor(_PROBE_TEMPERATURES * copies),
        lengths=lengths,
        shared=shared,
        is_logged=(True,) * rows,
    )
