"""Clipping: once a window, and by settings alone."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import (
    Accumulate,
    ClipByGlobalNorm,
    Forward,
    Frame,
    Group,
    LossScale,
    MaybeStep,
    Optimizer,
    fold,
    init,
    tap,
)
from pipeline.errors import FoldtrainError
from pipeline.events import UpdateDone
from tests.cases.probe import Probe, Recorder, of, step_of

both_ways = pytest.mark.parametrize("donate", [True, False], ids=["donated", "copied"])


class Pair(nn.Module):
    """Two parameters whose gradients are the batch itself."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1))
        self.y = nn.Parameter(torch.zeros(1))


def linear(model: Any, batch: Tensor) -> Tensor:
    return (model.x * batch[0] + model.y * batch[1]).sum()


def at(model_or_params: Any) -> Tensor:
    return torch.stack([model_or_params["x"], model_or_params["y"]]).detach().clone().flatten()


# -- CLIP-2 ----------------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("scale", [None, 1024.0])
def test_clip_2_the_window_is_clipped_once_and_not_each_micro_batch(donate: bool, scale: float | None) -> None:
    model, recorder = Pair(), Recorder()
    clipped: list[int] = []

    def note(frame: Frame) -> None:
        if "clip_factor" in frame.facts:
            clipped.append(frame.state.progress.micro_steps)

    step = step_of(model, linear, Optimizer(torch.optim.SGD, lr=1.0), every=2, max_norm=1.0)
    step = step.insert_after("ClipByGlobalNorm", tap(note))
    state = init(step, model, loss_scale=None if scale is None else LossScale(scale=scale))
    batches = [torch.tensor([2.0, 0.0]), torch.tensor([0.0, 2.0])]
    run = fold(step, state, batches * 2, donate=donate, sinks=[recorder])
    # Twice the same window: the second moves as far as the first.
    assert (-at(run.state.params) / 2).tolist() == pytest.approx([0.5**0.5, 0.5**0.5], rel=1e-5)
    updates = of(UpdateDone, recorder.events)
    assert clipped == [2, 4]
    assert [float(u.grad_norm) for u in updates] == pytest.approx([2**0.5] * 2)
    assert [float(u.clip_factor) for u in updates] == pytest.approx([0.5**0.5] * 2, rel=1e-5)


@both_ways
def test_clip_2_a_window_within_the_norm_is_left_as_it_is(donate: bool) -> None:
    model = Pair()
    step = step_of(model, linear, Optimizer(torch.optim.SGD, lr=1.0), every=2, max_norm=1.5)
    # Each micro-batch alone would be above the norm; their mean is not.
    batches = [torch.tensor([2.0, 0.0]), torch.tensor([0.0, 2.0])]
    run = fold(step, init(step, model), batches, donate=donate)
    assert (-at(run.state.params)).tolist() == [1.0, 1.0]


# -- CLIP-3 ----------------------------------------------------------------------------------------


@both_ways
def test_clip_3_every_window_is_clipped_and_not_the_first_alone(donate: bool) -> None:
    model, recorder = Pair(), Recorder()
    step = step_of(model, linear, Optimizer(torch.optim.SGD, lr=1.0), max_norm=1.0)
    places = [at(dict(model.named_parameters()))]

    def note(frame: Frame) -> None:
        places.append(at(frame.state.params))

    step = step.insert_after("MaybeStep", tap(note))
    fold(step, init(step, model), [torch.tensor([3.0, 4.0])] * 3, donate=donate, sinks=[recorder])
    moved = [float((b - a).norm()) for a, b in itertools.pairwise(places)]
    assert moved == pytest.approx([1.0] * 3, rel=1e-5)
    updates = of(UpdateDone, recorder.events)
    assert [float(u.grad_norm) for u in updates] == pytest.approx([5.0] * 3)
    assert [float(u.clip_factor) for u in updates] == pytest.approx([0.2] * 3, rel=1e-5)


BUILDERS: dict[str, Callable[[Any], object]] = {
    "ClipByGlobalNorm": ClipByGlobalNorm,
    "Accumulate": Accumulate,
    "Forward": lambda given: Forward(given, linear),
    "MaybeStep": MaybeStep,
    "Optimizer.cls": lambda given: Optimizer(given, lr=0.1),
    "Optimizer.lr": lambda given: Optimizer(torch.optim.SGD, lr=given),
    "Optimizer.groups": lambda given: Optimizer(torch.optim.SGD, lr=0.1, groups=given),
    "Group.match": lambda given: Group(given, weight_decay=0.0),
    "init": lambda given: init(Optimizer, given),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
@pytest.mark.parametrize("given", [lambda m: m.parameters(), lambda m: list(m.parameters()), lambda m: m.w])
def test_clip_3_parameters_in_place_of_settings_are_refused_when_built(
    build: Callable[[Any], object], given: Callable[[nn.Module], object]
) -> None:
    with pytest.raises(FoldtrainError):
        build(given(Probe()))
