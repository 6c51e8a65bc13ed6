"""Law 9: a compiled step trains as the step itself does, within 1e-5 relative over a hundred updates."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lion_pytorch import Lion
from torch import nn
from torch.nn import functional as F

from pipeline import (
    Accumulate,
    ClipByGlobalNorm,
    EmitEvents,
    Forward,
    LossScale,
    MaybeStep,
    MicroBatches,
    Optimizer,
    ScaledBackward,
    TrainState,
    chain,
    compiled,
    init,
    scan,
    supervised,
)
from pipeline._publication import settle
from pipeline.compilation import EagerPartWarning
from pipeline.events import Event
from pipeline.testing import assert_records_equal
from pipeline.transform import Transform
from tests.laws.cases import IN, TRACEABLE, make_batches, make_model, make_step

SCALE = LossScale(scale=2.0**12, interval=20)


def events_of(step: Transform, state: TrainState, batches: Any, **more: Any) -> tuple[TrainState, list[Event]]:
    """The last state, and all events with their values on the host."""
    events: list[Event] = []
    for now, some in scan(step, state, batches, clock=lambda: 0.0, **more):
        state, events = now, [*events, *some]
    return state, settle(events)


RULES = {
    "SGD": Optimizer(torch.optim.SGD, lr=0.05, momentum=0.9),
    "Adam": Optimizer(torch.optim.Adam, lr=0.01, fused=False),
    "AdamW": Optimizer(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "RMSprop": Optimizer(torch.optim.RMSprop, lr=0.01),
    "Adagrad": Optimizer(torch.optim.Adagrad, lr=0.05),
    "Lion": Optimizer(Lion, lr=0.001),
}


def both(name: str, batches: Any, *, backend: str = "eager", **more: Any) -> tuple[Any, Any, Any]:
    """What the compiled step and the step itself make of the batches, from the same start, and the compiled step."""
    ends: list[Any] = []
    steps: list[Any] = []
    for wrap in (lambda step: compiled(step, backend=backend), lambda step: step):
        model = make_model(name)
        steps.append(wrap(make_step(model, 2, more["rule"]) if "rule" in more else make_step(model, 2)))
        state = init(steps[-1], model, seed=3, loss_scale=more.get("loss_scale"))
        ends.append(events_of(steps[-1], state, batches, until=more.get("until"), donate=more.get("donate", True)))
    return ends[0], ends[1], steps[0]


@pytest.mark.parametrize("rule", RULES)
def test_a_hundred_updates_are_the_same_by_every_elementwise_optimizer(rule: str) -> None:
    """Lion's step looks at values on the host: it runs as it is, behind a compiled backward pass, and says so."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", EagerPartWarning)
        (state, _), (expected, _), step = both(
            "mlp", make_batches(10, size=8), until=MicroBatches(200), rule=RULES[rule]
        )
    assert expected.progress.updates == 100
    assert_records_equal(state.params, expected.params, rtol=1e-5)
    assert [*step.eager] == [str(warning.message).split()[0] for warning in said]
    assert ("MaybeStep" in step.eager) == (rule == "Lion")


@pytest.mark.parametrize("scale", [None, SCALE], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("name", TRACEABLE)
def test_a_hundred_updates_are_the_same(name: str, scale: LossScale | None) -> None:
    (state, events), (expected, told), step = both(
        name, make_batches(10, size=8), loss_scale=scale, until=MicroBatches(200)
    )
    assert expected.progress.updates == 100
    assert_records_equal(state, expected, rtol=1e-5)
    assert [type(event) for event in events] == [type(event) for event in told]
    assert [len(graph.parts) for graph in step.graphs] == [3, 2]
    assert step.eager == {}


def test_inductor_makes_the_same_of_it_with_dropout_and_batchnorm_under_a_loss_scale() -> None:
    def trained(*, is_compiled: bool) -> TrainState:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Sequential(
                nn.Linear(IN, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)
            )
        step: Transform = chain(
            Forward(model, supervised(F.cross_entropy)),
            ScaledBackward(),
            Accumulate(every=2),
            ClipByGlobalNorm(0.5),
            MaybeStep(Optimizer(torch.optim.AdamW, lr=lambda count: 0.01 / (1 + count / 10))),
            EmitEvents(),
        )
        if is_compiled:
            step = compiled(step)
        state = init(step, model, loss_scale=SCALE)
        return events_of(step, state, make_batches(10, size=8), until=MicroBatches(200))[0]

    assert_records_equal(trained(is_compiled=True), trained(is_compiled=False), rtol=1e-5)


def test_in_place_and_copying_are_the_same() -> None:
    for name in ("batchnorm", "dropout", "tied"):
        ends = [both(name, make_batches(9), donate=donate)[0][0] for donate in (True, False)]
        assert_records_equal(ends[0], ends[1], what=name)


def test_bad_windows_change_nothing_and_are_told_of_in_the_same_words() -> None:
    batches = make_batches(24)
    for bad in (3, 8, 9, 17):
        batches[bad][0][0, 0] = float("nan")
    for scale in (None, SCALE):
        (state, events), (expected, told), _ = both("batchnorm", batches, loss_scale=scale)
        assert expected.progress.skipped == 3
        assert_records_equal(state, expected, rtol=1e-5)
        for one, other in zip(events, told, strict=True):
            assert type(one) is type(other)
            for field in ("reason", "micro_batch", "parameter", "in_row", "before", "after", "rates", "weight"):
                assert getattr(one, field, None) == getattr(other, field, None)


@pytest.mark.parametrize("cut", range(1, 9))
def test_either_way_goes_on_from_the_others_state(cut: int) -> None:
    batches, ends = make_batches(14), []
    for first, second in ((True, True), (True, False), (False, True), (False, False)):
        model = make_model("batchnorm")
        step = make_step(model, 3)
        graphs = compiled(step, backend="eager")
        state = init(step, model, loss_scale=SCALE)
        # A window that is open at the end of a stream is closed there: the first run is stopped in the middle of it.
        for now, _ in scan(graphs if first else step, state, batches):
            state = now
            if state.progress.micro_steps == cut:
                break
        ends.append(events_of(graphs if second else step, state.copy(), batches[cut:])[0])
    for end in ends:
        assert_records_equal(end, ends[-1], rtol=1e-5)


def test_going_on_after_an_interruption_gives_the_bits_of_the_run_without() -> None:
    batches = make_batches(12)

    def run(cut: int) -> TrainState:
        model = make_model("dropout")
        step = make_step(model, 3)
        state = init(step, model)
        first, rest = compiled(step, backend="eager"), compiled(step, backend="eager")
        for now, _ in scan(first, state, batches):
            state = now
            if state.progress.micro_steps == cut:
                break
        return state if cut == len(batches) else events_of(rest, state.copy(), batches[cut:])[0]

    whole = run(len(batches))
    for cut in (2, 4, 7):
        assert_records_equal(run(cut).params, whole.params)
