"""The window's sums: what is kept of a micro-batch stays as it was then, and what weights are relative to."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import (
    Accumulate,
    EmitEvents,
    Forward,
    Frame,
    Loss,
    MaybeStep,
    Optimizer,
    ScaledBackward,
    chain,
    fold,
    init,
    scan,
)
from pipeline.events import UpdateDone
from pipeline.transforms import DropNonFinite


class Scaled(nn.Module):
    """A temperature that is trained, and a buffer that each forward writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.passes = nn.Buffer(torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return self.temperature * x


def step_of(model: nn.Module, loss: Any, window: int, *between: Any) -> Any:
    rule = MaybeStep(Optimizer(torch.optim.SGD, lr=0.1))
    return chain(Forward(model, loss), ScaledBackward(), *between, Accumulate(window), rule, EmitEvents())


@pytest.mark.parametrize("made", ["pairs", "sums"])
def test_measures_that_are_parameters_or_buffers_are_told_as_they_were_in_their_micro_batch(made: str) -> None:
    model = Scaled()
    then: list[tuple[float, float]] = []

    def loss(model: Any, x: Tensor) -> Loss:
        value = model(x)
        then.append((float(model.temperature.detach()), float(model.passes)))
        if made == "sums":
            return Loss.sum(value, 1.0, measures={"temperature": model.temperature, "passes": model.passes})
        return Loss.mean(value, measures={"temperature": (model.temperature, 1.0), "passes": (model.passes, 1.0)})

    step = step_of(model, loss, 1)
    events = [e for _, es in scan(step, init(step, model), [torch.tensor(1.0)] * 3) for e in es]
    told = [e.measures for e in events if isinstance(e, UpdateDone)]
    assert [tuple(float(m[name][0]) for name in ("temperature", "passes")) for m in told] == then


def test_a_loss_that_is_a_view_of_a_parameter_is_told_as_it_was() -> None:
    model = nn.Linear(1, 1)
    nn.init.ones_(model.bias)
    step = step_of(model, lambda model, _: model.bias.view(()), 1)
    events = [e for _, es in scan(step, init(step, model), [torch.tensor(1.0)] * 3) for e in es]
    assert [float(e.loss) for e in events if isinstance(e, UpdateDone)] == pytest.approx([1.0, 0.9, 0.8])


def test_a_weight_counts_as_it_was_though_its_memory_is_used_again() -> None:
    model = Scaled()
    weight = torch.empty(())

    def loss(model: Any, x: Tensor) -> Loss:
        return Loss.mean(model(x), weight.copy_(x))

    step = step_of(model, loss, 2)
    fold(step, init(step, model), [torch.tensor(1.0), torch.tensor(3.0)])
    assert float(model.temperature.detach()) == pytest.approx(1 - 0.1 * (1 * 1 + 3 * 3) / 4)


@pytest.mark.parametrize("how", ["nothing to count", "dropped"])
def test_weights_are_relative_to_the_first_micro_batch_that_has_any_on_the_device_too(how: str) -> None:
    model = Scaled()
    seen: list[float] = []

    def loss(model: Any, x: Tensor) -> Loss:
        return Loss.mean(model(x), torch.where(x > 0, 1000.0, 0.0) if how == "nothing to count" else 1000.0)

    def look(frame: Frame) -> Frame:
        if frame.ready:
            seen.append(float(frame.state.window.relative_weight))
        return frame

    first = torch.tensor(0.0 if how == "nothing to count" else float("nan"))
    between = [DropNonFinite()] if how == "dropped" else []
    step = step_of(model, loss, 3, *between).insert_after("Accumulate", look)
    fold(step, init(step, model), [first, torch.tensor(2.0), torch.tensor(4.0)])
    assert seen == [2.0]
    assert float(model.temperature.detach()) == pytest.approx(1 - 0.1 * 3)
