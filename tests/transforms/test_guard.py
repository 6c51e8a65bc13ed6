"""Guards: a dropped micro-batch changes nothing, and a spike is skipped."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
import torch

from pipeline import (
    Accumulate,
    ClipByGlobalNorm,
    EmitEvents,
    Forward,
    Loss,
    LossScale,
    MaybeStep,
    Optimizer,
    ScaledBackward,
    chain,
    fold,
    init,
    scan,
    supervised,
)
from pipeline.errors import MissingFieldError, SettingError
from pipeline.events import UpdateDone, UpdateSkipped
from pipeline.testing import assert_records_equal, frame
from pipeline.transforms import DropNonFinite, SkipSpikes
from tests.laws.cases import accuracy, make_batch, make_batches, make_model


def whole(model: Any, window: int, *between: Any) -> Any:
    forward = Forward(model, supervised(torch.nn.functional.cross_entropy, measures={"accuracy": accuracy}))
    rule = MaybeStep(Optimizer(torch.optim.SGD, lr=0.1, momentum=0.9))
    return chain(forward, ScaledBackward(), *between, Accumulate(window), ClipByGlobalNorm(1.0), rule, EmitEvents())


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("donate", [True, False])
def test_the_rest_of_the_window_is_as_if_the_bad_one_had_not_come(bad: int, value: float, donate: bool) -> None:
    good = make_batches(2, size=5)
    x, y = make_batch(9, 3)
    batches = [*good[:bad], (x * value, y), *good[bad:]]
    model = make_model("mlp")
    state = init(whole(model, 1), model)
    run = fold(whole(model, 3, DropNonFinite()), state.copy(), batches, donate=donate).state
    without = fold(whole(model, 2), state.copy(), good, donate=donate).state
    assert run.progress.updates == without.progress.updates == 1
    assert_records_equal(run.params, without.params, rtol=1e-6)


def test_its_loss_and_measures_are_left_out_too_and_without_a_bad_one_it_changes_no_bit() -> None:
    model = make_model("mlp")
    state = init(whole(model, 1), model)
    x, y = make_batch(9, 3)
    runs = []
    for batches, between in (([*make_batches(2), (x * math.nan, y)], (DropNonFinite(),)), (make_batches(2), ())):
        events = [e for _, es in scan(whole(model, 3, *between), state.copy(), batches) for e in es]
        runs.append(next(e for e in events if isinstance(e, UpdateDone)))
    assert float(runs[0].loss) == pytest.approx(float(runs[1].loss))
    assert [float(v) for v in runs[0].measures["accuracy"]] == [float(v) for v in runs[1].measures["accuracy"]]
    ends = [fold(whole(model, 2, *b), state.copy(), make_batches(6)).state.params for b in ((), (DropNonFinite(),))]
    assert_records_equal(ends[0], ends[1])


def test_a_window_of_which_nothing_is_left_is_skipped() -> None:
    model = make_model("mlp")
    x, y = make_batch(0)
    run = fold(whole(model, 2, DropNonFinite()), init(whole(model, 2), model), [(x * math.nan, y)] * 2)
    assert (run.state.progress.updates, run.state.progress.skipped) == (0, 1)


def test_a_gradient_that_overflows_on_the_way_back_is_dropped() -> None:
    given = frame({"w": [0.0, 0.0]}, grads={"w": [1.0, math.inf]}, loss=1.0, weight=2.0)
    after = DropNonFinite()(given)
    assert after.grads is not None
    assert after.grads["w"].tolist() == [0.0, 0.0]
    assert float(after.weight) == 0.0
    with pytest.raises(MissingFieldError, match="after ScaledBackward"):
        DropNonFinite()(frame({"w": [0.0]}))


class TestSpikes:
    def steps(self, norms: list[float], **settings: Any) -> list[bool]:
        step = chain(SkipSpikes(**settings), MaybeStep(Optimizer(torch.optim.SGD, lr=0.0)))
        state = step.init(frame({"w": [0.0]}).state)
        applied = []
        for norm in norms:
            given = frame({"w": [0.0]}, sums={"w": [norm]}, ready=True)
            after = step(given.having(state=attrs.evolve(given.state, slots=state.slots)))
            state = after.state
            applied.append(bool(after.applied))
        return applied

    def test_above_the_multiple_of_the_median_once_enough_is_known(self) -> None:
        norms = [1.0, 2.0, 3.0, 9.9, 10.5, 2.0]
        assert self.steps(norms, multiple=3.0, over=10, least=3) == [True, True, True, False, False, True]
        assert self.steps([1.0, 100.0, 1.0], multiple=3.0, over=10, least=3) == [True, True, True]

    def test_a_new_level_is_no_spike_for_long(self) -> None:
        applied = self.steps([1.0] * 5 + [100.0] * 6, multiple=3.0, over=5, least=5)
        assert applied == [True] * 5 + [False] * 3 + [True] * 3

    def test_a_non_finite_norm_is_skipped_and_does_not_enter_the_median(self) -> None:
        assert self.steps([1.0, math.nan, math.inf, 1.0, 2.0], multiple=3.0, over=3, least=2) == [
            True, False, False, True, True
        ]  # fmt: skip

    def test_the_event_says_why(self) -> None:
        model = make_model("mlp")
        step = whole(model, 1).insert_before("MaybeStep", SkipSpikes(multiple=1.001, over=4, least=1))
        events = [e for _, es in scan(step, init(step, model), make_batches(20)) for e in es]
        skips = [e for e in events if isinstance(e, UpdateSkipped)]
        assert skips
        assert {e.reason for e in skips} == {"gradient norm above 1.001 times its median"}
        assert all(math.isfinite(float(e.grad_norm)) for e in skips)

    def test_an_overflow_is_no_spike_and_the_loss_scale_backs_off(self) -> None:
        model = torch.nn.Linear(6, 1, bias=False)
        step = whole(model, 1).insert_before("MaybeStep", SkipSpikes(over=4, least=1))
        step = step.replace("Forward", Forward(model, lambda m, factor: m(torch.ones(1, 6)).sum() * factor))
        state = init(step, model, loss_scale=LossScale(scale=64.0))
        items = list(scan(step, state, [torch.tensor(f) for f in (1.0, 1.0, math.inf)]))
        (skip,) = (e for _, events in items for e in events if isinstance(e, UpdateSkipped))
        assert skip.reason == "non-finite gradients"
        assert items[-1][0].loss_scale == LossScale(scale=32.0)

    def test_a_window_of_no_items_is_no_spike_either(self) -> None:
        model = make_model("mlp")
        step = whole(model, 1).insert_before("MaybeStep", SkipSpikes(over=4, least=1))
        nothing = Forward(model, lambda m, batch: Loss.sum(0 * m(batch[0]).sum(), torch.tensor(0.0)))
        items = list(scan(step.replace("Forward", nothing), init(step, model), make_batches(1)))
        (skip,) = (e for _, events in items for e in events if isinstance(e, UpdateSkipped))
        assert skip.reason == "no items counted"

    @pytest.mark.parametrize(
        "bad",
        [
            {"multiple": 1.0},
            {"multiple": "3"},
            {"least": 0},
            {"least": 1.5},
            {"over": 20.5},
            {"over": 3, "least": 4},
        ],
    )
    def test_settings_are_checked(self, bad: dict[str, Any]) -> None:
        with pytest.raises(SettingError):
            SkipSpikes(**bad)
