"""What holds for every clip: once a window, sparse as dense, no host read, no update from what is not finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from pipeline import (
    AdaptiveClip,
    ClipByGlobalNorm,
    ClipByGroupNorm,
    ClipByValue,
    ClipPerParameter,
    Frame,
    MaybeStep,
    Optimizer,
    Tensors,
    chain,
    fold,
    init,
    named,
    supervised,
)
from pipeline.errors import MissingFieldError
from pipeline.events import UpdateDone
from pipeline.testing import assert_records_equal, frame
from pipeline.transform import Transform
from pipeline.transforms import global_norm
from tests.cases.probe import Recorder, of, step_of
from tests.laws.cases import make_batches, make_model

CLIPS: list[Transform] = [
    ClipByGlobalNorm(0.5),
    ClipByGlobalNorm(0.5, p=1),
    ClipByGlobalNorm(0.5, p=math.inf),
    ClipByValue(0.1),
    ClipByGroupNorm({"w": 0.5, "[bes]": 0.2}),
    ClipByGroupNorm({"*": 0.5}),
    ClipPerParameter(0.3),
    AdaptiveClip(0.1, leave="b"),
]
each_clip = pytest.mark.parametrize("clip", CLIPS, ids=repr)
REWRITING = [clip for clip in CLIPS if not isinstance(clip, ClipByGlobalNorm)]


def values(seed: int, scale: float = 3.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": scale * torch.randn(4, 3, generator=generator),
        "b": scale * torch.randn(3, generator=generator),
        "e": torch.zeros(0, 2),
        "s": scale * torch.randn((), generator=generator),
    }


def ready(sums: dict[str, Any], **more: Any) -> Frame:
    return frame(values(99, 1.0), sums=sums, ready=True, **more)


def result(after: Frame) -> dict[str, Tensor]:
    return {name: g.to_dense() * after.update_factor for name, g in after.state.window.grads.items()}


def halves(dense: Tensor) -> Tensor:
    """The same values, sparse by rows, each row given twice with half of it."""
    rows = torch.arange(len(dense)).repeat(2)
    return torch.sparse_coo_tensor(rows[None], torch.cat([dense, dense]) / 2, dense.shape, check_invariants=True)


@each_clip
def test_an_open_window_passes_unchanged(clip: Transform) -> None:
    open_ = frame(values(99), sums=values(0), micro_batches=3)
    assert clip(open_) is open_


@each_clip
def test_a_full_window_of_nothing_is_an_error_with_a_cure(clip: Transform) -> None:
    with pytest.raises(MissingFieldError, match=f"{type(clip).__name__} reads window.grads"):
        clip(frame({"w": [1.0]}, ready=True))


@each_clip
def test_no_gradients_and_no_weight_pass(clip: Transform) -> None:
    for nothing in (ready({}, micro_batches=1), ready(values(0), update_factor=0.0, window_weight=0.0)):
        after = clip(nothing)
        assert float(after.update_factor) == float(nothing.update_factor)
        assert_records_equal(after.state, nothing.state)


@each_clip
def test_a_small_gradient_is_only_normalised(clip: Transform) -> None:
    sums = {name: 1e-4 * value for name, value in values(0).items()}
    after = clip(ready(sums, update_factor=0.25))
    assert float(after.facts["clip_factor"]) == pytest.approx(1.0, rel=1e-6)
    for name, grad in result(after).items():
        assert torch.equal(grad, 0.25 * sums[name]), name


@each_clip
@given(seed=st.integers(0, 2**16), factor=st.sampled_from([1.0, 0.25, 1 / 3]))
def test_clipping_measures_both_sides_and_lengthens_nothing(clip: Transform, seed: int, factor: float) -> None:
    sums = values(seed)
    after = clip(ready(sums, update_factor=factor))
    before = {name: factor * value for name, value in sums.items()}
    ours, norm = result(after), float(global_norm(before.values()))
    assert float(after.facts["grad_norm"]) == pytest.approx(norm, rel=1e-6)
    assert float(after.facts["clip_factor"]) == pytest.approx(float(global_norm(ours.values())) / norm, rel=1e-6)
    assert after.sum_norm is not None
    assert float(after.sum_norm[1]) == pytest.approx(float(global_norm(after.state.window.grads.values())), rel=1e-6)
    for name, grad in ours.items():
        assert bool((grad.abs() <= before[name].abs() * (1 + 1e-6)).all()), name
        assert bool((grad * before[name] >= 0).all()), name


@each_clip
@given(seed=st.integers(0, 2**16))
def test_a_sparse_gradient_with_duplicates_is_clipped_as_the_dense_one(clip: Transform, seed: int) -> None:
    sums = values(seed)
    dense = clip(ready(sums, update_factor=0.5))
    sparse = clip(ready({**sums, "w": halves(sums["w"])}, update_factor=0.5))
    assert sparse.state.window.grads["w"].layout is torch.sparse_coo
    for name, grad in result(dense).items():
        torch.testing.assert_close(result(sparse)[name], grad, rtol=2e-6, atol=0.0)
    for fact, value in dense.facts.items():
        assert float(sparse.facts[fact]) == pytest.approx(float(value), rel=2e-6), fact


@each_clip
def test_sparse_by_elements_too(clip: Transform) -> None:
    sums = values(0)
    dense, sparse = clip(ready(sums)), clip(ready({**sums, "w": sums["w"].to_sparse(), "b": sums["b"].to_sparse()}))
    for name, grad in result(dense).items():
        torch.testing.assert_close(result(sparse)[name], grad, rtol=2e-6, atol=0.0)


@each_clip
def test_squares_that_overflow_float32_are_scaled_right(clip: Transform) -> None:
    small, large = values(0, 1e3), values(0, 1e20)
    # Far above every limit only the direction counts.
    expected, ours = result(clip(ready(small))), result(clip(ready(large)))
    for name in ("w", "s"):
        torch.testing.assert_close(ours[name], expected[name], rtol=1e-4, atol=0.0)
    assert float(clip(ready(large)).facts["grad_norm"]) == pytest.approx(float(global_norm(large.values())), rel=1e-6)


@each_clip
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", ["w", "b"])
def test_what_is_not_finite_stays_so_and_stays_where_it_is(clip: Transform, where: str, bad: float) -> None:
    sums = values(0)
    sums[where].view(-1)[1] = bad
    after = clip(ready(sums, update_factor=0.5))
    assert not math.isfinite(float(after.facts["grad_norm"]))
    assert after.sum_norm is not None
    assert not math.isfinite(float(after.sum_norm[1] * after.update_factor))
    factor = 1.0 if isinstance(clip, ClipByGlobalNorm) else 0.5
    assert_records_equal(after.state.window.grads, Tensors({name: factor * value for name, value in sums.items()}))


@each_clip
def test_a_zero_gradient_is_left_as_it_is(clip: Transform) -> None:
    sums = values(0, 0.0)
    after = clip(ready(sums))
    assert (float(after.facts["grad_norm"]), float(after.facts["clip_factor"])) == (0.0, 1.0)
    assert_records_equal(result(after), sums)


@each_clip
@pytest.mark.parametrize("factor", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
def test_nothing_waits_for_the_device(clip: Transform, factor: Any) -> None:
    window = ready(values(0), update_factor=factor)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        clip(window)
    assert not [e for e in profile.key_averages() if e.key in ("aten::_local_scalar_dense", "aten::item")]


@each_clip
def test_a_traced_clip_depends_on_no_value_of_the_trace(clip: Transform) -> None:
    params = values(99)

    def clipped(*grads: Tensor) -> list[Tensor]:
        window = frame(params, sums=dict(zip("wbes", grads, strict=True)), ready=True, update_factor=0.25)
        return list(result(clip(window)).values())

    traced = make_fx(clipped)(*values(0, 1e-4).values())
    for scale in (1e-4, 1.0, 1e20):
        for ours, eager in zip(traced(*values(1, scale).values()), clipped(*values(1, scale).values()), strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-6, atol=0.0)


@each_clip
def test_a_factor_on_the_device_gives_the_bits_of_the_same_number(clip: Transform) -> None:
    number = clip(ready(values(0), update_factor=0.25))
    tensor = clip(ready(values(0), update_factor=torch.tensor(0.25)))
    assert_records_equal(result(tensor), result(number))


@pytest.mark.parametrize("clip", REWRITING, ids=repr)
def test_a_record_that_owns_its_sums_is_written_in_place(clip: Transform) -> None:
    given = ready(values(0))
    owned = given.having(state=given.state.owned())
    places = [grad.data_ptr() for grad in owned.state.window.grads.flat]
    sums = owned.state.window.grads
    after = clip(owned)
    assert [grad.data_ptr() for grad in after.state.window.grads.flat] == places
    assert after.state.window.grads.is_owned
    assert sums.is_stale


def whole_fold(clip: Transform, donate: bool) -> tuple[Any, list[UpdateDone]]:
    model, recorder = make_model("mlp"), Recorder()
    rule = Optimizer(torch.optim.AdamW, lr=0.01)
    step = step_of(model, supervised(F.cross_entropy), rule, every=3).insert_after("Accumulate", clip)
    run = fold(step, init(step, model, seed=1), make_batches(8), donate=donate, sinks=[recorder])
    return run.state, of(UpdateDone, recorder.events)


FOR_MLP: list[Transform] = [
    ClipByGlobalNorm(0.1, p=1),
    ClipByValue(0.01),
    ClipByGroupNorm({"*.bias": 0.05, "2.*": 0.1}),
    ClipPerParameter(0.05),
    AdaptiveClip(0.01, leave=["2.*"]),
]


@pytest.mark.parametrize("clip", FOR_MLP, ids=repr)
def test_a_whole_fold_gives_the_same_bits_in_place_and_copying(clip: Transform) -> None:
    (donated, events), (copied, _) = whole_fold(clip, True), whole_fold(clip, False)
    assert_records_equal(donated, copied)
    assert len(events) == 3  # the last of two micro-batches
    assert all(float(event.clip_factor) < 1 for event in events)
    assert all(float(event.grad_norm) > 0 for event in events)


class Mixed(nn.Module):
    """A table whose rows are looked up and multiplied with: its gradient comes sparse, dense, or as both."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3, sparse=sparse)
        nn.init.constant_(self.table.weight, 0.5)

    def forward(self, ids: Tensor) -> Tensor:
        if int(ids[0]) < 0:
            return self.table.weight.square().sum()
        looked_up = self.table(ids).sum()
        return looked_up + self.table.weight.sum() if int(ids[0]) == 3 else looked_up


@pytest.mark.parametrize("donate", [True, False], ids=["donated", "copied"])
@pytest.mark.parametrize("order", [[[1, 1], [-1]], [[-1], [1, 1]], [[3, 3], [0]], [[0], [3, 1]]])
def test_sparse_and_dense_gradients_of_one_parameter_add_up_over_a_window(order: list[list[int]], donate: bool) -> None:
    ends: list[Tensor] = []
    for sparse in (True, False):
        model = Mixed(sparse)
        step = step_of(model, lambda m, ids: m(ids), Optimizer(torch.optim.SGD, lr=1.0), every=2, max_norm=1.0)
        run = fold(step, init(step, model), [torch.tensor(ids) for ids in order], donate=donate)
        ends.append(run.state.params["table.weight"].detach().clone())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=0.0)


@each_clip
@pytest.mark.parametrize("first", [None, ClipByGlobalNorm(1.0)], ids=["alone", "behind a global clip"])
def test_no_clip_makes_a_zero_update_of_a_norm_that_is_infinite(clip: Transform, first: Transform | None) -> None:
    sums = {name: torch.full_like(value, 1e36) for name, value in values(0).items()}  # finite, beyond any norm
    params = {name: torch.ones_like(value) for name, value in sums.items()}
    given_ = frame(params, sums=sums, ready=True, update_factor=1.0)
    clips = [] if first is None else [named("first", first)]
    step = chain(*clips, clip, MaybeStep(Optimizer(torch.optim.SGD, lr=1.0)))
    after = step(given_)
    assert after.applied is False
    assert_records_equal(dict(after.state.params), params)
