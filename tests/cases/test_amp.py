"""AMP-1 to AMP-5: loss scaling and skipped windows. AMP-4 in memory: there are no checkpoints on disk yet."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from pipeline import (
    Accumulate,
    ClipByGlobalNorm,
    EmitEvents,
    Forward,
    LossScale,
    MaybeStep,
    Optimizer,
    ScaledBackward,
    SkipsInRow,
    Updates,
    chain,
    fold,
    init,
    scan,
)
from pipeline.events import LossScaleChanged, UpdateDone, UpdateSkipped
from pipeline.testing import assert_records_equal


def sgd(lr: Any = 1.0, **settings: Any) -> MaybeStep:
    return MaybeStep(Optimizer(torch.optim.SGD, lr=lr, **settings))


class Two(nn.Module):
    """Parameters a and b, both 0."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))


@pytest.mark.parametrize(("window", "batches"), [(1, 1), (2, 2), (2, 1)])
@pytest.mark.parametrize("scale", [None, 1024.0])
def test_amp_1_unscaled_once_and_clipped_after(window: int, batches: int, scale: float | None) -> None:
    model = Two()
    step = chain(
        Forward(model, lambda m, batch: 3 * m.a + 4 * m.b),
        ScaledBackward(),
        Accumulate(window),
        ClipByGlobalNorm(1.0),
        sgd(),
        EmitEvents(),
    )
    state = init(step, model, loss_scale=None if scale is None else LossScale(scale=scale))
    events = [e for _, es in scan(step, state, [torch.zeros(1)] * batches) for e in es if isinstance(e, UpdateDone)]
    assert model.a.item() == pytest.approx(-0.6, rel=1e-5)
    assert model.b.item() == pytest.approx(-0.8, rel=1e-5)
    assert float(events[0].grad_norm) == 5.0


def test_amp_2_the_schedule_counts_applied_updates() -> None:
    model = nn.Linear(1, 1, bias=False)
    step = chain(
        Forward(model, lambda m, x: m(x).mean()),
        ScaledBackward(),
        Accumulate(1),
        sgd(lambda n: 1.0 / (1 + n), momentum=0.5),
        EmitEvents(),
    )
    inf, one = torch.full((1, 1), math.inf), torch.ones(1, 1)
    items = list(scan(step, init(step, model, loss_scale=LossScale(scale=8.0)), [inf, inf, one, one, one]))
    rates = [e.rates["default"] for _, events in items for e in events if isinstance(e, UpdateDone)]
    state = items[-1][0]
    assert rates == pytest.approx([1.0, 0.5, 1 / 3])
    assert (state.progress.windows, state.progress.updates, state.progress.skipped) == (5, 3, 2)


@pytest.mark.parametrize("fused", [True, False])
def test_amp_2_bias_correction_counts_applied_updates(fused: bool) -> None:
    model = nn.Linear(1, 1, bias=False)
    rule = Optimizer(torch.optim.AdamW, lr=0.1, fused=fused)
    step = chain(Forward(model, lambda m, x: m(x).mean()), ScaledBackward(), Accumulate(1), MaybeStep(rule))
    batches = [torch.full((1, 1), v) for v in (math.inf, 1.0, math.nan, 1.0, 1.0)]
    state = fold(step, init(step, model, loss_scale=LossScale(scale=8.0)), batches).state
    assert float(state.optimizer.of("weight")["step"]) == 3


def test_amp_3_the_scale_stays_above_its_floor_and_the_first_finite_window_updates() -> None:
    model = nn.Linear(1, 1, bias=False)
    step = chain(Forward(model, lambda m, x: m(x).mean()), ScaledBackward(), Accumulate(1), sgd(), EmitEvents())
    batches = [torch.full((1, 1), math.nan)] * 200 + [torch.ones(1, 1)]
    before = model.weight.item()
    run = fold(step, init(step, model, loss_scale=LossScale(scale=4.0)), batches)
    assert run.state.loss_scale is not None
    assert run.state.loss_scale.scale == LossScale().floor > 0
    assert model.weight.item() == before - 1.0
    assert (run.state.progress.updates, run.state.progress.skips_in_row) == (1, 0)


def test_amp_3_skips_in_a_row_end_the_run_with_the_reason() -> None:
    model = nn.Linear(1, 1, bias=False)
    step = chain(Forward(model, lambda m, x: m(x).mean()), ScaledBackward(), Accumulate(1), sgd(), EmitEvents())
    batches = [torch.ones(1, 1), *[torch.full((1, 1), math.nan)] * 50]
    run = fold(step, init(step, model), batches, until=Updates(100) | SkipsInRow(7))
    assert run.stopped_by == ("SkipsInRow(7)",)
    assert run.state.progress.windows == 8


def test_amp_3_the_scale_stays_below_its_ceiling() -> None:
    model = nn.Linear(1, 1, bias=False)
    step = chain(Forward(model, lambda m, x: 0 * m(x).mean()), ScaledBackward(), Accumulate(1), sgd())
    state = init(step, model, loss_scale=LossScale(interval=1))
    state = fold(step, state, [torch.ones(1, 1)] * 200).state
    assert state.loss_scale is not None
    assert state.loss_scale.scale == LossScale().ceiling


def test_amp_4_six_windows_equal_four_a_copy_and_two_more() -> None:
    model = nn.Linear(1, 1, bias=False)
    step = chain(Forward(model, lambda m, x: m(x).mean()), ScaledBackward(), Accumulate(1), sgd(0.0))
    state = init(step, model, loss_scale=LossScale(scale=8.0, interval=3))
    middle = fold(step, state.copy(), [torch.ones(1, 1)] * 4).state.copy()
    assert middle.loss_scale is not None
    assert (middle.loss_scale.scale, middle.loss_scale.finite_windows) == (16.0, 1)
    end = fold(step, middle, [torch.ones(1, 1)] * 2).state
    assert end.loss_scale == LossScale(scale=32.0, interval=3)
    assert end.loss_scale == fold(step, state, [torch.ones(1, 1)] * 6).state.loss_scale


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize("window", [1, 2])
def test_amp_5_a_skipped_window_leaves_batchnorm_as_it_was(window: int, bound: bool, donate: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    step = chain(
        Forward(model, lambda m, x: m(x).pow(2).mean()), ScaledBackward(), Accumulate(window), sgd(0.01), EmitEvents()
    )
    good = [torch.randn(5, 3) for _ in range(4 * window)]
    bad = [*good[: window - 1], torch.full((5, 3), math.inf)]  # the last micro-batch of its window
    state = init(step, model)
    state = state if bound else state.copy()
    skipped: list[UpdateSkipped] = []
    before: Any = None
    stream = [*good[: 2 * window], *bad, *good[2 * window :]]
    for now, events in scan(step, state, stream, donate=donate):
        state = now
        if state.progress.micro_steps == 2 * window and not state.window.micro_batches:
            before = state.copy()
        for event in events:
            if isinstance(event, UpdateSkipped):
                skipped.append(event)
                assert_records_equal(dict(state.buffers), dict(before.buffers))
                assert_records_equal(dict(state.params), dict(before.params))
                assert_records_equal(state.optimizer, before.optimizer)
    assert [(e.reason, e.micro_batch, e.parameter) for e in skipped] == [
        ("non-finite gradients", window - 1, "0.weight")
    ]
    assert int(state.buffers["1.num_batches_tracked"]) == 4 * window
    assert all(bool(torch.isfinite(b).all()) for b in state.buffers.values())
    if bound and donate:
        model.eval()
        assert bool(torch.isfinite(model(torch.randn(2, 3))).all())


def test_the_whole_history_of_the_scale_is_in_the_events() -> None:
    model = nn.Linear(1, 1, bias=False)
    step = chain(Forward(model, lambda m, x: m(x).mean()), ScaledBackward(), Accumulate(1), sgd(0.0), EmitEvents())
    values = [1.0, 1.0, math.inf, 1.0, math.inf, math.inf]
    state = init(step, model, loss_scale=LossScale(scale=8.0, interval=2))
    events = [e for _, es in scan(step, state, [torch.full((1, 1), v) for v in values]) for e in es]
    changes = [(e.before, e.after) for e in events if isinstance(e, LossScaleChanged)]
    assert changes == [(8.0, 16.0), (16.0, 8.0), (8.0, 4.0), (4.0, 2.0)]
    skips = [(e.skipped, e.in_row, e.loss_scale) for e in events if isinstance(e, UpdateSkipped)]
    assert skips == [(1, 1, 16.0), (2, 1, 8.0), (3, 2, 4.0)]


class Rough(torch.autograd.Function):
    """The identity, whose gradient is infinite where its input is negative: an overflow on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return torch.where(x < 0, math.inf, grads[0])


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("bad", [0, 1, 2, 3])
def test_under_a_loss_scale_the_micro_batch_whose_gradient_overflowed_is_named(
    bad: int, size: int, donate: bool
) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    step = chain(
        Forward(model, lambda m, x: Rough.apply(m(x)).mean()),
        ScaledBackward(),
        Accumulate(size),
        sgd(0.0),
        EmitEvents(),
    )
    stream = [torch.full((1, 1), -1.0 if i == bad else 1.0) for i in range(4)]  # a full window, or a short last one
    told: list[Any] = []
    for scale in (LossScale(scale=8.0), None):
        told += [e for _, es in scan(step, init(step, model, loss_scale=scale), stream, donate=donate) for e in es]
    skipped = [e for e in told if isinstance(e, UpdateSkipped)]
    assert [e.micro_batch for e in skipped] == [bad, None]  # without one it costs a look at every micro-batch
