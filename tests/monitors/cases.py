"""What the laws of monitors run over: one list that every public monitor and combinator is on, and logs of all events.

No torch here: a test reads this in an interpreter without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import attrs
from hypothesis import strategies as st

from pipeline import monitors
from pipeline.events import (
    BatchSkipped,
    CheckpointSaved,
    Diagnosis,
    EpochEnded,
    EpochStarted,
    EvalDone,
    Event,
    LossScaleChanged,
    MemoryMeasured,
    MicroBatchDone,
    Rewound,
    RunEnded,
    RunStarted,
    UpdateDone,
    UpdateSkipped,
)


class Total:
    """A metric of the protocol `update`, `compute`, `reset`, that keeps a sum, and the values by their sign."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.sum, self.by_sign = 0.0, dict[str, list[float]]()

    def update(self, value: float) -> None:
        self.sum += value
        self.by_sign.setdefault("+" if value >= 0 else "-", []).append(value)

    def compute(self) -> tuple[float, int]:
        return self.sum, len(self.by_sign)


def fed(event: Event) -> tuple[float] | None:
    """What `Total` is fed."""
    return (float(event.grad_norm),) if isinstance(event, UpdateDone) else None


def of_generator(event: Event) -> bool:
    return getattr(event, "part", None) == "generator"


def in_bits(event: Event) -> Event:
    return attrs.evolve(event, loss=float(event.loss) / math.log(2)) if isinstance(event, UpdateDone) else event


def counted(count: int, event: Event) -> int:
    return count + isinstance(event, UpdateDone)


def or_none(count: int) -> int | None:
    return count or None


def total(a: int, b: int) -> int:
    return a + b


CASES: dict[str, list[Any]] = {
    "Best": [monitors.Best("val_loss"), monitors.Best("accuracy", mode="max", of="updates")],
    "ClipShare": [monitors.ClipShare()],
    "EarlyStopping": [monitors.EarlyStopping("val_loss", patience=2, min_updates=3, min_seconds=20.0)],
    "ExponentialMean": [monitors.ExponentialMean(decay=0.5), monitors.ExponentialMean("accuracy", decay=1)],
    "GradNoiseScale": [monitors.GradNoiseScale(decay=0.5)],
    "GradNorm": [monitors.GradNorm()],
    "LayerGradNorms": [monitors.LayerGradNorms(), monitors.LayerGradNorms(0.5, 2.0, "absolute", name="absolute")],
    "LearningRate": [monitors.LearningRate()],
    "LearningRates": [monitors.LearningRates()],
    "LossScaleHistory": [monitors.LossScaleHistory(keep=2)],
    "Mean": [monitors.Mean("accuracy")],
    "MeanLoss": [monitors.MeanLoss()],
    "Memory": [monitors.Memory()],
    "Metric": [monitors.Metric(Total(), fed)],
    "ParamNorm": [monitors.ParamNorm()],
    "Plateau": [monitors.Plateau("val_loss", patience=1, cooldown=1, warmup=2)],
    "Quantiles": [monitors.Quantiles(), monitors.Quantiles("grad_norm", at=(0.5,), error=0.1)],
    "SaveBest": [monitors.SaveBest("val_loss")],
    "SaveEvery": [monitors.SaveEvery(updates=2), monitors.SaveEvery(minutes=0.2, name="by the clock")],
    "Skips": [monitors.Skips()],
    "Throughput": [monitors.Throughput()],
    "TimeLeft": [monitors.TimeLeft()],
    "UpdateNorm": [monitors.UpdateNorm()],
    "UpdateRatios": [monitors.UpdateRatios()],
    "combine": [
        monitors.combine(monitors.MeanLoss(), norm=monitors.GradNorm()),
        monitors.combine(monitors.TimeLeft(), monitors.EarlyStopping("val_loss"), name="unmerged"),
    ],
    "every": [monitors.every(monitors.Throughput(), 2, name="every")],
    "filter": [
        monitors.filter(monitors.MeanLoss(), of_generator, name="filter"),
        monitors.filter(monitors.EarlyStopping("val_loss"), lambda event: event.epoch > 0, name="later"),
    ],
    "map": [monitors.map(monitors.Skips(), lambda skips: skips["count"], name="map")],
    "monitor": [
        monitors.monitor("Updates", int, counted, or_none, merge=total),
        monitors.monitor("Updates apart", int, counted, or_none),
    ],
    "per_epoch": [
        monitors.per_epoch(monitors.MeanLoss(), name="per_epoch"),
        monitors.per_epoch(monitors.Throughput(), 2, name="last epochs"),
        monitors.per_epoch(monitors.Plateau("val_loss", patience=0), name="Plateau anew"),
    ],
    "premap": [monitors.premap(monitors.MeanLoss(), in_bits, name="premap")],
    "window": [
        monitors.window(monitors.MeanLoss(), 3, name="window"),
        monitors.window(monitors.Throughput(), 4, name="speed now"),
        monitors.window(monitors.combine(monitors.Skips(), monitors.Quantiles()), 2, name="skips now"),
    ],
}
"""One instance or more by the public name that makes it."""

ALL: list[Any] = [monitor for made in CASES.values() for monitor in made]


def reduced(monitor: Any, events: Iterable[Event], accumulator: Any = None) -> Any:
    """The accumulator over these events."""
    accumulator = monitor.init() if accumulator is None else accumulator
    for event in events:
        accumulator = monitor.reduce(accumulator, event)
    return accumulator


def update(n: int = 1, **more: Any) -> UpdateDone:
    """Update number `n`, n seconds in, with a loss of 1 over one item but for what is given."""
    at: dict[str, Any] = {"micro_step": n, "update": n, "epoch": 0, "time": float(n)}
    given = {"loss": 1.0, "weight": 1.0, "grad_norm": 1.0, "micro_batches": 1, "rates": {"default": 0.1}}
    return UpdateDone(**{**at, **given, **more})


def skip(n: int = 1, **more: Any) -> UpdateSkipped:
    """A window without an update, after update number `n`."""
    at: dict[str, Any] = {"micro_step": n, "update": n, "epoch": 0, "time": float(n)}
    given = {"reason": "x", "skipped": 1, "in_row": 1, "loss": 1.0, "grad_norm": math.inf, "micro_batches": 1}
    return UpdateSkipped(**{**at, **given, **more})


def start(time: float = 0.0, total_updates: int | None = None, n: int = 0) -> RunStarted:
    """The start of a run after update number `n`."""
    return RunStarted(
        micro_step=n, update=n, epoch=0, time=time, until=f"Updates({total_updates})", total_updates=total_updates
    )


def evaluation(value: float, n: int = 1, measure: str = "val_loss", **more: Any) -> EvalDone:
    """An evaluation after update number `n`, n seconds in."""
    at: dict[str, Any] = {"micro_step": n, "update": n, "epoch": 0, "time": float(n), **more}
    return EvalDone(**at, name="val", values={measure: value}, weight=1.0, batches=1)


numbers = st.floats(-1e3, 1e3) | st.sampled_from([math.nan, math.inf, 0.0])
norms = st.floats(0, 1e3) | st.sampled_from([math.nan, math.inf])
parts = st.sampled_from([None, "generator", "critic"])
scales = st.sampled_from([None, 2.0, 4.0])
sizes = st.none() | st.integers(0, 2**40)


@attrs.frozen(kw_only=True, slots=False)
class Custom(Event):
    """An event of a user's own."""

    answer: int


def _window(draw: st.DrawFn, at: dict[str, Any]) -> UpdateDone:
    weight, micro_batches = draw(st.integers(0, 50)), draw(st.integers(1, 3))
    measures = {"accuracy": (draw(st.floats(0, 1)) * weight, weight)} if draw(st.booleans()) else {}
    if draw(st.booleans()):
        measures["micro_grad_square"] = (draw(norms) * micro_batches, micro_batches)
    layers = draw(st.lists(st.sampled_from(["first", "second", "head"]), unique=True))
    kinds = draw(st.lists(st.sampled_from(["grad_norm", "param_norm", "update_norm"]), unique=True))
    return UpdateDone(
        **at,
        loss=draw(numbers),
        weight=weight,
        micro_batches=micro_batches,
        rates={group: draw(st.floats(0, 1)) for group in draw(st.sampled_from([("default",), ("default", "head")]))},
        grad_norm=draw(norms),
        clip_factor=draw(st.floats(0.1, 1)),
        samples=at["update"] * 3,
        tokens=at["update"] * 7,
        measures=measures,
        facts={f"{kind}/{layer}": draw(norms) for kind in kinds for layer in layers},
        loss_scale=draw(scales),
        waited=draw(st.floats(0, 1)),
        part=draw(parts),
    )


@st.composite
def logs(draw: st.DrawFn) -> list[Event]:
    """Events of all kinds, those of users among them, in any order; counts and time never go back."""
    events: list[Event] = []
    time, micro_step, updates, epoch = 0.0, 0, 0, 0
    for kind in draw(st.lists(st.sampled_from(KINDS), max_size=30)):
        time += draw(st.floats(0, 10))
        micro_step += kind is MicroBatchDone
        updates += kind is UpdateDone
        epoch += kind is EpochEnded
        at: dict[str, Any] = {"micro_step": micro_step, "update": updates, "epoch": epoch, "time": time}
        if kind is UpdateDone:
            events.append(_window(draw, at))
        elif kind is UpdateSkipped:
            where: dict[str, Any] = {"micro_batch": draw(st.sampled_from([None, 0])), "part": draw(parts)}
            where |= {"parameter": draw(st.sampled_from([None, "0.weight"])), "loss_scale": draw(scales)}
            more = {"reason": draw(st.sampled_from("xy")), "skipped": 1, "in_row": 1, "micro_batches": 1}
            events.append(UpdateSkipped(**at, **where, **more, loss=0.0, grad_norm=math.inf))
        elif kind is EvalDone:
            values = {"val_loss": draw(numbers)} if draw(st.booleans()) else {"val_other": 1.0}
            events.append(EvalDone(**at, name="val", values=values, weight=3.0, batches=1))
        elif kind is RunStarted:
            events.append(RunStarted(**at, until="", total_updates=draw(st.none() | st.integers(0, 50))))
        elif kind is MicroBatchDone:
            events.append(MicroBatchDone(**at, loss=draw(numbers), weight=1.0, samples=1, part=draw(parts)))
        elif kind is LossScaleChanged:
            events.append(LossScaleChanged(**at, before=2.0, after=draw(st.sampled_from([1.0, 4.0])), part=draw(parts)))
        elif kind is MemoryMeasured:
            fields = ("allocated_peak", "reserved_peak", "resident", "resident_peak")
            events.append(MemoryMeasured(**at, **{field: draw(sizes) for field in fields}))
        else:
            events.append(kind(**at, **OTHERS[kind]))
    return events


OTHERS: dict[type[Event], dict[str, Any]] = {
    BatchSkipped: {},
    CheckpointSaved: {"path": "x", "reasons": ("asked",)},
    Custom: {"answer": 42},
    Diagnosis: {"finding": "x", "cure": "y"},
    EpochEnded: {"batches": 3},
    EpochStarted: {},
    Rewound: {"path": "x", "reasons": ("asked",)},
    RunEnded: {"reasons": ("x",)},
}

KINDS: list[type[Event]] = [
    *[UpdateDone] * 6,  # what most monitors read comes most often
    *[EvalDone, RunStarted, UpdateSkipped, EpochEnded] * 2,
    LossScaleChanged,
    MemoryMeasured,
    MicroBatchDone,
    *OTHERS,
]
