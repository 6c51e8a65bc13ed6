"""Evaluation as another fold: its own step over its own stream, without a trace in the training."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor, nn

from pipeline._checks import whole
from pipeline._models import models_in
from pipeline._publication import to_host
from pipeline._randomness import default_generators, isolated, seed
from pipeline.errors import MissingFieldError, SettingError, StreamError
from pipeline.events import EvalDone
from pipeline.records import Frame, Progress, Scalar, TrainState
from pipeline.stream import is_read_once
from pipeline.transform import Transform, chain
from pipeline.transforms._gradients import widened
from pipeline.transforms.average import averaged

__all__ = ["Evaluation", "EveryEpoch", "EveryUpdates", "When"]

_PURPOSE = 2  # tells an evaluation's draws from those of the step and of the stream


class When(Protocol):
    """When an evaluation is due."""

    def due(self, before: Progress, after: Progress) -> bool:
        """Whether it falls between the two: before and after a micro-batch, or an epoch's end."""
        ...


def _at_least_one(instance: object, attribute: attrs.Attribute[int], value: int) -> None:
    whole(f"{type(instance).__name__}.{attribute.name}", value)


@attrs.frozen
class EveryEpoch:
    """At the end of every n-th epoch."""

    n: int = attrs.field(default=1, validator=_at_least_one)

    def due(self, before: Progress, after: Progress) -> bool:
        """Whether an n-th epoch has ended."""
        return after.epoch // self.n > before.epoch // self.n


@attrs.frozen
class EveryUpdates:
    """After every n-th update."""

    n: int = attrs.field(validator=_at_least_one)

    def due(self, before: Progress, after: Progress) -> bool:
        """Whether an n-th update has been made."""
        return after.updates // self.n > before.updates // self.n


@attrs.frozen
class Evaluation:
    """Means of the loss and the measures over another stream, with the parameters as they are.

    Runs without gradients and with the models that its transforms hold in eval mode (`training` is set on every module;
    `train()` and `eval()` are not called); afterwards the mode of every module and the random generators are as they
    were, and nothing of the training has moved.

    Args:   step: what fills a frame's `loss`, `weight` and `measures`, such as `Forward(model, loss)`; stream: batches
            that can be read again and again (no generator); when: `EveryEpoch()` or `EveryUpdates(n)`; name: the
            values are called `<name>_loss` and `<name>_<measure>`; average: the slot of an `AverageWeights`, whose
            weights then stand in for the parameters.
    Raises: SettingError, when built, for a generator; StreamError when the stream gives no batch.
    """

    step: Transform = attrs.field(converter=chain)
    stream: Iterable[Any]
    when: When = attrs.field(factory=EveryEpoch)
    name: str = "val"
    average: str | None = None

    def __attrs_post_init__(self) -> None:
        if is_read_once(self.stream):
            cure = "Give it a list, a DataLoader, or an object whose __iter__ starts anew."
            raise SettingError("Evaluation.stream", "readable more than once", self.stream, cure)

    def run(self, state: TrainState, *, time: float = 0.0) -> EvalDone:
        """One pass over the stream with the state's parameters and buffers; the state is left as it is."""
        state = state.borrowed() if self.average is None else averaged(state, self.average)
        progress, generators = state.progress, default_generators(state)
        sums: dict[str, tuple[Scalar, Scalar]] = {}
        batches = 0
        with isolated(generators), torch.no_grad(), _eval_mode(models_in(self.step)):
            seed(generators, state.rng.key(progress.updates, _PURPOSE))
            for batch in self.stream:
                if batch is None:
                    continue
                batches += 1
                frame = self.step(Frame(state, batch, time))
                if frame.loss is None:
                    raise MissingFieldError(f"Evaluation {self.name!r}", "loss", "put a Forward into its step")
                found = {"loss": (widened(frame.loss) * frame.weight, frame.weight), **frame.measures}
                if not isinstance(frame.weight, Tensor) and frame.weight == 0:
                    continue
                for name, pair in found.items():
                    total, weight = map(widened, pair)
                    before = sums.get(name)
                    sums[name] = (total, weight) if before is None else (before[0] + total, before[1] + weight)
        if not batches:
            raise StreamError(f"Evaluation {self.name!r} got no batches from its stream: give it at least one.")
        weight, values = self._means(sums)
        return EvalDone(
            micro_step=progress.micro_steps,
            update=progress.updates,
            epoch=progress.epoch,
            time=time,
            name=self.name,
            values=values,
            weight=weight,
            batches=batches,
        )

    def _means(self, sums: dict[str, tuple[Scalar, Scalar]]) -> tuple[float, dict[str, float]]:
        """The loss's weight and the means by full name, in one transfer; measures without weight have no value."""
        flat = [torch.as_tensor(x, dtype=torch.float64) for pair in sums.values() for x in pair]
        numbers = to_host(flat) if flat else []
        pairs = dict(zip(sums, zip(numbers[::2], numbers[1::2], strict=True), strict=True))
        values = {f"{self.name}_{name}": total / weight for name, (total, weight) in pairs.items() if weight}
        return pairs.get("loss", (0.0, 0.0))[1], values


@contextmanager
def _eval_mode(models: Iterable[nn.Module]) -> Generator[None]:
    modes = {module: module.training for model in models for module in model.modules()}
    try:
        for module in modes:
            module.training = False
        yield
    finally:
        for module, training in modes.items():
            module.training = training
