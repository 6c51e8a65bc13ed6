"""Torch's schedulers as schedules. The one module here that needs torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pipeline.errors import SettingError
from pipeline.schedules.shapes import Table

__all__ = ["tabulate"]


def tabulate(make_scheduler: Callable[[torch.optim.Optimizer], LRScheduler], updates: int, *, rate: float) -> Table:
    """The rates that a torch scheduler gives for the first `updates` updates, stepped once an update.

    It runs here and now, over an optimizer of its own, and never again: what it gave is kept in a `Table`, so that the
    rate depends on the update count alone. After the last of them the rate stays.

    `tabulate(lambda optimizer: StepLR(optimizer, 30), updates=100, rate=0.1)`

    Args:   make_scheduler: what makes the scheduler for an optimizer; updates: at least 1; rate: the optimizer's
            learning rate, which most schedulers multiply.
    Raises: SettingError for `ReduceLROnPlateau`, which hangs on what evaluations give and not on the count.
    """
    if updates < 1:
        raise SettingError("tabulate(updates)", "at least 1", updates)
    # With momentum, because the cyclic schedulers ask for one; without a gradient, so that its step does nothing.
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate, momentum=0.9)
    scheduler = make_scheduler(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        cure = "Use the monitor `monitors.Plateau`, which asks the fold for the factor."
        raise SettingError("tabulate(make_scheduler)", "one that depends on the count alone", scheduler, cure)
    if not isinstance(scheduler, LRScheduler):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SettingError("tabulate(make_scheduler)", "a function that returns a torch scheduler", scheduler)
    rates = [float(optimizer.param_groups[0]["lr"])]
    while len(rates) < updates:
        optimizer.step()
        scheduler.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))
    return Table(rates)
