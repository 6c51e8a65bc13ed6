"""When a run ends: `Updates(n)`, `Epochs(n)`, `MicroBatches(n)`, `Tokens(n)`, `Seconds(n)`, joined with `|`."""

from __future__ import annotations

import attrs

from pipeline._checks import not_negative, whole
from pipeline.records import Progress

__all__ = ["AnyOf", "Epochs", "Limit", "MicroBatches", "Seconds", "SkipsInRow", "Tokens", "Updates"]


@attrs.frozen
class Limit:
    """An end for a run. Counts are from the start of training, so that a resumed run ends where it would have."""

    def reasons(self, progress: Progress, seconds: float) -> tuple[str, ...]:
        """Why the run ends now; empty while it goes on. `seconds` since the run started."""
        raise NotImplementedError

    def stuck(self, before: Progress, after: Progress) -> bool:
        """Whether nothing that is counted has moved between the two, so that more of the same will not end the run."""
        return False

    def total_updates(self, began: Progress, windows: int | None) -> int | None:
        """The number of updates at which the run will end, if none is skipped; None where that is not known.

        `began` is where an epoch begins; `windows` how many there are in each, where that is known.
        """
        return None

    def __or__(self, other: Limit) -> AnyOf:
        """Whichever comes first."""
        return AnyOf((*_parts(self), *_parts(other)))


@attrs.frozen
class _Count(Limit):
    n: float

    def __attrs_post_init__(self) -> None:
        if isinstance(self, Seconds):
            not_negative("Seconds.n", self.n)
        else:
            whole(f"{type(self).__name__}.n", self.n, 0)

    def count(self, progress: Progress, seconds: float) -> float:
        """What is counted."""
        raise NotImplementedError

    def reasons(self, progress: Progress, seconds: float) -> tuple[str, ...]:
        """This limit as it was written, once it is reached."""
        return (repr(self),) if self.count(progress, seconds) >= self.n else ()

    def stuck(self, before: Progress, after: Progress) -> bool:
        """Whether the count is the same."""
        return self.count(before, 0.0) == self.count(after, 0.0)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.n})"


@attrs.frozen(repr=False)
class Updates(_Count):
    """After n updates in all; where several parts update on one micro-batch, after the one that reaches n."""

    def count(self, progress: Progress, seconds: float) -> float:
        """Updates applied."""
        return progress.updates

    def total_updates(self, began: Progress, windows: int | None) -> int | None:
        """n itself."""
        return int(self.n)


@attrs.frozen(repr=False)
class Epochs(_Count):
    """After n passes over the stream in all."""

    def count(self, progress: Progress, seconds: float) -> float:
        """Epochs finished."""
        return progress.epoch

    def total_updates(self, began: Progress, windows: int | None) -> int | None:
        """One for each window of the epochs to come, where a pass is known to have so many."""
        return None if windows is None else began.updates + max(int(self.n) - began.epoch, 0) * windows


@attrs.frozen(repr=False)
class MicroBatches(_Count):
    """After n micro-batches in all; a window that is open then is closed first."""

    def count(self, progress: Progress, seconds: float) -> float:
        """Micro-batches processed."""
        return progress.micro_steps


@attrs.frozen(repr=False)
class Tokens(_Count):
    """After n tokens in all, counted where the loss function gives `tokens`."""

    def count(self, progress: Progress, seconds: float) -> float:
        """Tokens seen."""
        return progress.tokens


@attrs.frozen(repr=False)
class Seconds(_Count):
    """After n seconds of this run. Irreproducible: a faster machine does more updates, and the run's end says so."""

    def count(self, progress: Progress, seconds: float) -> float:
        """Seconds since the run started."""
        return seconds

    def stuck(self, before: Progress, after: Progress) -> bool:
        """Never: time passes."""
        return False

    def reasons(self, progress: Progress, seconds: float) -> tuple[str, ...]:
        """This limit, with the warning."""
        return tuple(f"{reason} (by the clock: not reproducible)" for reason in super().reasons(progress, seconds))


@attrs.frozen(repr=False)
class SkipsInRow(_Count):
    """After n windows in a row that ended without an update: a run that only overflows is over."""

    def count(self, progress: Progress, seconds: float) -> float:
        """Windows skipped since the last update."""
        return progress.skips_in_row


@attrs.frozen
class AnyOf(Limit):
    """Whichever of several limits comes first; written with `|`."""

    limits: tuple[Limit, ...]

    def reasons(self, progress: Progress, seconds: float) -> tuple[str, ...]:
        """Those reached, all of them."""
        return tuple(reason for limit in self.limits for reason in limit.reasons(progress, seconds))

    def stuck(self, before: Progress, after: Progress) -> bool:
        """Whether all of them are."""
        return all(limit.stuck(before, after) for limit in self.limits)

    def total_updates(self, began: Progress, windows: int | None) -> int | None:
        """The smallest known."""
        totals = [limit.total_updates(began, windows) for limit in self.limits]
        return min((total for total in totals if total is not None), default=None)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.limits))


def _parts(limit: Limit) -> tuple[Limit, ...]:
    return limit.limits if isinstance(limit, AnyOf) else (limit,)
