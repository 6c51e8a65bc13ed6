"""Metrics of other libraries as monitors."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import attrs

from pipeline._checks import function
from pipeline.errors import SettingError
from pipeline.events import Event
from pipeline.monitors._written import Written

__all__ = ["Metric"]

_LIBRARIES = ("numpy", "torch")

Changed = tuple[tuple[str, Any], ...]
"""The attributes of a metric that its updates have changed, as plain values."""


class _Stateful(Protocol):
    """What is asked of a metric."""

    def update(self, *args: Any) -> Any: ...

    def compute(self) -> Any: ...

    def reset(self) -> Any: ...


class _NotPlainError(Exception):
    """A value that cannot be written as a plain one."""


def _plain(value: Any) -> Any:
    """Numbers, strings and None as they are; containers and arrays of them as tuples that say what they were."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    kind, library = type(value), type(value).__module__.partition(".")[0]
    if library in _LIBRARIES and hasattr(value, "tolist") and hasattr(value, "dtype"):
        dtype = str(value.dtype).rpartition(".")[2]
        return "array", library, dtype, tuple(value.shape), _tuples(value.tolist())
    if kind in (list, tuple):
        return kind.__name__, tuple(_plain(item) for item in value)
    if kind is dict and all(isinstance(key, str) for key in value):
        return "dict", tuple((key, _plain(item)) for key, item in value.items())
    raise _NotPlainError


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in cast("list[Any]", value)) if isinstance(value, list) else value


def _restored(value: Any) -> Any:
    """What `_plain` was given."""
    if not isinstance(value, tuple):
        return value
    kind, *content = cast("tuple[Any, ...]", value)
    if kind == "array":
        library, dtype, shape, numbers = content
        module = importlib.import_module(library)
        return module.asarray(numbers, dtype=getattr(module, dtype)).reshape(tuple(shape))
    if kind == "dict":
        return {key: _restored(item) for key, item in content[0]}
    items = [_restored(item) for item in content[0]]
    return items if kind == "list" else tuple(items)


def _shown(value: Any) -> Any:
    """A result without arrays."""
    if isinstance(value, Mapping):
        return {key: _shown(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return tuple(_shown(item) for item in cast("Sequence[Any]", value))
    return _tuples(value.tolist()) if hasattr(value, "tolist") else value


def _state(metric: Any) -> dict[str, Any]:
    """The attributes of a metric as plain values, but for those that it declares to be no state of it."""
    state: dict[str, Any] = {}
    for name, value in vars(metric).items():
        try:
            state[name] = _plain(value)
        except _NotPlainError:
            if not hasattr(metric, "metric_state") or name in metric.metric_state:
                expected = "a metric that keeps numbers, strings, lists, tuples, dictionaries and arrays alone"
                got = f"{name} = {value!r}"
                raise SettingError("Metric.metric", expected, got, "Write its sums as a monitor.") from None
    return state


def _untouched(monitor: Metric) -> dict[str, Any]:
    """The state before the first update."""
    metric: Any = monitor.metric
    if isinstance(metric, type) or not all(hasattr(metric, n) for n in ("update", "compute", "reset", "__dict__")):
        raise SettingError("Metric.metric", "an object with `update`, `compute` and `reset`", metric)
    if any(m is not metric and hasattr(m, "compute") for m in getattr(metric, "modules", tuple[Any, ...])()):
        raise SettingError("Metric.metric", "one metric", metric, "Give each metric inside a Metric of its own.")
    fresh = copy.deepcopy(metric)
    fresh.reset()
    return _state(fresh)


@attrs.frozen(repr=False)
class Metric(Written):
    """A metric with `update`, `compute` and `reset`, as torchmetrics has them, as a monitor.

    The metric that is given is never updated. It is the pattern of a copy that is made for each event: put into the
    state that the accumulator holds, updated, and read out again. So it may serve in several runs, and is resumed,
    replayed and checkpointed as other monitors are.

    Reads:  what `feed(event)` reads.
    Result: what `compute()` gives, arrays as numbers; None before the first event that feeds it.
    Edges:  each such event costs a deep copy of the metric and of its state, about 1 ms for torchmetrics' MeanMetric,
            and in proportion to the state for metrics that keep all they see; `every` and `filter` make them fewer.
            Arrays must be on the CPU. Among several ranks `compute()` must not synchronise: `sync_on_compute=False`.
    Args:   metric: one metric, no collection or wrapper of others, whose state is in attributes that are numbers,
            strings, lists, tuples, dictionaries, or arrays of numpy or torch; feed: from an event to the arguments of
            `update`, a tuple, or to None.
    Raises: SettingError, when built for what is no such metric, or from a run once its state is no such value.
    """

    metric: _Stateful = attrs.field(eq=id)
    feed: Callable[[Any], tuple[Any, ...] | None]
    name: str = attrs.field(default=attrs.Factory(lambda monitor: type(monitor.metric).__name__, takes_self=True))
    _start: Mapping[str, Any] = attrs.field(init=False, eq=False, default=attrs.Factory(_untouched, takes_self=True))

    def __attrs_post_init__(self) -> None:
        function("Metric.feed", self.feed)

    def init(self) -> Changed | None:
        """None: nothing fed yet."""
        return None

    def reduce(self, accumulator: Changed | None, event: Event) -> Changed | None:
        """Update a copy, and keep what that changed."""
        fed = self.feed(event)
        if fed is None:
            return accumulator
        metric = self._copy(accumulator)
        metric.update(*fed)
        state = _state(metric)
        return tuple((k, value) for k, value in state.items() if k not in self._start or self._start[k] != value)

    def _copy(self, accumulator: Changed | None) -> _Stateful:
        metric = copy.deepcopy(self.metric)
        metric.reset()
        vars(metric).update({name: _restored(value) for name, value in accumulator or ()})
        return metric

    def result(self, accumulator: Changed | None) -> Any:
        """What a copy in that state computes."""
        return None if accumulator is None else _shown(self._copy(accumulator).compute())
