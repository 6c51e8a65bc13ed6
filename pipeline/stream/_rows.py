"""Data that lies there to be read at any place: a map-style dataset, or tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate

from pipeline.errors import SettingError, StreamError
from pipeline.stream._epochs import Told
from pipeline.stream._guard import Errors, Guard
from pipeline.stream._indexed import Indexed, Indices, Order, Pass, numbers, shifted
from pipeline.stream._tables import Kept


class _Data(Indexed):
    """Where the rows of an order come from at last."""

    size: int

    @property
    def rows(self) -> int:
        return self.size

    @property
    def order(self) -> str:
        return f"{self.size} rows"

    def count(self, start: int) -> int:
        return self.size - start

    def locate(self, at: Pass, index: int) -> tuple[int, int]:
        return at.epoch, at.start + index


class Rows(_Data):
    """The items of a dataset that has `__getitem__` and `__len__`."""

    def __init__(self, dataset: Sequence[Any], seed: int | None, errors: Errors) -> None:
        super().__init__()
        self.dataset, self.size, self.defaults_seed = dataset, len(dataset), seed or 0
        self.is_plain = seed is None or not _may_draw(dataset)
        self._guard = Guard(repr(self), errors)
        self._whole: Callable[[list[int]], list[Any]] | None = getattr(dataset, "__getitems__", None)
        self._told = Told(dataset) if hasattr(dataset, "set_epoch") else None

    def fetch(self, at: Pass, indices: Indices) -> list[Any]:
        rows = numbers(shifted(indices, at.start))
        if self._told is None:
            return self._read(rows)
        with self._told.of(at.epoch):
            return self._read(rows)

    def _read(self, rows: list[int]) -> list[Any]:
        if self._whole is not None and self._guard.errors == "raise":
            try:
                items = list(self._whole(rows))
                if len(items) != len(rows):
                    name = f"{type(self.dataset).__name__}.__getitems__"
                    raise StreamError(f"{name} gave {len(items)} items for {len(rows)} indices: it must give one each.")
                return items
            except Exception as error:
                self._guard.take(error, f"indices {rows} of the dataset, all at once")
        items = []
        for row in rows:
            try:
                items.append(self.dataset[row])
            except Exception as error:
                self._guard.take(error, f"index {row} of the dataset")
                items.append(None)
        return items

    @property
    def skipped(self) -> int:
        return self._guard.skipped

    def __repr__(self) -> str:
        return f"source({type(self.dataset).__name__} of {self.size})"


def _may_draw(dataset: object) -> bool:
    """Whether making an item may run code of the user's."""
    if type(dataset) is Subset:
        return _may_draw(dataset.dataset)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    if type(dataset) is ConcatDataset:
        return any(map(_may_draw, dataset.datasets))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    return type(dataset) not in (list, tuple, range, TensorDataset)


class Columns(_Data):
    """Rows of tensors: a batch is one read from each tensor, and no row is made for it."""

    gathers = True

    def __init__(self, columns: Any) -> None:
        super().__init__()
        self._leaves, form = pytree.tree_flatten(tuple(columns.tensors) if type(columns) is TensorDataset else columns)
        self.size = len(self._leaves[0])
        sizes = {len(leaf) for leaf in self._leaves}
        if len(sizes) > 1:
            cure = "A list of tensors is a list of items."
            raise SettingError("source(data)", "tensors with the same number of rows", sorted(sizes), cure)
        self._row = self._batch = form
        if self.size:  # a batch of tuples is a list there
            self._batch = pytree.tree_structure(default_collate(self.fetch(Pass(), range(1))))

    def fetch(self, at: Pass, indices: Indices) -> list[Any]:
        rows = numbers(shifted(indices, at.start))
        return [pytree.tree_unflatten([leaf[row] for leaf in self._leaves], self._row) for row in rows]

    def gather(self, at: Pass, indices: Indices) -> Any:
        rows = shifted(indices, at.start)
        if not len(rows):
            return None
        if isinstance(rows, range):
            part = slice(rows.start, rows.stop, rows.step)
            taken = [leaf[part].clone() for leaf in self._leaves]  # a batch is the user's to change
        else:
            taken = [torch.index_select(leaf, 0, rows.to(leaf.device)) for leaf in self._leaves]
        return pytree.tree_unflatten(taken, self._batch)

    def __repr__(self) -> str:
        return f"source(tensors of {self.size})"


class Picked(Order):
    """Some rows of tensors, or all in another order: what a `Subset` has of a `TensorDataset`."""

    name = "source"

    def __init__(self, node: Columns | Picked, indices: Sequence[int]) -> None:
        super().__init__(node)
        where, there = torch.as_tensor(indices, dtype=torch.int64), node.rows
        where = torch.where(where < 0, where + there, where)
        if bool(((where < 0) | (where >= there)).any()):
            raise SettingError("source(data)", f"a Subset of the {there} rows that there are", list(indices))
        self._where = Kept(where)

    @property
    def rows(self) -> int:
        return len(self._where.whole)

    @property
    def order(self) -> str:
        return f"{self.rows} rows"

    def places(self, epoch: int, indices: Indices) -> tuple[int, Indices]:
        return epoch, self._where.at(indices)

    def __repr__(self) -> str:
        return f"source(Subset of {self.rows})"


def tensors_in(data: object) -> Columns | Picked | None:
    """The rows of tensors that the data is, or that it picks some of; None for all else."""
    if are_columns(data):
        return Columns(data)
    if type(data) is Subset and type(data.dataset) in (TensorDataset, Subset):  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        node = tensors_in(data.dataset)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        return None if node is None else Picked(node, data.indices)
    return None


def are_columns(data: object) -> bool:
    """Whether these are tensors with a row for each item: one, or a tuple, a NamedTuple or a dict of them."""
    if type(data) is TensorDataset:
        return bool(data.tensors)
    is_any = False
    if isinstance(data, (Tensor, tuple, dict)):
        for leaf in pytree.tree_iter(data):
            if not isinstance(leaf, Tensor) or not leaf.ndim:
                return False
            is_any = True
    return is_any
