"""Checkpoints told of in lines of text: a list of them, what is in one, and what sets two apart."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.checkpoint._folder import Written, read, verify
from pipeline.checkpoint._manifest import Head
from pipeline.checkpoint.saved import Saved
from pipeline.checkpoint.store import CheckpointStore
from pipeline.errors import CheckpointError

__all__ = ["compared", "is_run", "listed", "shown"]


def is_run(folder: Path) -> bool:
    """Whether the folder is that of a run, and not that of one checkpoint."""
    return CheckpointStore(folder).path.is_dir()


def listed(folder: Path, *, verified: bool) -> Iterator[str]:
    """A line for each checkpoint of a run; `verified`, with what is found to be damaged.

    Raises: CheckpointError, at the end, where some are damaged.
    """
    store, damaged = CheckpointStore(folder), 0
    rows: list[tuple[Path, Saved | None, str]] = []
    for path in store.folders():
        try:
            saved, state = Saved.at(path), ""
            if verified:
                verify(path)
                state = "whole"
        except CheckpointError as error:
            saved, state = None, str(error)
            damaged += 1
        rows.append((path, saved, state))
    found = [saved for _, saved, _ in rows if saved is not None]
    yield f"{store.path}: {_counted(len(rows), 'checkpoint')}, {_bytes(sum(saved.size for saved in found))}"
    if found:
        yield ""
        yield from _table(rows, sorted({name for saved in found for name in saved.measures}), verified)
    yield from (f"{state}" for _, saved, state in rows if saved is None)
    if damaged:
        raise CheckpointError(f"{damaged} of {len(rows)} checkpoints cannot be read")


def _table(rows: Iterable[tuple[Path, Saved | None, str]], measures: Sequence[str], verified: bool) -> Iterator[str]:
    lines = [["name", "update", "micro-step", "epoch", "saved", "size", *measures, *["files"] * verified, "why"]]
    for path, saved, state in rows:
        if saved is not None:
            counts = [f"{count:,}" for count in (saved.update, saved.micro_step, saved.epoch)]
            values = [f"{saved.measures[name]:.6g}" if name in saved.measures else "" for name in measures]
            why = ", ".join(saved.reasons)
            lines.append([path.name, *counts, _time(saved.time), _bytes(saved.size), *values, *[state] * verified, why])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    numbers = range(1, 6 + len(measures))
    for line in lines:
        cells = [
            cell.rjust(width) if place in numbers else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def shown(path: Path) -> Iterator[str]:
    """What is in one checkpoint, its tensors by name.

    Raises: CheckpointError where it cannot be read.
    """
    with _readable(path):
        yield from _inside_of(path, read(path))


def _inside_of(path: Path, written: Written) -> Iterator[str]:
    head, form = written.head, written.state
    yield f"{path}: update {head.update:,}, micro-step {head.micro_step:,}, epoch {head.epoch:,}"
    yield f"saved {_time(head.time)} for {', '.join(head.reasons) or 'no reason given'}, by run {head.run or '-'}"
    yield "with " + ", ".join(f"{name} {version}" for name, version in head.versions.items())
    parts = {"measures": _pairs(head), "monitors": ", ".join(form["accumulators"])}
    parts["events"] = f"{form['told']:,} told, {len(form['pending']):,} to tell"
    for name, value in parts.items():
        yield f"{name:<10}{value or '-'}"
    yield ""
    for name, value in _leaves({key: form[key] for key in ("state", "place", "stream")}):
        yield f"{name} = {json.dumps(value, ensure_ascii=False)}"
    for group, tensors in _groups(written.tensors).items():
        size = sum(tensor.nbytes for tensor in tensors.values())
        elements = sum(tensor.numel() for tensor in tensors.values())
        yield ""
        yield f"{group}: {_counted(len(tensors), 'tensor')}, {_counted(elements, 'element')}, {_bytes(size)}"
        margin = max(map(len, tensors)) + 2
        yield from (f"  {name:<{margin}}{_kind(tensor)}" for name, tensor in tensors.items())


def compared(one: Path, other: Path) -> Iterator[str]:
    """What sets a checkpoint apart from another.

    Raises: CheckpointError where one of them cannot be read.
    """
    with _readable(one, other):
        before, after = read(one), read(other)
        yield f"{one}"
        yield f"{other}"
        yield ""
        yield from _apart(before, after)


def _apart(before: Written, after: Written) -> Iterator[str]:
    ours, theirs = dict(_leaves(before.state)), dict(_leaves(after.state))
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if name not in ours or name not in theirs or ours[name] != theirs[name]:
            yield f"{name}: {_value(ours, name)} → {_value(theirs, name)}"
    names = [*before.tensors, *(name for name in after.tensors if name not in before.tensors)]
    differences = {name: _difference(before.tensors.get(name), after.tensors.get(name)) for name in names}
    differing = {name: difference for name, difference in differences.items() if difference}
    yield ""
    yield f"{_counted(len(names) - len(differing), 'tensor')} equal, {len(differing):,} not"
    margin = max(map(len, differing), default=0) + 2
    yield from (f"  {name:<{margin}}{difference}" for name, difference in differing.items())


@contextmanager
def _readable(*paths: Path) -> Generator[None]:
    """One error for whatever comes of files that somebody else has written."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{' or '.join(map(str, paths))} holds what cannot be read: {error!r}") from error


def _leaves(form: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The values in a state by their places, without the tensors."""
    if isinstance(form, Mapping):
        if form.get("is") in ("tensor", "complex", "sparse"):
            return
        form = _inside(form)
    if isinstance(form, Mapping):
        for key, value in form.items():
            yield from _leaves(value, f"{name}/{key}" if name else str(key))
    elif isinstance(form, list) and any(isinstance(part, (list, Mapping)) for part in form):
        for place, part in enumerate(form):
            yield from _leaves(part, f"{name}/{place}")
    else:
        yield name, form


def _inside(form: Mapping[str, Any]) -> Any:
    """What an object of the JSON stands for, without what says so."""
    if "is" not in form:
        return form
    own = {key: value for key, value in form.items() if key != "is"}
    return next(iter(own.values())) if own.keys() <= {"items", "value"} else own


def _groups(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The tensors by the part of the state that they are in, the parameters first."""
    groups: dict[str, dict[str, Tensor]] = {"params": {}, "buffers": {}}
    for name, tensor in tensors.items():
        group, _, rest = name.partition("/")
        groups.setdefault(group, {})[rest] = tensor
    return {group: inside for group, inside in groups.items() if inside}


def _difference(one: Tensor | None, other: Tensor | None) -> str:
    """What sets two tensors apart; empty where they are equal."""
    if one is None or other is None:
        return "only in the second" if one is None else "only in the first"
    if _kind(one) != _kind(other):
        return f"{_kind(one)} → {_kind(other)}"
    if torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)):
        return ""
    if one.dtype is torch.bool or not one.numel():
        return f"{int((one != other).sum()):,} of {one.numel():,} elements"
    apart, size = (one.double() - other.double()).abs().max(), one.double().abs().max()
    return f"by {float(apart):.3g} at most, of {float(size):.3g}"


def _value(values: Mapping[str, Any], name: str) -> str:
    return json.dumps(values[name], ensure_ascii=False) if name in values else "not there"


def _kind(tensor: Tensor) -> str:
    shape = "×".join(map(str, tensor.shape)) or "0-d"
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape}"


def _pairs(head: Head) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in head.measures.items())


def _time(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds).isoformat(" ", "seconds")
    except (OSError, OverflowError, ValueError):  # of no year that there is
        return f"{seconds:g} s"


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
