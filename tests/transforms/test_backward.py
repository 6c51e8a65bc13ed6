"""The backward pass into the window: what is done to a gradient reaches no other micro-batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import (
    Accumulate,
    ClipByGlobalNorm,
    Forward,
    MaybeStep,
    Optimizer,
    ScaledBackward,
    chain,
    fold,
    init,
)


class Offset(nn.Module):
    """One parameter of one element: the gradient of its view is the one that the backward pass starts from."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.ones(1))


class DoubledInPlace(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.mul_(2)


def hooked(model: Any, x: Tensor) -> Tensor:
    loss = (model.offset * x).sum()
    loss.register_hook(lambda grad: grad.mul_(2))
    return loss


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a view of the parameter": lambda model, _: model.offset.view(()),
    "a hook that writes": hooked,
    "a function that writes": lambda model, x: DoubledInPlace.apply((model.offset * x).sum()),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_what_is_written_to_a_gradient_is_gone_by_the_next_backward_pass(loss: Callable[[Any, Tensor], Tensor]) -> None:
    model, plain = Offset(), Offset()
    rule = MaybeStep(Optimizer(torch.optim.SGD, lr=0.1))
    step = chain(Forward(model, loss), ScaledBackward(), Accumulate(2), ClipByGlobalNorm(0.5), rule)
    batches = list(torch.arange(1.0, 9.0))
    fold(step, init(step, model), batches)
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        plain.offset.grad = None
        loss(plain, first).backward()
        loss(plain, second).backward()
        assert plain.offset.grad is not None
        plain.offset.grad /= 2
        nn.utils.clip_grad_norm_([plain.offset], 0.5)
        with torch.no_grad():
            plain.offset -= 0.1 * plain.offset.grad
    assert torch.allclose(model.offset, plain.offset, rtol=1e-6)
