"""What an update says of something, by its name."""

from __future__ import annotations

from pipeline.events import UpdateDone


def reading(event: UpdateDone, measure: str) -> float | None:
    """`loss`, `grad_norm`, the mean of a measure, or a fact; None where the update does not tell or nothing counted."""
    if measure == "loss":
        return float(event.loss) if float(event.weight) else None
    if measure == "grad_norm":
        return float(event.grad_norm)
    if measure in event.measures:
        total, weight = event.measures[measure]
        return float(total) / float(weight) if float(weight) else None
    return float(event.facts[measure]) if measure in event.facts else None


def by_layer(event: UpdateDone, kind: str) -> dict[str, float]:
    """The facts `<kind>/<layer>`, by layer."""
    prefix = f"{kind}/"
    return {name.removeprefix(prefix): float(v) for name, v in event.facts.items() if name.startswith(prefix)}
