"""`sweep`: settings against each other in one run, and a table of what came of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from torch import nn

from pipeline.audience import Sink
from pipeline.checkpoint import CheckpointStore
from pipeline.ensembles._members import name_of_member
from pipeline.ensembles.building import ensemble
from pipeline.ensembles.monitoring import per_member
from pipeline.ensembles.together import Ensemble
from pipeline.errors import SettingError
from pipeline.evaluation import Evaluation
from pipeline.loop import fold, init
from pipeline.monitor import Monitor
from pipeline.monitors import MeanLoss
from pipeline.optim import Rate
from pipeline.records import LossScale, TrainState
from pipeline.run import Run
from pipeline.transform import Transform
from pipeline.until import Limit

__all__ = ["Row", "Sweep", "sweep"]


@attrs.frozen
class Row:
    """One member of a sweep: what set it apart, and what the monitors found in it."""

    member: int
    settings: Mapping[str, Any]
    results: Mapping[str, Any]


@attrs.frozen(eq=False, repr=False)
class Sweep:
    """What a sweep returns: a row for each member, the run of all, and the step that trained them.

    Prints as a table. `min(found.rows, key=lambda row: row.results["MeanLoss"])` is the best row.
    """

    rows: tuple[Row, ...]
    run: Run
    step: Ensemble

    def state(self, row: Row) -> TrainState:
        """The state of a row's member by itself, for `step.steps[row.member]`."""
        return self.step.member(self.run.state, row.member)

    def __str__(self) -> str:
        heads = ["member", *self.rows[0].settings, *self.rows[0].results]
        lines = [heads] + [
            [str(row.member), *(_shown(value) for value in (*row.settings.values(), *row.results.values()))]
            for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)

    def __repr__(self) -> str:
        return f"Sweep({len(self.rows)} members, {', '.join(self.rows[0].settings)})"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def sweep(
    step: Transform,
    model: nn.Module,
    stream: Iterable[Any],
    *,
    seeds: Sequence[int] = (),
    rates: Sequence[Rate] = (),
    weight_decays: Sequence[Rate] = (),
    loss_weights: Sequence[float] = (),
    monitors: Iterable[Monitor] = (MeanLoss(),),
    evaluations: Iterable[Evaluation] = (),
    sinks: Iterable[Sink] = (),
    until: Limit | None = None,
    seed: int = 0,
    loss_scale: LossScale | None = None,
    store: CheckpointStore | str | Path | None = None,
    resume: str | Path | None = None,
) -> Sweep:
    """Every combination of the settings given, trained at once as the members of one `ensemble`, in a table.

    Members that share a seed begin and draw alike, and all see the same batches: rows differ by their settings alone.

    Args:   step, model, stream: as for `fold` and `init`, of one model; seeds, rates, weight_decays, loss_weights: what
            to combine, as for `ensemble`, the last named varying fastest; monitors: each is given to every member, and
            is a column; evaluations: of one model, made into such of all; the rest as for `fold` and `init`.
    Raises: SettingError where nothing is given to combine, and what `ensemble` and `fold` raise.
    """
    given = {"seeds": seeds, "rates": rates, "weight_decays": weight_decays, "loss_weights": loss_weights}
    axes = {name: list(values) for name, values in given.items() if len(values)}
    if not axes:
        raise SettingError("sweep(seeds, rates, weight_decays, loss_weights)", "given, at least one of them", axes)
    combined = list(itertools.product(*axes.values()))
    columns = dict(zip(axes, zip(*combined, strict=True), strict=True))
    several = ensemble(
        step,
        seeds=columns.get("seeds"),
        rates=columns.get("rates"),
        weight_decays=columns.get("weight_decays"),
        loss_weights=columns.get("loss_weights"),
    )
    watching = [per_member(monitor) for monitor in monitors]
    run = fold(
        several,
        init(several, model, seed=seed, loss_scale=loss_scale),
        stream,
        monitors=watching,
        evaluations=[several.evaluation(evaluation) for evaluation in evaluations],
        sinks=sinks,
        until=until,
        publish_every=10 * len(combined),  # updates of members
        store=store,
        resume=resume,
    )
    names = [name.removesuffix("s").replace("_", " ") for name in axes]
    return Sweep(tuple(_row(run, member, names, values) for member, values in enumerate(combined)), run, several)


def _row(run: Run, member: int, names: Sequence[str], values: Sequence[Any]) -> Row:
    """A member's settings, and each monitor's result for it; None where the monitor has seen nothing of it."""
    name = name_of_member(member)
    results = {monitor: (found or {}).get(name) for monitor, found in run.results.items()}
    return Row(member, dict(zip(names, values, strict=True)), results)
