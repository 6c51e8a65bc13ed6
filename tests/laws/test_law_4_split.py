"""Law 4: any partition of a batch into micro-batches gives the same update up to rounding."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

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
    named,
    scan,
    supervised,
)
from pipeline.errors import LawError
from pipeline.events import UpdateSkipped
from pipeline.testing import assert_records_equal, assert_split_invariant
from tests.laws.cases import IN, OUT, ROW_WISE, make_batch, make_model, make_step

BOUNDS = {torch.float32: 1e-6, torch.float64: 1e-12}
sizes_of_24 = st.lists(st.integers(1, 23), max_size=8).map(lambda cuts: sorted({0, 24, *cuts}))


def sgd() -> Optimizer:
    return Optimizer(torch.optim.SGD, lr=0.5, momentum=0.9)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("clip", [None, 0.1], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("name", ROW_WISE)
@given(cuts=sizes_of_24, seed=st.integers(0, 1000))
def test_any_split_gives_the_same_update(
    name: str, clip: float | None, dtype: torch.dtype, cuts: list[int], seed: int
) -> None:
    model = make_model(name, seed, dtype)
    step = make_step(model, 1, sgd(), clip)
    sizes = [b - a for a, b in itertools.pairwise(cuts)]
    assert_split_invariant(step, init(step, model), make_batch(seed, 24, dtype), sizes, rtol=BOUNDS[dtype])


def token_sum(model: Any, batch: Any) -> Loss:
    """A sum over the targets that count; -100 does not."""
    x, y = batch
    counted = y != -100
    return Loss.sum(F.cross_entropy(model(x), y, reduction="sum", ignore_index=-100), int(counted.sum()))


def token_sum_on_device(model: Any, batch: Any) -> Loss:
    """The same, with the weight left on the device."""
    x, y = batch
    return Loss.sum(F.cross_entropy(model(x), y, reduction="sum", ignore_index=-100), (y != -100).sum())


def token_mean(model: Any, batch: Any) -> Loss:
    """The same as a mean, NaN where nothing counts."""
    x, y = batch
    return Loss.mean(F.cross_entropy(model(x), y, ignore_index=-100), int((y != -100).sum()))


@pytest.mark.parametrize("scale", [None, 1024.0], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("loss", [token_sum, token_sum_on_device, token_mean])
@given(cuts=sizes_of_24, seed=st.integers(0, 1000), masked=st.sets(st.integers(0, 23), max_size=20))
def test_masked_items_change_nothing_however_they_fall(
    loss: Any, scale: float | None, cuts: list[int], seed: int, masked: set[int]
) -> None:
    x, y = make_batch(seed, 24, torch.float64)
    y[list(masked)] = -100
    model = make_model("mlp", seed, torch.float64)
    step = chain(Forward(model, loss), ScaledBackward(), Accumulate(1), ClipByGlobalNorm(0.1), MaybeStep(sgd()))
    state = init(step, model, loss_scale=None if scale is None else LossScale(scale=scale))
    sizes = [b - a for a, b in itertools.pairwise(cuts)]
    kept = sorted(set(range(24)) - masked)
    without = fold(step, state.copy(), [(x[kept], y[kept])]).state.params
    with_masked = fold(step, state.copy(), [(x, y)]).state.params
    assert_records_equal(with_masked, without, rtol=1e-12)
    assert_split_invariant(step, state, (x, y), sizes, rtol=1e-12)


class Either(nn.Module):
    """Takes its input out of a mapping, a tuple or a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(IN, OUT)

    def forward(self, inputs: Any) -> Tensor:
        if isinstance(inputs, dict):
            return self.linear(inputs["x"] * inputs["mask"])
        return self.linear(inputs[0] * inputs[1])


@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_supervised_counts_the_samples_of_nested_inputs(kind: str) -> None:
    x, y = make_batch(0, 24)
    inputs: Any = {"x": x, "mask": torch.ones_like(x)} if kind == "dict" else (x, torch.ones_like(x))
    model = Either()
    step = chain(Forward(model, supervised(F.cross_entropy)), ScaledBackward(), Accumulate(1), MaybeStep(sgd()))
    assert_split_invariant(step, init(step, model), (inputs, y), [1, 23])


def test_the_assertion_refuses_sizes_that_fit_nothing_and_finds_a_named_window() -> None:
    model = make_model("mlp")
    step = make_step(model, 1, sgd(), None)
    with pytest.raises(LawError, match="23 rows"):
        assert_split_invariant(step, init(step, model), make_batch(0, 24), [1, 22])
    renamed = step.replace("Accumulate", named("window", Accumulate(1)))
    assert_split_invariant(renamed, init(step, model), make_batch(0, 24), [4, 20])


def test_a_device_weight_of_zero_is_as_a_host_weight_of_zero() -> None:
    for zero in (0, torch.tensor(0.0)):
        model = make_model("mlp")

        def nothing(m: Any, batch: Any, zero: Any = zero) -> Loss:
            return Loss.sum(0 * m(batch[0]).sum(), zero)

        step = chain(Forward(model, nothing), ScaledBackward(), Accumulate(1), MaybeStep(sgd()), EmitEvents())
        state = init(step, model, loss_scale=LossScale(scale=1024.0))
        items = list(scan(step, state, [make_batch(0)] * 3))
        skips = [e for _, events in items for e in events if isinstance(e, UpdateSkipped)]
        assert [e.reason for e in skips] == ["no items counted"] * 3
        assert items[-1][0].loss_scale == LossScale(scale=1024.0)


def test_weights_on_the_host_and_on_the_device_give_the_same_update() -> None:
    x, y = make_batch(0, 12)
    y[3:7] = -100
    ends: list[Tensor] = []
    for loss in (token_sum, token_sum_on_device):
        model = make_model("mlp")
        step = chain(Forward(model, loss), ScaledBackward(), Accumulate(3), MaybeStep(sgd()))
        batches = [(x[i : i + 4], y[i : i + 4]) for i in (0, 4, 8)]
        ends.append(fold(step, init(step, model), batches).state.params)
    assert_records_equal(ends[0], ends[1], rtol=1e-6)


def test_the_assertion_finds_a_mean_of_means() -> None:
    model = nn.Linear(IN, OUT)
    mean_of_means = chain(
        Forward(model, lambda m, batch: F.cross_entropy(m(batch[0]), batch[1])),
        ScaledBackward(),
        Accumulate(1),
        MaybeStep(sgd()),
    )
    with pytest.raises(LawError, match="differ"):
        assert_split_invariant(mean_of_means, init(mean_of_means, model), make_batch(0, 24), [1, 23])
