"""Saving and loading a large state, against safetensors alone with the same tensors: the state of AdamW in float32.

The sides take turns, in each round in the other order, and the mean counts: a disk may be quick for a while and slow
from then on. What is written lies on the disk when the clock stops; `save_file` returns before that, which is shown
too. `load_file` maps a file into memory and reads nothing, so loading is measured with the copy into the model and the
optimizer: from the disk, with what the system remembers of the files dropped, and from its memory, where there is
little to pay for but SHA-256.

In the background a save should keep the training waiting for no longer than a copy of the state takes. Memory is what
the process holds beyond the state itself, without mapped files, which the system takes back when it needs to.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import attrs
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline import CheckpointStore, Tensors, TrainState
from pipeline.checkpoint import Checkpoint, load_checkpoint
from pipeline.checkpoint._adopted import adopted
from pipeline.checkpoint._disk import flush
from pipeline.records import OptimizerState

GB, MB = 1e9, 1e6
LAYER = 1 << 22  # elements: 17 MB


def state_of(size: float) -> TrainState:
    """A state of `size` bytes: a third of it the parameters, the rest their two moments."""
    layers = max(1, round(size / 3 / 4 / LAYER))
    generator = torch.Generator().manual_seed(0)

    def drawn() -> Tensor:
        return torch.randn(LAYER, generator=generator)

    params = {f"layer{i}.weight": drawn() for i in range(layers)}
    moments = {f"{name}/{moment}": drawn() for name in params for moment in ("exp_avg", "exp_avg_sq")}
    return TrainState(Tensors(params), optimizer=OptimizerState(Tensors(moments)))


def forget(folder: Path) -> None:
    """Let the system drop what it remembers of the files."""
    for path in folder.rglob("*.safetensors"):
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def plain_load(path: Path, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read into the model, and into an optimizer's new state, as `load_state_dict` of both would."""
    loaded = load_file(path)
    with torch.no_grad():
        for name, tensor in params.items():
            tensor.copy_(loaded.pop(name))
    return {name: tensor.clone() for name, tensor in loaded.items()}


def held() -> int:
    """Bytes that this process has for itself."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("this system does not tell")


@attrs.define
class Peak:
    """The most that was held in a `with` block, beyond what was there before."""

    extra: int = 0

    @contextmanager
    def watched(self) -> Generator[None]:
        ended, before = threading.Event(), held()

        def watch() -> None:
            while not ended.wait(0.002):
                self.extra = max(self.extra, held() - before)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()


@attrs.define
class Clock:
    """The times of each side, in seconds."""

    times: dict[str, list[float]] = attrs.field(factory=dict[str, list[float]])

    def take(self, side: str, work: Callable[[], object]) -> None:
        began = time.perf_counter()
        work()
        self.times.setdefault(side, []).append(time.perf_counter() - began)

    def mean(self, side: str) -> float:
        return statistics.mean(self.times[side])


@attrs.frozen
class Bench:
    """One state on one disk."""

    folder: Path
    state: TrainState
    clock: Clock = attrs.field(factory=Clock)
    peaks: dict[str, Peak] = attrs.field(factory=lambda: {side: Peak() for side in ("save", "background", "load")})

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {**self.state.params, **self.state.optimizer.tensors}

    @property
    def plain(self) -> Path:
        return self.folder / "plain.safetensors"

    def plain_save(self) -> None:
        """`save_file`, until it returns, and until all lies on the disk."""
        began = time.perf_counter()
        save_file(self.tensors, self.plain)
        self.clock.times.setdefault("save_file returned", []).append(time.perf_counter() - began)
        flush(self.plain)

    def save(self) -> None:
        CheckpointStore(self.folder / "ours").save(Checkpoint(self.state))

    def measure(self, rounds: int) -> None:
        """Fill the clock and the peaks."""
        clock, peaks, folder = self.clock, self.peaks, self.folder
        template = TrainState(self.state.params.copy()).owned()
        for turn in range(rounds):
            sides = [("plain save", self.plain_save), ("save", self.save)]
            for side, work in sides[:: 1 if turn % 2 else -1]:
                shutil.rmtree(folder)
                folder.mkdir()
                os.sync()
                with peaks["save"].watched() if side == "save" else nullcontext():
                    clock.take(side, work)
            shutil.rmtree(folder)
            folder.mkdir()
            clock.take("copy", lambda: [tensor.clone() for tensor in self.tensors.values()])
            with peaks["background"].watched(), CheckpointStore(folder / "ours", background=True) as store:
                clock.take("stall", lambda: store.save(Checkpoint(self.state)))
            self.plain_save()
            path = store.list()[0].path

            def load(path: Path = path) -> None:
                adopted(template, load_checkpoint(path).state)

            sides = [("plain load", lambda: plain_load(self.plain, template.params)), ("load", load)]
            for side, work in sides[:: 1 if turn % 2 else -1]:
                forget(folder)
                with peaks["load"].watched() if side == "load" else nullcontext():
                    clock.take(f"{side} from the disk", work)
                clock.take(f"{side} from memory", work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=float, default=0.25, help="of the state, in GB")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--folder", help="on the disk that is to be measured")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    state = state_of(asked.size * GB)
    size = sum(tensor.nbytes for tensor in (*state.params.flat, *state.optimizer.tensors.flat))
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        bench = Bench(Path(folder) / "bench", state)
        bench.folder.mkdir()
        bench.measure(asked.rounds)
    mean = bench.clock.mean
    print(f"a state of {size / GB:.2f} GB, the mean of {asked.rounds} rounds")
    for what in ("save", "load from the disk", "load from memory"):
        ours, plain = mean(what), mean(f"plain {what}")
        speeds = f"{size / GB / ours:5.2f} GB/s, safetensors alone {size / GB / plain:5.2f}"
        print(f"{what:<20} {ours:6.2f} s  {speeds}: {plain / ours:.2f} of it")
    print(f"(save_file returns after {mean('save_file returned'):.2f} s, before the bytes lie on the disk)")
    stall, copy = mean("stall"), mean("copy")
    print(
        f"in the background    waits for {stall:.2f} s, a copy of the state takes {copy:.2f}: {stall / copy:.2f} of it"
    )
    print("memory beyond the state: " + ", ".join(f"{k} {peak.extra / MB:,.0f} MB" for k, peak in bench.peaks.items()))


if __name__ == "__main__":
    main()
