"""Live and over the recorded events every monitor gives the same, to the bit."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipeline import (
    Accumulate,
    ClipByGlobalNorm,
    EmitEvents,
    Epochs,
    Evaluation,
    EveryUpdates,
    Forward,
    LossScale,
    MaybeStep,
    MeasureGradients,
    MeasureNoise,
    MeasureUpdates,
    Optimizer,
    ScaledBackward,
    Updates,
    chain,
    fold,
    init,
    replay,
    supervised,
)
from pipeline.events import UpdateDone
from pipeline.probes import MemoryProbe
from tests.cases.probe import Recorder
from tests.monitors.cases import ALL

NEVER_STOPS = [monitor for monitor in ALL if "EarlyStopping" not in repr(monitor)]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[Any], int]:
    """The results of a run with every monitor, and its events."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    accuracy = {"accuracy": lambda output, y: (output.argmax(1) == y).float().mean()}
    forward = Forward(model, supervised(F.cross_entropy, measures=accuracy))
    step = chain(
        forward,
        ScaledBackward(),
        MeasureNoise(),
        Accumulate(2),
        MeasureGradients(every=2),
        ClipByGlobalNorm(0.1),
        MeasureUpdates(MaybeStep(Optimizer(torch.optim.AdamW, lr=0.05)), depth=1),
        EmitEvents(micro_batches=True),
    )
    batches: list[Any] = [(torch.randn(n, 3), torch.randint(2, (n,))) for n in (6, 6, 6, 6, 2)]
    batches[2] = (batches[2][0] * float("nan"), batches[2][1])  # a window of each epoch is skipped
    ticks, recorder = iter(range(10_000)), Recorder()
    run = fold(
        step,
        init(step, model, loss_scale=LossScale(8.0, interval=3)),
        [*batches, None],
        until=Epochs(4) | Updates(50),
        evaluations=[Evaluation(forward, batches[:2]), MemoryProbe(EveryUpdates(2))],
        monitors=NEVER_STOPS,
        sinks=[recorder],
        publish_every=3,
        store=tmp_path_factory.mktemp("store"),
        clock=lambda: next(ticks) / 7,
    )
    return dict(run.results), recorder.events, run.state.progress.updates


@pytest.mark.parametrize("monitor", NEVER_STOPS, ids=lambda m: m.name)
def test_replayed_is_what_it_was_live(monitor: Any, recorded: tuple[dict[str, Any], list[Any], int]) -> None:
    results, events, _ = recorded
    assert repr(replay(events, [monitor])[monitor.name]) == repr(results[monitor.name])


def test_the_run_has_something_to_tell(recorded: tuple[dict[str, Any], list[Any], int]) -> None:
    results, events, updates = recorded
    assert updates == 8
    assert {name for name, result in results.items() if result is None} == {"filter"}  # there is no generator
    assert results["Skips"]["count"] == 4
    assert results["SaveEvery"] == 8
    assert results["LossScaleHistory"]["changes"] > 0
    assert set(results["UpdateRatios"]) == {"0", "1", "3"}
    assert set(results["LayerGradNorms"]) >= {"0.weight", "3.bias"}
    assert all(isinstance(event.loss, float) for event in events if isinstance(event, UpdateDone))


def test_results_are_plain_values_that_a_report_can_hold(recorded: tuple[dict[str, Any], list[Any], int]) -> None:
    json.dumps(recorded[0])


def test_events_straight_from_the_step_give_the_same(recorded: tuple[dict[str, Any], list[Any], int]) -> None:
    # In a hand-written loop what is measured is still in 0-d tensors.
    results, events, _ = recorded

    def on_device(event: Any) -> Any:
        if not isinstance(event, UpdateDone):
            return event
        facts = {name: torch.tensor(value) for name, value in event.facts.items()}
        measures = {name: tuple(map(torch.tensor, pair)) for name, pair in event.measures.items()}
        others = {name: torch.tensor(getattr(event, name)) for name in ("loss", "weight", "grad_norm", "clip_factor")}
        return attrs.evolve(event, facts=facts, measures=measures, **others)

    raw = list(map(on_device, events))
    assert repr(replay(raw, NEVER_STOPS)) == repr({m.name: results[m.name] for m in NEVER_STOPS})
