"""Clipping: what is not finite, once a window, by settings alone, sparse as dense."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import (
    Accumulate,
    AdaptiveClip,
    ClipByGlobalNorm,
    ClipByGroupNorm,
    ClipByValue,
    ClipPerParameter,
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
from pipeline.events import UpdateDone, UpdateSkipped
from pipeline.transform import Chain, Transform
from tests.cases.probe import Probe, Recorder, bits, of, step_of

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


# -- CLIP-1 ----------------------------------------------------------------------------------------

CLIPS: list[Transform] = [
    ClipByGlobalNorm(1.0),
    ClipByGlobalNorm(1.0, p=1),
    ClipByGlobalNorm(1.0, p=math.inf),
    ClipByValue(1.0),
    ClipByGroupNorm({"*": 1.0}),
    ClipPerParameter(1.0),
    AdaptiveClip(1.0),
]
each_clip = pytest.mark.parametrize("clip", CLIPS, ids=repr)


class Wide(nn.Module):
    """Parameters whose gradients are the batch, its first element and the hundred others; BatchNorm sees these too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(1))
        self.wide = nn.Parameter(torch.zeros(100))
        self.norm = nn.BatchNorm1d(1)

    def forward(self, batch: Tensor) -> Tensor:
        self.norm(batch[1:, None].nan_to_num(0.0, 0.0, 0.0))
        return (self.first * batch[:1]).sum() + (self.wide * batch[1:]).sum()


def wide_step(model: nn.Module, *clips: Transform, optimizer: Optimizer) -> Chain:
    step = step_of(model, lambda m, batch: m(batch), optimizer)
    return step.insert_after("Accumulate", *clips) if clips else step


@both_ways
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_clip_1_a_a_norm_that_overflows_is_right_and_the_gradient_is_scaled_by_it(donate: bool, optimizer: Any) -> None:
    model, recorder = Wide(), Recorder()
    batch = torch.cat([torch.zeros(1), torch.full((100,), 1e20)])
    step = wide_step(model, ClipByGlobalNorm(1.0), optimizer=Optimizer(optimizer, lr=1.0))
    run = fold(step, init(step, model), [batch], donate=donate, sinks=[recorder])
    [update] = of(UpdateDone, recorder.events)
    assert float(update.grad_norm) == pytest.approx(1e21, rel=1e-6)
    if optimizer is torch.optim.SGD:
        moved = -run.state.params["wide"].detach()
        torch.testing.assert_close(moved, torch.full((100,), 0.1), rtol=1e-6, atol=0.0)
    else:  # (1 - β₁) × gradient
        average = run.state.optimizer.of("wide")["exp_avg"]
        torch.testing.assert_close(average, torch.full((100,), 0.01), rtol=1e-6, atol=0.0)


@both_ways
def test_clip_1_a_unclipped_it_is_no_reason_to_skip(donate: bool) -> None:
    model = Wide()
    step = wide_step(model, optimizer=Optimizer(torch.optim.SGD, lr=1e-20))
    run = fold(step, init(step, model), [torch.full((101,), 1e20)], donate=donate)
    torch.testing.assert_close(-run.state.params["wide"].detach(), torch.ones(100))


@both_ways
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@each_clip
def test_clip_1_b_c_no_update_and_the_event_names_the_parameter(clip: Transform, bad: float, donate: bool) -> None:
    model, recorder = Wide(), Recorder()
    step = wide_step(model, clip, optimizer=Optimizer(torch.optim.AdamW, lr=0.1))
    good, poisoned = torch.linspace(-3, 3, 101), torch.linspace(-3, 3, 101)
    poisoned[7] = bad
    before = fold(step, init(step, model), [good], donate=False).state
    kept = bits(before)
    after = fold(step, before.copy(), [poisoned], donate=donate, sinks=[recorder]).state
    [skip] = of(UpdateSkipped, recorder.events)
    assert (skip.reason, skip.parameter, skip.micro_batch) == ("non-finite gradients", "wide", 0)
    assert not math.isfinite(float(skip.grad_norm))
    changed = {name for name, value in bits(after).items() if value != kept[name]}
    assert changed == {"progress"}
    assert (after.progress.updates, after.progress.skipped) == (1, 1)


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
    "ClipByValue": ClipByValue,
    "ClipByGroupNorm": ClipByGroupNorm,
    "ClipPerParameter": ClipPerParameter,
    "AdaptiveClip.leave": lambda given: AdaptiveClip(leave=given),
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


# -- CLIP-4 ----------------------------------------------------------------------------------------


class Words(nn.Module):
    """An embedding, and beside it a dense layer where asked for."""

    def __init__(self, sparse: bool, beside: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 3, sparse=sparse, dtype=dtype)
        nn.init.zeros_(self.words.weight)
        self.beside = nn.Linear(3, 1, dtype=dtype) if beside else None

    def forward(self, ids: Tensor) -> Tensor:
        looked_up = self.words(ids)
        total = 2 * looked_up.sum()
        if self.beside is None:
            return total
        return total + self.beside(looked_up + 1.0).sum()


def words_after(
    model: Words, clip: Transform, batches: list[Tensor], every: int, scale: float | None, donate: bool
) -> tuple[dict[str, Tensor], Recorder]:
    recorder = Recorder()
    step = step_of(model, lambda m, ids: m(ids), Optimizer(torch.optim.SGD, lr=1.0), every=every)
    step = step.insert_after("Accumulate", clip)
    state = init(step, model, loss_scale=None if scale is None else LossScale(scale=scale))
    run = fold(step, state, batches, donate=donate, sinks=[recorder])
    return {name: value.detach().clone() for name, value in run.state.params.items()}, recorder


IDS = torch.tensor([1, 1])


@both_ways
@pytest.mark.parametrize("scale", [None, 1024.0])
def test_clip_4_duplicates_are_added_up_before_the_norm(scale: float | None, donate: bool) -> None:
    params, recorder = words_after(Words(sparse=True), ClipByGlobalNorm(1.0), [IDS], 1, scale, donate)
    [update] = of(UpdateDone, recorder.events)
    assert float(update.grad_norm) == pytest.approx(48**0.5)
    assert float(params["words.weight"][1].norm()) == pytest.approx(1.0, rel=1e-6)
    assert params["words.weight"][[0, 2, 3]].count_nonzero() == 0


@both_ways
@pytest.mark.parametrize("scale", [None, 1024.0])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a dense layer"])
@each_clip
def test_clip_4_a_sparse_embedding_trains_as_the_dense_one(
    clip: Transform, beside: bool, every: int, scale: float | None, donate: bool
) -> None:
    ends: list[dict[str, Tensor]] = []
    for sparse in (True, False):
        torch.manual_seed(0)
        batches = [IDS, torch.tensor([1, 2]), torch.tensor([3, 1]), IDS]
        ends.append(words_after(Words(sparse, beside), clip, batches, every, scale, donate)[0])
    for name, expected in ends[1].items():
        torch.testing.assert_close(ends[0][name], expected, rtol=2e-6, atol=2e-6)


@both_ways
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_clip_4_duplicates_that_overflow_float16_once_added_up_count_as_overflow(
    sparse: bool, every: int, donate: bool
) -> None:
    model = Words(sparse, dtype=torch.float16)
    # 2 × 20,000: each of the two is a float16, their sum is not.
    clip = ClipByGlobalNorm(1.0)
    params, recorder = words_after(model, clip, [IDS] * every, every, 20000.0, donate)
    [skip] = of(UpdateSkipped, recorder.events)
    assert skip.parameter == "words.weight"
    assert params["words.weight"].count_nonzero() == 0
