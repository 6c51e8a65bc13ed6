"""The laws of the library, as assertions on a user's own transforms and steps. Each raises LawError."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipeline._declared import name_of
from pipeline.errors import LawError
from pipeline.loop import fold, init
from pipeline.records import Frame, TrainState
from pipeline.tensors import Tensors
from pipeline.testing.compare import assert_records_equal
from pipeline.transform import Chain, Transform, named
from pipeline.transforms import Accumulate
from pipeline.until import Limit

__all__ = ["assert_donation_safe", "assert_matches_loop", "assert_pure", "assert_split_invariant"]


def _snapshot(value: Any) -> Any:
    """The same record with every tensor copied."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), value)


def _with_seed(transform: Transform, frame: Frame) -> Frame:
    before = torch.get_rng_state()
    try:
        torch.default_generator.manual_seed(frame.state.rng.key(frame.began.micro_steps))
        return transform(frame)
    finally:
        torch.set_rng_state(before)


def assert_pure(transform: Transform, frame: Frame) -> None:
    """Law 1: the transform leaves its input as it was, and gives the same output twice.

    The frame's state is lent, not given: nothing in it, no parameter's `.grad` either, may change.
    """
    lent = frame.having(state=frame.state.borrowed())
    before, grads = _snapshot(lent), [p.grad for p in lent.state.params.flat]
    first = _snapshot(_with_seed(transform, lent))
    assert_records_equal(lent, before, what="the input after the first call, frame")
    second = _with_seed(transform, lent)
    assert_records_equal(lent, before, what="the input after the second call, frame")
    assert_records_equal(second, first, what="the second output, frame")
    if any(a is not b for a, b in zip(grads, [p.grad for p in lent.state.params.flat], strict=True)):
        raise LawError("the transform set the .grad of a parameter that it was only lent")


def assert_donation_safe(transform: Transform, frame: Frame) -> None:
    """Law 2: in place and copying give the same bits, and what was handed over is stale or as it was.

    The frame's state is handed over, and stale afterwards where the transform wrote to it. Bound to a module, it is the
    module that is written to.
    """
    copied = _snapshot(_with_seed(transform, frame.having(state=frame.state.borrowed())))
    given = frame.having(state=frame.state.owned())
    before = {place: _snapshot(tensors) for place, tensors in _tensors_of(given.state)}
    in_place = _with_seed(transform, given)
    assert_records_equal(in_place, copied, what="in place against copied, frame")
    for place, tensors in _tensors_of(given.state):
        if not tensors.is_stale:
            assert_records_equal(tensors, before[place], what=f"{place} of the input, not stale")


def _tensors_of(state: TrainState) -> list[tuple[str, Tensors]]:
    return [("params", state.params), ("buffers", state.buffers), ("window.grads", state.window.grads)]


def _split(batch: Any, sizes: Sequence[int]) -> list[Any]:
    leaves, form = pytree.tree_flatten(batch)
    whole = sum(sizes)
    if not any(isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == whole for leaf in leaves):
        raise LawError(f"no tensor of the batch has {whole} rows, which is what the sizes {list(sizes)} add up to")
    pieces = [
        leaf.split(list(sizes))
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == whole
        else [leaf] * len(sizes)
        for leaf in leaves
    ]
    return [pytree.tree_unflatten([piece[i] for piece in pieces], form) for i in range(len(sizes))]


def assert_split_invariant(
    step: Chain, state: TrainState, batch: Any, sizes: Sequence[int], *, rtol: float = 1e-6
) -> None:
    """Law 4: the batch cut into micro-batches of these sizes gives the update that it gives whole.

    `step` must hold an `Accumulate`, whose `every` is set to fit. Parameters are compared, within `rtol` of the largest
    magnitude in each. Dropout and BatchNorm see other batches in each split, and are no part of this law. The state is
    left as it is.
    """
    found = [(name_of(t), getattr(t, "inner", t)) for t in step.transforms]
    name, window = next(((n, t) for n, t in found if isinstance(t, Accumulate)), ("", None))
    if window is None:
        raise LawError("assert_split_invariant needs a step with an Accumulate in it")
    ends: list[Tensors] = []
    for pieces in ([batch], _split(batch, sizes)):
        cut = step.replace(name, named(name, attrs.evolve(window, every=len(pieces))))
        ends.append(fold(cut, state.copy(), pieces).state.params)
    assert_records_equal(ends[1], ends[0], rtol=rtol, what=f"split into {list(sizes)} against whole, params")


def assert_matches_loop(
    step: Transform,
    model: nn.Module,
    batches: Iterable[Any],
    loop: Callable[[nn.Module, list[Any]], object],
    *,
    rtol: float = 0.0,
    seed: int = 0,
    until: Limit | None = None,
) -> None:
    """Law 3: the step trains `model` as the plain loop trains a copy of it, bit for bit, or within `rtol`.

    `loop(model, batches)` trains the module it is given. Parameters and buffers are compared. `model` is the one that
    the step's Forward holds; it is trained.
    """
    batches = list(batches)
    twin = copy.deepcopy(model)
    loop(twin, batches)
    fold(step, init(step, model, seed=seed), batches, until=until)
    for kind, of in (("params", nn.Module.named_parameters), ("buffers", nn.Module.named_buffers)):
        ours, theirs = dict(of(model)), dict(of(twin))
        assert_records_equal(ours, theirs, rtol=rtol, what=f"fold against loop, {kind}")
