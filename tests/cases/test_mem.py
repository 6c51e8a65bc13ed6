"""Memory: nothing of a step outlives it."""

import gc
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

from pipeline import (
    EmitEvents,
    Evaluation,
    EveryUpdates,
    Forward,
    Frame,
    Loss,
    MaybeStep,
    MeasureGradients,
    MeasureNoise,
    MeasureUpdates,
    Optimizer,
    Tensors,
    TrainState,
    Window,
    fold,
    init,
    monitors,
    scan,
)
from pipeline.events import Event, MemoryMeasured
from pipeline.probes import MemoryProbe
from pipeline.transform import Chain
from tests.cases.probe import Recorder, all_monitors, of, step_of

both_ways = pytest.mark.parametrize("donate", [True, False], ids=["donated", "copied"])


class Saved:
    """What a forward keeps for its backward: it lives exactly as long as the graph."""


class Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Saved) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.saved = saved
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0], None


@attrs.frozen
class KeepingLoss:
    """A loss whose every graph can be watched, and that lets whatever has a graph into all that it returns."""

    alive: list[weakref.ref[Saved]]

    def __call__(self, model: Any, batch: Tensor) -> Loss:
        saved = Saved()
        if torch.is_grad_enabled():
            self.alive.append(weakref.ref(saved))
        output = Keep.apply(model(batch), saved)
        assert isinstance(output, Tensor)
        value = output.pow(2).mean()
        return Loss.mean(value, len(batch), measures={"error": output.abs().mean()}, output=output)


def setting(every: int) -> tuple[nn.Module, Chain, KeepingLoss]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    loss = KeepingLoss([])
    step = step_of(model, loss, Optimizer(torch.optim.AdamW, lr=0.01), every=every, max_norm=1.0, micro_batches=True)
    return model, step, loss


BATCH = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


def with_a_graph() -> int:
    """How many tensors alive are the result of a differentiable operation."""
    return sum(issubclass(type(o), Tensor) and o.grad_fn is not None for o in gc.get_objects())


@pytest.fixture(autouse=True)
def fresh_objects_alone() -> Iterator[None]:
    """What was there before is frozen: `gc` tells of what a test has made, and quickly."""
    # The first optimizer of a process imports torch's compiler, which leaves the frames that are at work in a cycle.
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def by_counting_alone() -> Iterator[None]:
    """Without the collector: what is left behind in a cycle counts as left behind."""
    gc.disable()
    yield
    gc.enable()


@both_ways
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.usefixtures("by_counting_alone")
def test_mem_1_no_graph_outlives_its_micro_batch_in_a_fold(donate: bool, every: int) -> None:
    model, step, loss = setting(every)
    counts: list[int] = []
    alive: list[int] = []

    def stream() -> Iterator[Tensor]:
        for _ in range(50 * every):
            yield BATCH
            counts.append(with_a_graph())
            alive.append(sum(ref() is not None for ref in loss.alive))

    run = fold(
        step,
        init(step, model),
        stream(),
        donate=donate,
        monitors=all_monitors(),
        sinks=[Recorder()],  # one that keeps all events
        evaluations=[Evaluation(Forward(model, loss), [BATCH], EveryUpdates(7))],
    )
    assert run.state.progress.updates == 50
    assert len(loss.alive) == 50 * every
    assert alive == [0] * (50 * every)
    assert set(counts[1:]) == {counts[0]}


@both_ways
@pytest.mark.usefixtures("by_counting_alone")
def test_mem_1_no_graph_outlives_its_micro_batch_in_a_scan_whose_events_are_all_kept(donate: bool) -> None:
    model, step, loss = setting(2)
    before = with_a_graph()
    kept: list[Event] = []
    for _, events in scan(step, init(step, model), [BATCH] * 20, donate=donate):
        kept.extend(events)
        assert [ref for ref in loss.alive if ref() is not None] == []
        assert with_a_graph() == before
    assert len(loss.alive) == 20


def tensors_in(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from tensors_in(entry)
    elif isinstance(value, tuple):
        for entry in value:
            yield from tensors_in(entry)


def tensors_of(event: Event) -> list[Tensor]:
    return [t for name in attrs.fields_dict(type(event)) for t in tensors_in(getattr(event, name))]


def check_no_graph(step: Chain, model: nn.Module, batches: list[Any], donate: bool) -> None:
    seen = 0
    for state, events in scan(step, init(step, model), batches, donate=donate):
        for event in events:
            for tensor in tensors_of(event):
                seen += 1
                assert not tensor.requires_grad, event
        for value in (state.window.loss, state.window.weight, state.window.reference):
            assert not isinstance(value, Tensor) or not value.requires_grad
        assert not any(t.requires_grad for t in tensors_in(state.window.measures))
        assert not any(t.requires_grad for t in state.window.grads.values())
    assert seen


@both_ways
@pytest.mark.parametrize("every", [1, 2])
def test_mem_1_no_value_in_an_event_or_a_window_requires_grad(donate: bool, every: int) -> None:
    model, step, _ = setting(every)
    check_no_graph(step, model, [BATCH] * 6, donate)


@both_ways
def test_mem_1_nor_does_a_fact_that_a_transform_of_the_users_own_took_from_the_graph(donate: bool) -> None:
    def note(frame: Frame) -> Frame:
        assert frame.loss is not None
        return frame.having(facts={**frame.facts, "twice": frame.loss * 2})

    model, step, loss = setting(1)
    step = step.insert_before("EmitEvents", note)
    check_no_graph(step, model, [BATCH] * 6, donate)
    assert all(ref() is None for ref in loss.alive)


@both_ways
def test_mem_1_nor_does_a_weight_that_comes_out_of_the_model(donate: bool) -> None:
    def loss(model: Any, batch: Tensor) -> Loss:
        output = model(batch)
        return Loss.mean(output.pow(2).mean(), output.sigmoid().sum())

    model = nn.Linear(3, 1)
    step = step_of(model, loss, Optimizer(torch.optim.SGD, lr=0.1), every=2, micro_batches=True)
    check_no_graph(step, model, [BATCH] * 6, donate)


@pytest.mark.parametrize("clipped", [False, True])
def test_mem_1_a_fact_of_the_users_own_reaches_the_event(clipped: bool) -> None:
    # What is dropped cannot leak: this keeps the test of facts above from passing for the wrong reason.
    def note(frame: Frame) -> Frame:
        return frame.having(facts={**frame.facts, "mine": 3.0})

    model = nn.Linear(3, 1)
    step = step_of(model, lambda m, b: m(b).mean(), Optimizer(torch.optim.SGD, lr=0.1), max_norm=1.0)
    step = (step if clipped else step.without("ClipByGlobalNorm")).insert_before("EmitEvents", note)
    assert [type(t).__name__ for t in step.transforms][-3:] == [MaybeStep.__name__, "function", EmitEvents.__name__]
    found = [event for _, events in scan(step, init(step, model), [BATCH]) for event in events]
    assert [dict(getattr(event, "facts", {})).get("mine") for event in found].count(3.0) == 1


RECORDS: tuple[type, ...] = (TrainState, Frame, Window, Tensors, Event)


def records_alive() -> Counter[str]:
    """How many records of each kind are alive, and how many tensors with and without a graph."""
    gc.collect()
    found: Counter[str] = Counter()
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, RECORDS):
            found[next(base for base in RECORDS if issubclass(kind, base)).__name__] += 1
        elif issubclass(kind, Tensor):
            found["tensor with a graph" if thing.grad_fn is not None else "tensor"] += 1
        elif issubclass(kind, torch.optim.Optimizer):
            found["optimizer"] += 1
    return found


@pytest.mark.parametrize("way", ["fold", "scan"])
@pytest.mark.parametrize(("donate", "steps"), [(True, 2000), (False, 200)], ids=["donated", "copied"])
def test_mem_1_a_long_run_holds_no_record_of_an_earlier_step(way: str, donate: bool, steps: int) -> None:
    model, step, loss = setting(2)
    before = records_alive()
    looks: list[Counter[str]] = []

    def stream() -> Iterator[Tensor]:
        for n in range(steps):
            yield BATCH
            if n % (steps // 5) == steps // 5 - 1:  # always at the same place in a window and between publications
                looks.append(records_alive() - before)

    if way == "fold":
        run = fold(step, init(step, model), stream(), donate=donate, monitors=all_monitors_of_training())
        state = run.state
        del run
    else:
        state = after = init(step, model)
        for after, _ in scan(step, state, stream(), donate=donate):
            state = after
        del after
    loss.alive.clear()
    assert state.progress.micro_steps == steps
    assert len(looks) == 5
    assert looks[1:] == [looks[1]] * 4
    assert looks[1]["tensor with a graph"] == 0
    assert looks[1]["Event"] <= 30  # those not yet published: of at most ten windows
    left = records_alive() - before
    assert (left["TrainState"], left["Window"], left["Frame"], left["optimizer"]) == (1, 1, 0, 1)
    assert left["tensor with a graph"] == 0
    assert left["Event"] <= (way == "scan")  # the last ones, in the loop variable of the scan
    assert left["Tensors"] <= 4  # params, buffers, the window's, and the optimizer's


def all_monitors_of_training() -> list:
    return [monitor for monitor in all_monitors() if not hasattr(monitor, "watches")]


@both_ways
def test_mem_1_twenty_monitors_and_every_measure_hold_no_more_after_200_updates_than_after_40(donate: bool) -> None:
    model, step, loss = setting(1)
    step = step.insert_before("Accumulate", MeasureNoise()).insert_after("Accumulate", MeasureGradients(every=5))
    step = step.replace("MaybeStep", MeasureUpdates(step["MaybeStep"], every=5))
    kinds = (monitors.MeanLoss, monitors.GradNorm, monitors.LearningRate, monitors.Throughput)
    before = records_alive()
    looks: list[Counter[str]] = []

    def stream() -> Iterator[Tensor]:
        for n in range(200):
            yield BATCH
            if n % 40 == 39:
                looks.append(records_alive() - before)

    watching = [kind(name=f"{kind.__name__} {i}") for kind in kinds for i in range(5)]
    probe = MemoryProbe(EveryUpdates(4))
    run = fold(step, init(step, model), stream(), donate=donate, monitors=watching, evaluations=[probe])
    assert len(run.results) == 20
    assert len(looks) == 5
    assert looks == [looks[0]] * 5
    assert looks[0]["tensor with a graph"] == 0
    assert not any(ref() for ref in loss.alive)


EXTRA = 256 * 2**20
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def heavy_at_the_third(device: str) -> list[MemoryMeasured]:
    """What a probe tells of each of five updates, the third of which holds much more within its step."""

    def loss(model: Any, batch: Tensor) -> Tensor:
        held = torch.ones(EXTRA // 4 if bool(batch.isnan().any()) else 1, device=device)
        return (model(batch.nan_to_num()) * held[0]).mean()

    model, recorder = nn.Linear(3, 1).to(device), Recorder()
    step = step_of(model, loss, Optimizer(torch.optim.SGD, lr=0.1))
    batches = [(BATCH * float("nan") if i == 2 else BATCH).to(device) for i in range(5)]
    fold(step, init(step, model), batches, sinks=[recorder], evaluations=[MemoryProbe(EveryUpdates(1))])
    told = of(MemoryMeasured, recorder.events)
    assert [event.update for event in told] == [1, 2, 3, 4, 5]
    return told


@pytest.mark.parametrize("device", DEVICES)
def test_mem_5_the_peak_of_an_update_is_told_and_is_gone_in_the_next(device: str) -> None:
    told = heavy_at_the_third(device)
    if device == "cpu":
        assert {(event.allocated_peak, event.reserved_peak) for event in told} == {(None, None)}
        return
    allocated = [event.allocated_peak or 0 for event in told]
    assert allocated[2] - allocated[1] >= EXTRA
    assert all(abs(peak - allocated[1]) < EXTRA // 100 for peak in allocated[3:])  # but for events not yet published
    assert all((event.reserved_peak or 0) >= (event.allocated_peak or 0) for event in told)


def test_mem_5_the_process_tells_its_trough_and_its_peak_apart() -> None:
    told = heavy_at_the_third("cpu")
    if not Path("/proc/self/status").exists():
        assert {(event.resident, event.resident_peak) for event in told} == {(None, None)}
        return
    now = [event.resident or 0 for event in told]
    most = [event.resident_peak or 0 for event in told]
    assert most[2] - now[1] > 0.9 * EXTRA  # pages are counted in batches
    assert now[2] - now[1] < 0.1 * EXTRA
    assert most == sorted(most)
