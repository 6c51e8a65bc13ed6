"""Draws a picture of each schedule, as SVG, next to this file: `python docs/pictures/schedules.py`.

No plotting library: a schedule is a function of the count, and an SVG is text. The same numbers give the same file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from torch.optim.lr_scheduler import CyclicLR

from pipeline import monitors, schedules
from pipeline.events import EvalDone
from pipeline.schedules import Schedule

UPDATES = 1_000

PICTURES: dict[str, tuple[str, Schedule]] = {
    "constant": ("constant(1.0)", schedules.constant(1.0)),
    "linear": ("linear(1.0, 0.1, 800)", schedules.linear(1.0, 0.1, 800)),
    "cosine": ("cosine(1.0, 0.1, 800)", schedules.cosine(1.0, 0.1, 800)),
    "polynomial": ("polynomial(1.0, 0.1, 800, power=3)", schedules.polynomial(1.0, 0.1, 800, power=3)),
    "exponential": (
        "exponential(1.0, 0.5, every=200, floor=0.1)",
        schedules.exponential(1.0, 0.5, every=200, floor=0.1),
    ),
    "staircase": ("staircase(1.0, 0.5, every=250)", schedules.staircase(1.0, 0.5, every=250)),
    "milestones": (
        "staircase(1.0, 0.5, milestones=[500, 750, 850])",
        schedules.staircase(1.0, 0.5, milestones=[500, 750, 850]),
    ),
    "warmup": ("warmup(linear(1.0, 0.0, 850), 150)", schedules.warmup(schedules.linear(1.0, 0.0, 850), 150)),
    "warmup_cosine": (
        "warmup_cosine(1.0, warmup=100, total=1000)",
        schedules.warmup_cosine(1.0, warmup=100, total=1_000),
    ),
    "warmup_stable_decay": (
        "warmup_stable_decay(1.0, 1000, warmup=100, decay=200)",
        schedules.warmup_stable_decay(1.0, 1_000, warmup=100, decay=200),
    ),
    "one_cycle": ("one_cycle(1.0, total=1000)", schedules.one_cycle(1.0, total=1_000)),
    "warm_restarts": (
        "warm_restarts(1.0, 0.0, first=143, factor=2)",
        schedules.warm_restarts(1.0, 0.0, first=143, factor=2),
    ),
    "join": (
        "join(0.3, cosine(1.0, 0.2, 500), 0.1, boundaries=[200, 700])",
        schedules.join(0.3, schedules.cosine(1.0, 0.2, 500), 0.1, boundaries=[200, 700]),
    ),
    "scale": (
        "scale(warm_restarts(1.0, 0.0, 200), linear(1.0, 0.2, 1000))",
        schedules.scale(schedules.warm_restarts(1.0, 0.0, 200), schedules.linear(1.0, 0.2, 1_000)),
    ),
    "tabulate": (
        'tabulate(CyclicLR(0.1, 1.0, 125, "triangular2"), 1000)',
        schedules.tabulate(lambda o: CyclicLR(o, 0.1, 1.0, 125, mode="triangular2"), 1_000, rate=1.0),
    ),
}

WIDTH, HEIGHT = 480, 180
LEFT, RIGHT, TOP, BOTTOM = 34, 14, 32, 24
INK, SOFT, GRID, ACCENT, OTHER = "#24292f", "#57606a", "#d8dee4", "#0969da", "#bc4c00"


def x_of(count: float) -> float:
    """The pixel of a count."""
    return LEFT + (WIDTH - LEFT - RIGHT) * count / UPDATES


def y_of(value: float) -> float:
    """The pixel of a rate."""
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / 1.05


def bends(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points, in pixels, without those that lie on the line between others to a twentieth of a pixel."""
    (x0, y0), (x1, y1) = points[0], points[-1]
    length = math.hypot(x1 - x0, y1 - y0) or 1.0
    off = [abs((x1 - x0) * (y - y0) - (y1 - y0) * (x - x0)) / length for x, y in points]
    far = max(range(len(points)), key=off.__getitem__)
    if off[far] <= 0.05:
        return [points[0], points[-1]]
    return bends(points[: far + 1])[:-1] + bends(points[far:])


def path(points: Sequence[tuple[float, float]], colour: str, more: str = "") -> str:
    """A line through the points."""
    kept = bends([(x_of(count), y_of(value)) for count, value in points])
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in kept)
    return f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2" stroke-linejoin="round"{more}/>'


def text(x: float, y: float, content: str, colour: str = SOFT, anchor: str = "middle", size: float = 10) -> str:
    """One line of text."""
    content = content.replace("&", "&amp;").replace("<", "&lt;")
    family = "ui-monospace, Menlo, Consolas, monospace"
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-family="{family}" font-size="{size}" fill="{colour}">{content}</text>'


def picture(title: str, lines: Sequence[str]) -> str:
    """A frame with axes around the lines; white behind, so that it reads on a dark page too."""
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    grid = [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_of(v):.1f}" y2="{y_of(v):.1f}" stroke="{GRID}"/>'
        + text(LEFT - 6, y_of(v) + 3.5, f"{v:g}", anchor="end")
        for v in (0, 0.5, 1)
    ]
    ticks = [text(x_of(n), HEIGHT - 8, f"{n}") for n in (0, 250, 500, 750)]
    ticks.append(text(x_of(UPDATES), HEIGHT - 8, "1000", anchor="end"))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{title.replace(chr(34), "&quot;")}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#ffffff"/>',
        text(LEFT, 18, title, INK, "start", 11),
        *grid,
        *ticks,
        *lines,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def plateau_picture() -> str:
    """A measure that settles the lower, the lower the rate, and the factor that `Plateau` asks for."""
    plateau = monitors.Plateau("val_loss", factor=0.4, patience=3, threshold=0.02)
    seen, loss = plateau.init(), 0.95
    losses, factors = [(0.0, loss)], [(0.0, 1.0)]
    for count in range(25, UPDATES + 1, 25):
        loss += 0.45 * (0.15 + 0.35 * factors[-1][1] - loss)
        losses.append((count, loss))
        at = {"micro_step": count, "update": count, "epoch": 0, "time": 0.0}
        seen = plateau.reduce(seen, EvalDone(**at, name="val", values={"val_loss": loss}, weight=1.0, batches=1))
        factors += [(count, factors[-1][1]), (count, plateau.result(seen) or 1.0)]
    dots = [f'<circle cx="{x_of(n):.1f}" cy="{y_of(v):.1f}" r="2" fill="{OTHER}"/>' for n, v in losses]
    labels = [
        text(x_of(40), y_of(0.8), "val_loss", OTHER, "start"),
        text(x_of(290), y_of(0.9), "factor", ACCENT, "start"),
    ]
    line = path(losses, OTHER, ' stroke-opacity="0.4"')
    title = 'Plateau("val_loss", factor=0.4, patience=3, threshold=0.02)'
    return picture(title, [path(factors, ACCENT), line, *dots, *labels])


def pictures() -> dict[str, str]:
    """Each file's name and what is in it."""
    drawn = {
        f"{name}.svg": picture(title, [path(schedules.points(schedule, UPDATES), ACCENT)])
        for name, (title, schedule) in PICTURES.items()
    }
    return {**drawn, "plateau.svg": plateau_picture()}


if __name__ == "__main__":
    for file, content in pictures().items():
        (Path(__file__).parent / file).write_text(content, encoding="utf-8")
