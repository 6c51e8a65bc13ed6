"""Law 5: the loss-scale trajectory and the skipped steps equal those of `torch.amp.GradScaler` on the same infs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipeline import (
    Accumulate,
    EmitEvents,
    Forward,
    LossScale,
    MaybeStep,
    Optimizer,
    ScaledBackward,
    chain,
    init,
    scan,
)
from pipeline.events import LossScaleChanged, UpdateDone, UpdateSkipped
from pipeline.testing import assert_records_equal

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "fused": False}),
    "AdamW": (torch.optim.AdamW, {"fused": False}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
}


def loss(model: Any, batch: Any) -> Any:
    x, poison = batch
    return (model(x) ** 2).mean() * poison


def batch_of(good: bool, i: int) -> Any:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(i))
    return x, torch.tensor(1.0 if good else float("inf"))


@pytest.mark.parametrize("name", OPTIMIZERS)
@settings(max_examples=170)  # three optimizers: 510 sequences
@given(
    finite=st.lists(st.booleans() | st.just(True), min_size=1, max_size=14),
    start=st.sampled_from([1.0, 8.0, 3.0, 65536.0]),
    interval=st.integers(1, 4),
    growth=st.sampled_from([2.0, 1.5, 1.7]),
    backoff=st.sampled_from([0.5, 0.3]),
)
def test_scale_skips_and_parameters_equal_torchs(
    name: str, finite: list[bool], start: float, interval: int, growth: float, backoff: float
) -> None:
    cls, more = OPTIMIZERS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    torchs = torch.amp.GradScaler(
        "cpu", init_scale=start, growth_factor=growth, backoff_factor=backoff, growth_interval=interval
    )
    optimizer = cls(twin.parameters(), lr=0.01, **more)
    ours = LossScale(scale=start, growth=growth, backoff=backoff, interval=interval, ceiling=2.0**100, floor=2.0**-100)
    step = chain(
        Forward(model, loss), ScaledBackward(), Accumulate(1), MaybeStep(Optimizer(cls, lr=0.01, **more)), EmitEvents()
    )
    batches = [batch_of(good, i) for i, good in enumerate(finite)]
    state = init(step, model, loss_scale=ours)
    run = scan(step, state, batches)
    for good, batch in zip(finite, batches, strict=True):
        state, events = next(run)
        used = torchs.get_scale()
        optimizer.zero_grad()
        torchs.scale(loss(twin, batch)).backward()
        torchs.step(optimizer)
        torchs.update()
        (done,) = (e for e in events if isinstance(e, (UpdateDone, UpdateSkipped)))
        assert isinstance(done, UpdateDone if good else UpdateSkipped)
        assert done.loss_scale == used
        assert state.loss_scale is not None
        assert (state.loss_scale.scale, state.loss_scale.finite_windows) == (
            torchs.get_scale(),
            torchs._get_growth_tracker(),
        )
        changed = [(e.before, e.after) for e in events if isinstance(e, LossScaleChanged)]
        assert changed == ([] if used == torchs.get_scale() else [(used, torchs.get_scale())])
        assert_records_equal(dict(state.params), dict(twin.named_parameters()))
        if not state.progress.updates:
            continue  # torch's fused optimizers fill their state with zeros even when the first step is skipped
        for key, param in twin.named_parameters():
            kept = {k: v for k, v in optimizer.state[param].items() if v is not None}
            assert_records_equal(state.optimizer.of(key), kept)
    assert state.progress.skipped == finite.count(False)
