"""What looks at a run now and then, between two updates: `Probe`, and `MemoryProbe`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from pipeline.evaluation import When
from pipeline.events import Event, MemoryMeasured
from pipeline.records import TrainState

__all__ = ["MemoryProbe", "Probe"]

_STATUS = Path("/proc/self/status")
_COUNTERS = ("max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats")


class Probe(Protocol):
    """What `evaluations` of a fold are: an `Evaluation`, a `MemoryProbe`, or one of your own."""

    @property
    def when(self) -> When:
        """When it is due."""
        ...

    @property
    def name(self) -> str:
        """What it is called, apart from all others of the fold."""
        ...

    def run(self, state: TrainState, *, time: float = 0.0) -> Event:
        """Look at the state, which is left as it is, and tell what was found."""
        ...


@attrs.frozen
class MemoryProbe:
    """Tell how much memory the run takes, as `MemoryMeasured` events: peaks, and not what is left between two updates.

    Goes among a fold's `evaluations`. It never stands there of itself, since its numbers differ from run to run.

    Edges: the accelerator's peaks are those of torch's allocator on the devices of the parameters: of several devices
           the largest. They are reset once read, so that each event tells of the time since the one before; the first
           of what came before the run as well. Whoever else reads them sees them reset. `reserved_peak` is what the
           device had to give, `allocated_peak` what tensors took of that; both None where torch does not count (CPU,
           MPS). `resident` and `resident_peak` are what Linux tells of this process, without the workers of a
           DataLoader; None on other systems. What an evaluation needs counts for whichever probe comes next.
    Args:  when: `EveryUpdates(n)` or `EveryEpoch()`; name: needed only where there are two.
    """

    when: When
    name: str = "memory"

    def run(self, state: TrainState, *, time: float = 0.0) -> MemoryMeasured:
        """The memory that was needed since the last time."""
        progress = state.progress
        allocated, reserved = _accelerator_peaks(state.params.values())
        resident, resident_peak = _resident(_STATUS)
        return MemoryMeasured(
            micro_step=progress.micro_steps,
            update=progress.updates,
            epoch=progress.epoch,
            time=time,
            allocated_peak=allocated,
            reserved_peak=reserved,
            resident=resident,
            resident_peak=resident_peak,
        )


def _accelerator_peaks(tensors: Iterable[Tensor]) -> tuple[int | None, int | None]:
    """Bytes allocated and reserved at most since the last call, of the fullest device; nobody waits for it."""
    allocated, reserved = list[int](), list[int]()
    for device in {tensor.device for tensor in tensors}:
        counters: Any = torch.get_device_module(device)
        if all(hasattr(counters, name) for name in _COUNTERS):
            allocated.append(counters.max_memory_allocated(device))
            reserved.append(counters.max_memory_reserved(device))
            counters.reset_peak_memory_stats(device)
    return max(allocated, default=None), max(reserved, default=None)


def _resident(status: Path) -> tuple[int | None, int | None]:
    """Bytes of this process in memory, now and at most, as Linux accounts for them in `status`."""
    try:
        lines = status.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None, None
    entries = dict(line.split(":", 1) for line in lines)
    now, most = (entries.get(key, "").split() for key in ("VmRSS", "VmHWM"))
    return _bytes(now), _bytes(most)


def _bytes(entry: list[str]) -> int | None:
    """What is written as `["1024", "kB"]`."""
    return int(entry[0]) * 1024 if entry else None
