"""What the cases share: one parameter whose value tells how the items were weighed, a sink that keeps the events,
and a state as comparable bits.

The probe is one parameter `w` that starts at 0, with loss (w - y)² / 2 for an item of target y, the mean over the
counted items of a micro-batch, and plain SGD at rate 1. The gradient at 0 is -mean(y), so that `w` after one update
is the mean target of the window.
"""

from collections.abc import Iterable
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor, nn

from pipeline import (
    Accumulate,
    ClipByGlobalNorm,
    EmitEvents,
    Forward,
    Loss,
    MaybeStep,
    Optimizer,
    ScaledBackward,
    Tensors,
    TrainState,
    chain,
    monitors,
)
from pipeline.events import Event
from pipeline.monitor import Monitor
from pipeline.transform import Chain
from tests.monitors.cases import Total, fed

E = TypeVar("E", bound=Event)

MASKED_TARGET = 1000.0
"""The target of items that are not counted: one of them let in is seen at once."""


class Probe(nn.Module):
    """One parameter, `w`, of shape [1]."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self) -> Tensor:
        return self.w


@attrs.frozen(eq=False)
class Items:
    """A micro-batch: targets, and which of them count."""

    y: Tensor
    counted: Tensor


def items(*targets: float, masked: int = 0) -> Items:
    """A micro-batch of these targets, then `masked` items that do not count."""
    y = torch.tensor([*targets, *[MASKED_TARGET] * masked])
    return Items(y, torch.arange(len(y)) < len(targets))


def summed(model: Any, batch: Items) -> Loss:
    """The probe's loss as a sum, with its count on the host."""
    each = (model() - batch.y.to(model().dtype)) ** 2 / 2
    return Loss.sum(each[batch.counted].sum(), int(batch.counted.sum()))


def summed_on_device(model: Any, batch: Items) -> Loss:
    """The probe's loss as a sum, with its count in a tensor."""
    each = (model() - batch.y) ** 2 / 2
    return Loss.sum((each * batch.counted).sum(), batch.counted.sum())


def averaged(model: Any, batch: Items) -> Loss:
    """The probe's loss as a mean over its counted items, NaN where there are none."""
    each = (model() - batch.y) ** 2 / 2
    return Loss.mean(each[batch.counted].mean(), int(batch.counted.sum()))


def probe_step(
    model: nn.Module, *, every: int = 1, lr: float = 1.0, loss: Any = summed, micro_batches: bool = False
) -> Chain:
    """The probe's step: plain SGD, nothing clipped."""
    return chain(
        Forward(model, loss),
        ScaledBackward(),
        Accumulate(every=every),
        MaybeStep(Optimizer(torch.optim.SGD, lr=lr)),
        EmitEvents(micro_batches=micro_batches),
    )


def step_of(
    model: nn.Module,
    loss: Any,
    optimizer: Optimizer,
    *,
    every: int = 1,
    max_norm: float | None = None,
    micro_batches: bool = False,
) -> Chain:
    """The usual step for any model."""
    clip = () if max_norm is None else (ClipByGlobalNorm(max_norm),)
    return chain(
        Forward(model, loss),
        ScaledBackward(),
        Accumulate(every=every),
        *clip,
        MaybeStep(optimizer),
        EmitEvents(micro_batches=micro_batches),
    )


def all_monitors() -> list[Monitor]:
    """One of each monitor that needs no store, those with settings watching `val_loss` or the measure `error`."""
    settings: dict[str, tuple[Any, ...]] = {
        "Best": ("val_loss",),
        "EarlyStopping": ("val_loss", 1000),
        "Mean": ("error",),
        "Metric": (Total(), fed),
        "Plateau": ("val_loss",),
    }
    kinds = {name: kind for name in monitors.__all__ if isinstance(kind := getattr(monitors, name), type)}
    return [kind(*settings.get(name, ())) for name, kind in kinds.items() if not hasattr(kind, "needs_store")]


class Recorder:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = False

    def write(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed = True


def of(kind: type[E], events: Iterable[Event]) -> list[E]:
    """Those events that are of this class, in order."""
    return [event for event in events if isinstance(event, kind)]


def _bits(value: Any) -> Any:
    if isinstance(value, Tensor):
        flat = value.detach().contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()
    return value


def _entries(kind: str, tensors: Tensors) -> dict[str, Any]:
    return {f"{kind} {name}": _bits(tensor) for name, tensor in tensors.items()}


def bits(state: TrainState) -> dict[str, Any]:
    """All that a state holds, tensors as their bytes: equal exactly where the states are bitwise equal."""
    window = state.window
    return {
        **_entries("param", state.params),
        **_entries("buffer", state.buffers),
        **_entries("optimizer", state.optimizer.tensors),
        **_entries("sum", window.grads),
        **{f"optimizer number {name}": value for name, value in state.optimizer.numbers.items()},
        "window": [_bits(x) for x in (window.weight, window.reference, window.loss, window.micro_batches)],
        "measures": {name: (_bits(a), _bits(b)) for name, (a, b) in window.measures.items()},
        "loss_scale": state.loss_scale,
        "progress": state.progress,
        "rng": state.rng,
        "slots": dict(state.slots),
    }
