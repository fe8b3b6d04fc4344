"""What a step launches on a GPU, counted on tensors without memory: `benchmarks.gpu_trace`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from benchmarks.gpu_bench.models import SHAPES, ModelShape
from benchmarks.gpu_compiled import compiled_for_h100
from benchmarks.gpu_trace import GRADIENTS, META, OPTIMIZER, WRITE, Counts, Step, traced
from grpo_trainer.model.fused_head import HeadArithmetic, linear_logprobs

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's compiler
LAYERS = 12


LAUNCHES = {"eager": 140, "compiled": 60}
"""Of a layer and a micro-batch: 21 products, attention and its gradient, and operators, or kernels
that sum gradients or gather keys."""
KINDS = ["eager", pytest.param("compiled", marks=pytest.mark.full)]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def step(kind: str) -> tuple[ModelShape, int, dict[str, Counts]]:
    """A small model of many layers: its shape, the number of micro-batches, and the counts."""
    with pytest.MonkeyPatch.context() as patch:
        shape = ModelShape(128, LAYERS, 4, 2, 512, 512, tied=True)
        patch.setitem(SHAPES, "tiny", shape)
        traced_step = Step("tiny", compiles=kind == "compiled")
        batch = traced_step.batch()
        return shape, len(batch.micro_batches), traced(traced_step, batch)


def test_the_host_waits_once_a_micro_batch_and_once_for_the_norm(
    step: tuple[ModelShape, int, dict[str, Counts]],
) -> None:
    _, micro_batches, phases = step
    assert micro_batches > 1
    assert phases[GRADIENTS].waits == {"_to_copy": micro_batches, "_local_scalar_dense": 1}
    assert not phases[OPTIMIZER].waits
    assert not phases[WRITE].waits


def test_the_optimizers_launches_do_not_grow_with_the_number_of_parameters(
    step: tuple[ModelShape, int, dict[str, Counts]],
) -> None:
    """It has 146 parameters in two buckets: with and without weight decay."""
    _, _, phases = step
    assert phases[OPTIMIZER].total("launches") <= 9
    assert phases[WRITE].total("launches") <= 12  # one for 16 parameters


def test_the_optimizer_reads_and_writes_each_number_once(
    step: tuple[ModelShape, int, dict[str, Counts]],
) -> None:
    """The gradient has 2 bytes, master weights and both moments 4 each, read and written, and the
    staging copy 2."""
    shape, _, phases = step
    attention = 2 * shape.hidden * (shape.hidden + shape.kv_width) + shape.hidden
    layer = attention + 2 * shape.kv_width + 3 * shape.hidden * shape.intermediate
    weights = LAYERS * (layer + 2 * shape.hidden) + shape.hidden * (shape.vocabulary + 1)
    assert phases[OPTIMIZER].total("bytes") / weights < 1.1 * (2 + 3 * 8 + 2)  # norms are padded


def test_a_layer_launches_no_more_than_it_did(
    kind: str, step: tuple[ModelShape, int, dict[str, Counts]]
) -> None:
    _, micro_batches, phases = step
    assert phases[GRADIENTS].total("launches") / micro_batches / LAYERS < LAUNCHES[kind]


def test_a_compiled_norm_reads_and_writes_each_number_once() -> None:
    width, tokens = 512, 4096
    weight = nn.Parameter(torch.empty(width, dtype=torch.bfloat16, device=META))
    hidden = torch.empty(tokens, width, dtype=torch.bfloat16, device=META)
    launches: list[int] = []
    with compiled_for_h100(lambda _, size: launches.append(size)):
        torch.compile(_norm, dynamic=True)(hidden, weight)
    assert launches == [pytest.approx(2 * hidden.nbytes, rel=0.01)]


def test_the_compiled_head_reads_its_logits_twice_and_replaces_them_once_by_their_gradient() -> (
    None
):
    tokens, width, vocabulary = 1024, 32, 151_936
    head = nn.Linear(width, vocabulary, bias=False, dtype=torch.bfloat16, device=META)
    hidden = torch.empty(tokens, width, dtype=torch.bfloat16, device=META)
    targets = torch.empty(tokens, dtype=torch.int64, device=META)
    temperature = torch.empty(tokens, device=META)
    launches: list[int] = []
    with compiled_for_h100(lambda _, size: launches.append(size)):
        logp, _ = linear_logprobs(hidden, head, targets, temperature, HeadArithmetic.compiled())
        logp.sum().backward()
    passes = tokens * vocabulary * torch.bfloat16.itemsize
    assert launches == [pytest.approx(2 * passes, rel=0.01)] * 2


def _norm(hidden: Tensor, weight: Tensor) -> Tensor:
    exact = hidden.float()
    variance = exact.square().mean(-1, keepdim=True)
    return weight * (exact * torch.rsqrt(variance + 1e-6)).to(hidden.dtype)
