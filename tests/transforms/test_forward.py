"""Forward: autocast, recomputation, and what it calls."""

from __future__ import annotations

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
    Forward,
    Frame,
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
from pipeline.errors import SettingError
from pipeline.testing import assert_matches_loop, assert_pure, assert_records_equal, assert_split_invariant
from tests.laws.cases import IN, OUT, make_batch, make_batches, make_model

BF16_SPLIT = 0.02
"""Law 4 under bfloat16 autocast: 8 bits of significand, so a matrix product rounds by up to 2^-8 = 0.4% of each
gradient, and other splits round otherwise; an update of rate 0.5 then moves a parameter by up to a few of these."""


def whole(model: nn.Module, window: int = 1, lr: float = 0.5, **settings: Any) -> Any:
    rule = Optimizer(torch.optim.SGD, lr=lr)
    forward = Forward(model, supervised(F.cross_entropy), **settings)
    return chain(forward, ScaledBackward(), Accumulate(window), MaybeStep(rule))


# Not float16 with a window of 4: a loss divided by 4 rounds small gradients off, where ours are divided at the end.
@pytest.mark.parametrize(("dtype", "window"), [(torch.bfloat16, 1), (torch.bfloat16, 4), (torch.float16, 1)])
def test_autocast_equals_the_plain_loop_bit_for_bit(dtype: torch.dtype, window: int) -> None:
    def loop(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for i, (x, y) in enumerate(batches):
            with torch.autocast("cpu", dtype):
                loss = F.cross_entropy(model(x), y) / window
            loss.backward()
            if (i + 1) % window == 0:
                optimizer.step()
                optimizer.zero_grad()

    model = make_model("mlp")
    step = whole(model, window, autocast=dtype).replace(
        "MaybeStep", MaybeStep(Optimizer(torch.optim.SGD, lr=0.5, fused=False))
    )
    assert_matches_loop(step, model, make_batches(8), loop)


def test_autocast_runs_the_model_in_the_given_precision_and_keeps_the_parameters() -> None:
    model = make_model("mlp")
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    step = whole(model, autocast=torch.bfloat16)
    state = fold(step, init(step, model), make_batches(2)).state
    assert set(seen) == {torch.bfloat16}
    assert {p.dtype for p in state.params.values()} == {torch.float32}
    assert {s.dtype for s in state.params.values()} == {torch.float32}


@given(cuts=st.lists(st.integers(1, 23), max_size=6).map(lambda c: sorted({0, 24, *c})), seed=st.integers(0, 200))
def test_law_4_under_bfloat16_within_its_stated_tolerance(cuts: list[int], seed: int) -> None:
    model = make_model("mlp", seed)
    step = whole(model, autocast=torch.bfloat16)
    sizes = [b - a for a, b in itertools.pairwise(cuts)]
    assert_split_invariant(step, init(step, model), make_batch(seed, 24), sizes, rtol=BF16_SPLIT)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_in_place_and_copying_give_the_same_bits_under_autocast(autocast: torch.dtype) -> None:
    ends = []
    for donate in (True, False):
        model = make_model("batchnorm")
        step = whole(model, 2, autocast=autocast)
        state = init(step, model, loss_scale=LossScale(scale=128.0))
        ends.append(fold(step, state, make_batches(6), donate=donate).state)
    assert_records_equal(ends[0], ends[1])
    model = make_model("batchnorm")
    step = whole(model, autocast=autocast)
    assert_pure(step, Frame(init(step, model), make_batch(0)))


class Deep(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.2), nn.Linear(width, width))
            for _ in range(4)
        )
        self.inside, self.head = nn.Linear(IN, width), nn.Linear(width, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def deep() -> Deep:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Deep()


class TestRecompute:
    @pytest.mark.parametrize("bound", [True, False])
    @pytest.mark.parametrize("autocast", [None, torch.bfloat16])
    def test_the_same_bits_with_dropout(self, bound: bool, autocast: Any) -> None:
        ends = []
        for recompute in ((), "blocks.*"):
            model = deep()
            step = whole(model, 2, recompute=recompute, autocast=autocast)
            state = init(step, model)
            ends.append(fold(step, state if bound else state.copy(), make_batches(6)).state)
        assert_records_equal(ends[0], ends[1])

    def test_fewer_activations_are_kept(self) -> None:
        kept = []
        for recompute in ((), "blocks.*"):
            model = deep()
            step = whole(model, recompute=recompute)
            state = init(step, model).owned()
            sizes: list[int] = []

            def note(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
                sizes.append(tensor.numel())
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                step["Forward"](Frame(state, make_batch(0, 64)))
            kept.append(sum(sizes))
        assert kept[1] < kept[0] / 2

    def test_the_model_is_as_it_was_after_the_call_and_after_an_error(self) -> None:
        model = deep()
        forward = Forward(model, supervised(F.cross_entropy), recompute="blocks.*")
        state = init(forward, model).owned()
        forward(Frame(state, make_batch(0)))
        with pytest.raises(RuntimeError):
            forward(Frame(state, (torch.zeros(2, 99), torch.zeros(2).long())))
        assert all("forward" not in vars(module) for module in model.modules())

    def test_nested_matches_are_taken_once(self) -> None:
        model = deep()
        step = whole(model, recompute=("blocks.*", "blocks.0.*"))
        assert len(step["Forward"]._recomputed) == 4
        fold(step, init(step, model), make_batches(2))

    def test_what_matches_nothing_or_would_count_a_batch_twice_is_refused(self) -> None:
        with pytest.raises(SettingError, match="blocks"):
            Forward(deep(), supervised(F.cross_entropy), recompute="layers.*")
        with pytest.raises(SettingError, match="BatchNorm"):
            Forward(nn.Sequential(nn.Sequential(nn.BatchNorm1d(3))), supervised(F.cross_entropy), recompute="0")


@pytest.mark.parametrize("bad", [torch.float32, torch.int8, "bfloat16"])
def test_autocast_to_anything_else_is_refused(bad: Any) -> None:
    with pytest.raises(SettingError, match=r"torch\.bfloat16, torch\.float16 or None"):
        Forward(make_model("mlp"), supervised(F.cross_entropy), autocast=bad)


def test_it_prints_as_it_was_written() -> None:
    forward = Forward(deep(), supervised(F.cross_entropy), autocast=torch.bfloat16, recompute="blocks.*")
    assert repr(forward) == (
        "Forward(model=Deep, loss=supervised(cross_entropy), autocast=torch.bfloat16, recompute=('blocks.*',))"
    )


class TestHostReads:
    """The host waits for the device at most once a window, and not while micro-batches are being queued."""

    @pytest.mark.parametrize("scaled", [False, True])
    def test_at_most_one_read_a_window_over_a_hundred_updates(self, scaled: bool) -> None:
        model = make_model("mlp")
        step = whole(model, 4, lr=0.01)
        state = init(step, model, loss_scale=LossScale(scale=8.0) if scaled else None)
        reads: list[int] = []
        running = scan(step, state, make_batches(400))
        for _ in range(401):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                item = next(running, None)
            found = [e.count for e in profile.key_averages() if e.key == "aten::_local_scalar_dense"]
            reads.append(sum(found))
            if item is None:
                break
        windows = [reads[i : i + 4] for i in range(0, 400, 4)]
        assert all(window[:3] == [0, 0, 0] and window[3] <= 1 for window in windows)
