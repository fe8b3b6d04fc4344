"""Parameters one after the other in flat tensors, so that one kernel works on many of them.

A model has hundreds of parameters, and on a GPU it takes longer to launch a few kernels for each
than to update them. So master weights, gradients, moments and the staging copy of all parameters in
a bucket are one tensor each, and those of one parameter are views.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grpo_trainer.model.division import collected, rows_of
from grpo_trainer.optim.master_update import BucketPart, MasterUpdate
from grpo_trainer.optim.rules import STEP, State, StepOptions

MASTER = "master"
ROW = 1024
"""Gradients are squared and added up in rows of this many, which rounds less than one long sum."""
T = TypeVar("T")
BUCKET_ELEMENTS = 2**27
"""Most weights of a bucket of several parameters. Copies of all gradients or results at once would
be as large as the model; copies of a bucket are 256 MiB in bf16."""
PART_ELEMENTS = 2**22
"""The same on a CPU, where launches cost little: 16 MiB in fp32. Also the number of weights of a
larger parameter that it updates at a time."""


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that is divided among ranks (a view); else the tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    with torch.no_grad():
        part: Tensor = to_local()
        return part


class Bucket:
    """Parameters that one call can update: of one data type, one weight decay and one kind of
    state. Each begins at a multiple of the rule's alignment; the weights in between are 0, as are
    their gradients.

    Args:
        indices: of the parameters, in the optimizer
        parameters: this rank's parts are kept if they are divided
        update: of the master weights

    Attributes:
        masters: the master weights of each parameter: views
        gradient: the sum so far, flat. After one backward pass it has the parameters' type: in bf16
            it takes half the memory and loses nothing, because it was computed in bf16. From the
            second pass on it is in fp32. None: no parameter has a gradient
        has_gradient: of each parameter
        steps: number that each parameter has taken
        staged: the newest weights in the parameters' type, flat, until they are written
        changes: number of changes of the gradient so far
        is_complete: every parameter had a gradient in the newest backward pass; `completed` is
            called then
    """

    def __init__(
        self,
        indices: Sequence[int],
        parameters: Sequence[nn.Parameter],
        weight_decay: float,
        update: MasterUpdate,
    ) -> None:
        self.indices, self._whole, self.weight_decay = indices, parameters, weight_decay
        self.parameters = [own_part(p) for p in parameters]
        self._update, self._rule = update, update.rule
        self._kind = self._rule.kind_of(parameters[0])
        self._edges = [0]
        for parameter in self.parameters:
            self._edges.append(self._edges[-1] + _padded(parameter.numel(), self._rule.alignment))
        if self._rule.is_elementwise:
            self._edges[-1] = _padded(self._edges[-1], ROW)
        size, device = self._edges[-1], self.parameters[0].device
        self._master = torch.zeros(size, dtype=update.dtype, device=device)
        self._zeros = self.parameters[0].new_zeros(ROW)
        self.masters = self._views(self._master)
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.copy_(parameter.detach())
        self._state: State = {}
        self.gradient: Tensor | None = None
        self.has_gradient = [False] * len(parameters)
        self.steps = [0] * len(parameters)
        self.staged: Tensor | None = None
        self.changes = 0
        self._awaited, self.is_complete = len(parameters), False
        self.completed: Callable[[], None] = lambda: None
        # A parameter that kept its bucket would be kept by it, together with shared memory.
        hook = partial(_arrived, ref(self))
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _views(self, flat: Tensor) -> list[Tensor]:
        places = zip(self._edges, self.parameters, strict=False)
        return [flat[start : start + p.numel()].view(p.shape) for start, p in places]

    def newest(self) -> list[Tensor]:
        """Of each parameter the staging copy if there is one, else the master weights."""
        return self.masters if self.staged is None else self._views(self.staged)

    def gradients(self) -> list[Tensor | None]:
        """Of each parameter: views."""
        if self.gradient is None:
            return [None] * len(self.parameters)
        views = zip(self._views(self.gradient), self.has_gradient, strict=True)
        return [view if has else None for view, has in views]

    def gradient_arrived(self) -> None:
        """A gradient is complete. Gather those of a bucket during the backward pass, because the
        gradients of a pass take as much memory as the model."""
        self._awaited -= 1
        if not self._awaited:
            self.gather()
            self.is_complete = True
            self.completed()

    @torch.no_grad()
    def gather(self) -> None:
        """Take the gradients of a backward pass from the parameters, and add them."""
        self._awaited = len(self._whole)
        found = [parameter.grad for parameter in self._whole]
        if all(gradient is None for gradient in found):
            return
        self.changes += 1
        if self.gradient is not None and self.gradient.dtype == self._zeros.dtype == torch.float32:
            sums = zip(self._views(self.gradient), found, strict=True)
            added = [(total, own_part(term)) for total, term in sums if term is not None]
            torch._foreach_add_([total for total, _ in added], [term for _, term in added])
        else:
            flat = torch.cat(list(self._pieces(found)))
            self.gradient = flat if self.gradient is None else self.gradient.float().add_(flat)
        for parameter in self._whole:
            parameter.grad = None
        pairs = zip(self.has_gradient, found, strict=True)
        self.has_gradient = [has or gradient is not None for has, gradient in pairs]

    def _pieces(self, gradients: Sequence[Tensor | None]) -> Iterator[Tensor]:
        for position, gradient in enumerate(gradients):
            left = self._edges[position + 1] - self._edges[position]
            if gradient is not None:
                part = own_part(gradient).reshape(-1)
                left -= len(part)
                yield part
            if left:
                yield self._zeros[:left] if left <= ROW else self._zeros.new_zeros(left)

    def widened(self) -> Tensor:
        """The gradient, which is in fp32 afterwards; zeros if there is none."""
        own, self.gradient = self.gradient, None
        if own is None:
            own = torch.zeros_like(self._master, dtype=torch.float32)
        self.gradient = own.float()
        return self.gradient

    def added_up(self, has_gradient: Sequence[bool]) -> None:
        """The gradient is that of all ranks now. Args: has_gradient: on any rank"""
        self.changes += 1
        self.has_gradient = list(has_gradient)
        if not any(has_gradient):
            self.gradient = None

    def row_norms(self) -> Tensor:
        """L2 norms of the rows of the gradient, in fp32: [rows]."""
        assert self.gradient is not None
        rows = self.gradient.view(-1, ROW) if self._rule.is_elementwise else self.gradient[None]
        norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
        return norms

    def clear(self) -> None:
        """Drop the gradients."""
        self.changes += 1
        self._awaited = len(self._whole)
        for parameter in self._whole:
            parameter.grad = None
        self.gradient, self.has_gradient = None, [False] * len(self.parameters)

    def step(self, options: StepOptions) -> None:
        """Update the parameters that have a gradient, and stage the result."""
        if self.gradient is None:
            return
        if not self._state:
            self._state = self._initial_state()
        dtype = self.parameters[0].dtype
        if dtype == self._master.dtype:
            self.staged = None
        elif dtype == self.gradient.dtype:
            self.staged = self.gradient  # each weight's result takes the place of its gradient
        else:
            self.staged = torch.empty_like(self._master, dtype=dtype)
        for first, beyond in self._runs():
            steps = self.steps[first] + 1
            for part in self._parts(first, beyond):
                self._update.step(part, steps, options)
            self.steps[first:beyond] = [steps] * (beyond - first)
        for position, has in enumerate(self.has_gradient):
            if not has and self.staged is not None:
                self.newest()[position].copy_(self.masters[position])
        self.clear()

    def _initial_state(self) -> State:
        weights = self._master
        if not self._rule.is_elementwise:  # of the whole parameter
            weights = weights.new_empty(()).expand(self._whole[0].shape)
        return self._rule.initial_state(weights, self._kind)

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Neighbours that take the same step: all have a gradient, and have taken as many steps."""
        first = 0
        for key, run in groupby(zip(self.has_gradient, self.steps, strict=True)):
            beyond = first + len(list(run))
            if key[0]:
                yield first, beyond
            first = beyond

    def _parts(self, first: int, beyond: int) -> Iterator[BucketPart]:
        """Neighbours, in parts of limited size."""
        assert self.gradient is not None
        if not self._rule.is_elementwise:
            staged, parameter = None if self.staged is None else self.newest()[0], self._whole[0]
            master, gradient = self.masters[0], self._views(self.gradient)[0]
            if not isinstance(parameter, DTensor):
                yield BucketPart(master, gradient, self._state, staged)
                return
            # Each rank updates the whole parameter, and keeps its rows.
            whole = collected(master, parameter)
            yield BucketPart(whole, collected(gradient, parameter), self._state)
            master.copy_(rows_of(whole, parameter.device_mesh))
            if staged is not None:
                staged.copy_(master)
            return
        most = PART_ELEMENTS if self._master.device.type == "cpu" else BUCKET_ELEMENTS
        for start in range(self._edges[first], self._edges[beyond], most):
            end = min(start + most, self._edges[beyond])
            staged = None if self.staged is None else self.staged[start:end]
            master, gradient = self._master[start:end], self.gradient[start:end]
            yield BucketPart(master, gradient, self._state_at(start, end), staged)

    def _state_at(self, start: int, end: int) -> State:
        spans = self._rule.spans
        return {
            kind: tensor[start // spans[kind] : -(-end // spans[kind])] if kind in spans else tensor
            for kind, tensor in self._state.items()
        }

    def _state_of(self, position: int) -> State:
        """One parameter's state: views of what belongs to it alone; empty if no step was taken."""
        if not self._rule.is_elementwise:
            return self._state
        start, parameter = self._edges[position], self.parameters[position]
        found = self._state_at(start, start + parameter.numel())
        for kind, tensor in found.items():
            span = self._rule.spans.get(kind)
            if span == 1:
                found[kind] = tensor.view(parameter.shape)
            elif span is None:
                found[kind] = tensor.clone()
        return found

    def tensors(self) -> list[State]:
        """All tensors of each parameter by kind: of those that took no step the master weights."""
        found: list[State] = []
        for position, (master, steps) in enumerate(zip(self.masters, self.steps, strict=True)):
            state = {STEP: torch.tensor(float(steps)), **self._state_of(position)} if steps else {}
            found.append({MASTER: master, **state})
        return found

    def flat(self) -> list[Tensor]:
        """The master weights, and the state once a parameter has taken a step."""
        if any(self.steps) and not self._state:
            self._state = self._initial_state()
        return [self._master, *self._state.values()]

    def load(self, position: int, saved: State) -> None:
        """Replace one parameter's tensors by copies. Args: saved: as in `tensors`"""
        self.masters[position].copy_(saved[MASTER])
        self.staged, self.steps[position] = None, int(saved.get(STEP, 0))
        if STEP in saved and not self._state:
            self._state = self._initial_state()
        for kind, tensor in self._state_of(position).items():
            is_own = kind in self._rule.spans or not self._rule.is_elementwise
            place = tensor if is_own else self._state[kind]
            if STEP in saved:
                place.copy_(saved[kind])
            elif is_own:
                place.zero_()


def _arrived(bucket: ref[Bucket], _parameter: Tensor) -> None:
    if (found := bucket()) is not None:
        found.gradient_arrived()


def in_order(buckets: Iterable[Bucket], values: Callable[[Bucket], Sequence[T]]) -> list[T]:
    """Values of all parameters in the optimizer's order. Args: values: of a bucket's parameters"""
    found = [
        pair for bucket in buckets for pair in zip(bucket.indices, values(bucket), strict=True)
    ]
    return [value for _, value in sorted(found, key=itemgetter(0))]


def _padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def buckets_of(
    parameters: Sequence[nn.Parameter], weight_decay: float, update: MasterUpdate
) -> list[Bucket]:
    """Args: weight_decay: of matrices; see `MasterOptimizer`"""
    indices = defaultdict[Hashable, list[int]](list)
    for index, parameter in enumerate(parameters):
        rule = update.rule
        kind: Hashable = rule.kind_of(parameter) if rule.is_elementwise else index
        indices[kind, parameter.dtype, parameter.ndim > 1].append(index)
    found = []
    for alike in indices.values():
        most = PART_ELEMENTS if parameters[0].device.type == "cpu" else BUCKET_ELEMENTS
        for some in _limited(alike, [own_part(p).numel() for p in parameters], most):
            members = [parameters[index] for index in some]
            decay = weight_decay if members[0].ndim > 1 else 0.0
            found.append(Bucket(some, members, decay, update))
    return found


def _limited(indices: Sequence[int], sizes: Sequence[int], most: int) -> list[list[int]]:
    """Divide the indices into parts of at most `most` weights, or of one parameter."""
    found, left = list[list[int]](), 0
    for index in indices:
        left -= sizes[index]
        if not found or left < 0:
            found.append([])
            left = most - sizes[index]
        found[-1].append(index)
    return found
