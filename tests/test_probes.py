"""What looks at a fold in between: when it is due, and that it leaves no trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from torch import nn
from torch.nn import functional as F

from pipeline import (
    Evaluation,
    EveryEpoch,
    EveryUpdates,
    Forward,
    Run,
    TrainState,
    Updates,
    chain,
    fold,
    init,
    monitors,
    scan,
    supervised,
)
from pipeline.errors import DuplicateNameError, MeasureError
from pipeline.evaluation import When
from pipeline.events import EpochEnded, EvalDone, Event, MemoryMeasured, RunEnded, UpdateDone
from pipeline.monitor import Monitor, Stop
from pipeline.probes import MemoryProbe, Probe, _resident
from pipeline.testing import assert_records_equal
from tests.cases.probe import Recorder, of
from tests.laws.cases import MODELS, make_batches, make_model, make_step


def run_with(
    probes: Sequence[Probe], *, model: nn.Module | None = None, watch: Sequence[Monitor] = (), **more: Any
) -> tuple[Run, list[Event]]:
    model, recorder = model or make_model("mlp"), Recorder()
    step = make_step(model, 2)
    state = init(step, model)
    run = fold(step, state, make_batches(6), evaluations=probes, sinks=[recorder], monitors=watch, **more)
    return run, recorder.events


@pytest.mark.parametrize("name", MODELS)
def test_a_memory_probe_changes_nothing_in_the_training(name: str) -> None:
    alone, _ = run_with([], model=make_model(name))
    watched, events = run_with([MemoryProbe(EveryUpdates(1))], model=make_model(name))
    assert_records_equal(watched.state, alone.state)
    assert len(of(MemoryMeasured, events)) == 3


def test_it_is_told_of_behind_its_update_and_before_the_end_of_its_epoch() -> None:
    probes = [MemoryProbe(EveryUpdates(2)), MemoryProbe(EveryEpoch(), name="memory of an epoch")]
    _, events = run_with(probes, until=Updates(5))
    kinds = (UpdateDone, MemoryMeasured, EpochEnded)
    assert [(type(e), e.update) for e in events if isinstance(e, kinds)] == [
        (UpdateDone, 1),
        (UpdateDone, 2),
        (MemoryMeasured, 2),
        (UpdateDone, 3),
        (MemoryMeasured, 3),
        (EpochEnded, 3),
        (UpdateDone, 4),
        (MemoryMeasured, 4),
        (UpdateDone, 5),
    ]


@attrs.frozen
class StopAtOnce:
    """Asks to stop as soon as it has seen an update."""

    name: str = "StopAtOnce"

    def init(self) -> bool:
        return False

    def reduce(self, accumulator: bool, event: Event) -> bool:
        return accumulator or isinstance(event, UpdateDone)

    def result(self, accumulator: bool) -> bool:
        return accumulator

    def signals(self, accumulator: bool) -> list[Stop]:
        return [Stop("seen")] if accumulator else []


def test_what_monitors_ask_for_comes_no_earlier_for_a_memory_probe() -> None:
    for probes in ([], [MemoryProbe(EveryUpdates(1))]):
        run, _ = run_with(probes, watch=[StopAtOnce()], publish_every=2)
        assert run.stopped_by == ("seen",)
        assert run.state.progress.updates == 2


@pytest.mark.parametrize("first", [True, False])
def test_a_measure_that_no_evaluation_reports_is_found_with_a_probe_among_them_too(first: bool) -> None:
    model = make_model("mlp")
    val = Evaluation(Forward(model, supervised(F.cross_entropy)), make_batches(2, 5))
    probes: list[Probe] = [MemoryProbe(EveryUpdates(1)), val] if first else [val, MemoryProbe(EveryEpoch())]
    with pytest.raises(MeasureError, match="'val_los'"):
        run_with(probes, model=model, watch=[monitors.EarlyStopping("val_los")])
    run, _ = run_with(probes, model=model, watch=[monitors.EarlyStopping("val_loss")])
    assert run.results["EarlyStopping"]["update"] == 3


def test_two_of_one_name_are_refused() -> None:
    with pytest.raises(DuplicateNameError, match="'memory'"):
        run_with([MemoryProbe(EveryUpdates(1)), MemoryProbe(EveryEpoch())])


@attrs.frozen
class Distance:
    """A probe of one's own: how far the parameters are from the origin."""

    when: When = attrs.field(factory=EveryEpoch)
    name: str = "distance"

    def run(self, state: TrainState, *, time: float = 0.0) -> EvalDone:
        squares = sum(float(p.detach().square().sum()) for p in state.params.values())
        p = state.progress
        at = {"micro_step": p.micro_steps, "update": p.updates, "epoch": p.epoch, "time": time}
        return EvalDone(**at, name=self.name, values={"distance": squares**0.5}, weight=1.0, batches=0)


def test_a_probe_of_ones_own_can_be_watched_like_an_evaluation() -> None:
    run, events = run_with([Distance()], watch=[monitors.EarlyStopping("distance")])
    (done,) = of(EvalDone, events)
    assert run.results["EarlyStopping"]["best"] == done.values["distance"] > 0
    assert type(events[-1]) is RunEnded


def test_a_scan_takes_probes_too() -> None:
    model = make_model("mlp")
    step = make_step(model, 1)
    items = scan(step, init(step, model), make_batches(4), evaluations=[MemoryProbe(EveryUpdates(2))])
    assert [e.update for _, events in items for e in of(MemoryMeasured, events)] == [2, 4]


def test_a_reading_tells_where_in_the_run_it_was_made_and_no_device_memory_on_the_cpu() -> None:
    state = init(chain(), make_model("mlp"))
    progress = attrs.evolve(state.progress, micro_steps=7, updates=3, epoch=1)
    told = MemoryProbe(EveryUpdates(1)).run(attrs.evolve(state, progress=progress), time=2.5)
    assert (told.micro_step, told.update, told.epoch, told.time) == (7, 3, 1, 2.5)
    assert (told.allocated_peak, told.reserved_peak) == (None, None)


def test_where_the_system_tells_nothing_there_is_no_value(tmp_path: Path) -> None:
    status = tmp_path / "status"
    assert _resident(status) == (None, None)
    status.write_text("Name:\tpython\nVmRSS:\t    12 kB\n")
    assert _resident(status) == (12 * 1024, None)
    status.write_text("VmHWM:\t 40 kB\nVmRSS:\t 12 kB\n")
    assert _resident(status) == (12 * 1024, 40 * 1024)
