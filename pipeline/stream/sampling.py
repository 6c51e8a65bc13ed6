"""Sampling by weight: of items, and of streams."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from pipeline._checks import whole
from pipeline.errors import SettingError
from pipeline.stream._indexed import Indexed, Indices, Order
from pipeline.stream._keys import DRAW, MIX, key, uniform
from pipeline.stream._noted import number
from pipeline.stream._tables import Blocks, Kept, Table
from pipeline.stream.node import Node
from pipeline.stream.sources import source

__all__ = ["balanced", "mix", "weighted"]

Weights = Sequence[float] | Tensor


def balanced(labels: Sequence[Any] | Tensor) -> Tensor:
    """A weight for each item by which every class is drawn equally often: one over the size of its class.

    Raises: SettingError for labels that are not a number or a name each.
    """
    _, where, sizes = torch.unique(_coded(labels), return_inverse=True, return_counts=True)
    return sizes.to(torch.float64).reciprocal()[where]


def _coded(labels: Sequence[Any] | Tensor) -> Tensor:
    """The labels as numbers: themselves, or for names the place of each among them."""
    codes: dict[Any, int] = {}
    try:
        if isinstance(labels, Tensor):
            coded = labels
        else:
            plain = (label.item() if isinstance(label, Tensor) else label for label in labels)
            coded = torch.tensor([codes.setdefault(label, len(codes)) for label in plain])
    except (RuntimeError, TypeError) as error:
        raise SettingError("balanced(labels)", "a number or a name for each item", type(labels)) from error
    if coded.ndim != 1:
        raise SettingError("balanced(labels)", "a number or a name for each item", f"shape {tuple(coded.shape)}")
    return coded


def weighted(data: Any, weights: Weights, *, draws: int | None = None, replacement: bool = True, seed: int = 0) -> Node:
    """In each epoch, `draws` items chosen by weight; a function of the seed, the epoch and the place.

    With replacement each draw takes an item with probability weight / sum of weights. Without it the items that were
    drawn are out of the next draws of the epoch, so that with many draws the shares even out. An item of weight 0 is
    never drawn. Any number of items will do. Without replacement the order of an epoch is worked out when it begins.

    Args:   data: what can be read at any place; weights: one for each item, not negative; draws: items an epoch, by
            default as many as there are.
    Raises: SettingError for weights that are negative, not finite, or all 0, and for more draws without replacement
            than there are items with a weight.
    Source: without replacement, Efraimidis, Spirakis 2006, "Weighted random sampling with a reservoir".
    """
    node = source(data)
    if not isinstance(node, Indexed):
        raise SettingError("weighted(data)", "data that can be read at any place", node)
    return _Weighted(node, weights, draws, replacement, seed)


class _Weighted(Order):
    """Rows of the source by weight."""

    name = "weighted"
    purpose = DRAW

    def __init__(self, node: Indexed, weights: Weights, draws: int | None, replacement: bool, seed: int) -> None:
        super().__init__(node)
        whole("weighted(seed)", seed, None)
        self._replacement, self._seed, self._level = replacement, seed, node.depth(DRAW)
        there = node.count(0)
        w = _checked(weights, there)
        self._draws = there if draws is None else draws
        whole("weighted(draws)", self._draws)
        possible = int(w.count_nonzero())
        if not replacement and self._draws > possible:
            expected = f"at most {possible}, the items that have a weight, where replacement=False"
            raise SettingError("weighted(draws)", expected, self._draws)
        self._weights = w
        self._up_to = (w / w.max()).cumsum(0)  # a sum of very large ones would be infinite, one of very small ones 0
        self._kept: tuple[int, Table] = (-1, Kept(w))  # one epoch's; replaced as a whole, since threads may read two
        self._name = f"weighted {zlib.crc32(w.numpy().tobytes()):08x}, {self._draws} draws with seed {seed}"

    @property
    def rows(self) -> int:
        return self._draws

    @property
    def order(self) -> str:
        return f"{self.source.order}, {self._name}{'' if self._replacement else ' and no replacement'}"

    def places(self, epoch: int, indices: Indices) -> tuple[int, Indices]:
        kept = self._kept
        if kept[0] != epoch:
            kept = self._kept = (epoch, self._drawn(key(self._seed, DRAW, self._level, epoch)))
        return epoch, kept[1].at(indices)

    def _drawn(self, of: int) -> Table:
        if self._replacement:
            return Blocks(self._draws, functools.partial(self._with_replacement, of))
        return Kept(self._without_replacement(of))

    def _with_replacement(self, of: int, places: Tensor) -> Tensor:
        """For each draw a point on the line where the weights lie end to end, and the item that it falls on.

        An item of weight 0 ends where it begins, so that no point falls on it.
        """
        return torch.searchsorted(self._up_to, uniform(places, of) * self._up_to[-1:])

    def _without_replacement(self, of: int) -> Tensor:
        """The items in the order of the times at which clocks ring that run as fast as the weights.

        In logarithms, so that the time is infinite for a weight of 0 alone.
        """
        times = uniform(torch.arange(len(self._weights)), of).log_().neg_().log_().sub_(self._weights.log())
        return torch.topk(times, self._draws, largest=False, sorted=True).indices

    def settings(self) -> tuple[str, ...]:
        return (f"draws={self._draws}", *(() if self._replacement else ("replacement=False",)), f"seed={self._seed}")


def _checked(weights: Weights, there: int) -> Tensor:
    """The weights in float64, one for each of so many items."""
    try:
        w = torch.as_tensor(weights, dtype=torch.float64).detach().cpu()
    except (RuntimeError, TypeError, ValueError) as error:
        raise SettingError("weighted(weights)", "a sequence of numbers, or a tensor", type(weights)) from error
    if w.ndim != 1 or len(w) != there:
        raise SettingError("weighted(weights)", f"one for each of {there} items", f"shape {tuple(w.shape)}")
    wrong = (w.isfinite() & (w >= 0)).logical_not_().nonzero()
    if len(wrong) or not bool(w.any()):
        got = f"{float(w[wrong[0]])} for item {int(wrong[0])}" if len(wrong) else "nothing but 0"
        raise SettingError("weighted(weights)", "finite, not negative, and not all 0", got)
    return w


Ends = Literal["all", "first"]


def mix(streams: Iterable[Any], weights: Sequence[float] | None = None, *, ends: Ends = "all", seed: int = 0) -> Node:
    """Items of several streams, each item from one that is chosen by weight; a function of the seed and the place.

    Args:   streams: streams, or what `source` takes; weights: above 0, by default equal; ends: "all", when each has
            given its epoch out, the others going on without those that have ended; "first", when one has. Streams that
            are in the middle of an epoch then skip the rest of it. `repeat(stream)` makes one endless.
    Raises: SettingError for other weights.
    """
    whole("mix(seed)", seed, None)
    nodes = tuple(map(source, streams))
    if not nodes:
        raise SettingError("mix(streams)", "one stream at least", nodes)
    try:
        shares = tuple([1.0] * len(nodes) if weights is None else map(float, weights))
    except (TypeError, ValueError):
        shares = ()
    if len(shares) != len(nodes) or not all(0 < share < float("inf") for share in shares):
        raise SettingError("mix(weights)", f"{len(nodes)} numbers, each positive and finite", weights)
    if ends not in ("all", "first"):
        raise SettingError("mix(ends)", "'all' or 'first'", ends)
    return _Mixed(nodes, shares, ends, seed)


class _Mixed(Node):
    """Items of several streams, drawn by weight."""

    name = kind = "mix"
    purpose = MIX

    def __init__(self, nodes: tuple[Node, ...], shares: tuple[float, ...], ends: Ends, seed: int) -> None:
        super().__init__(*nodes)
        self._weights, self._ends, self._seed = shares, ends, seed
        self._shares = [share / max(shares) for share in shares]  # whose sum is finite
        self._level = max(node.depth(MIX) for node in nodes)
        self._forget(0)

    def _forget(self, epoch: int) -> None:
        self._epoch, self._drawn = epoch, 0
        self._over = [False] * len(self.sources)

    def next(self) -> Any:
        while True:
            if all(self._over) or (self._ends == "first" and any(self._over)):
                self._end()
                raise StopIteration
            chosen = self._choice()
            self._drawn += 1
            try:
                return self.sources[chosen].next()
            except StopIteration:
                self._over[chosen] = True

    def _choice(self) -> int:
        """Which stream comes next: of those that go on, by weight."""
        going = [i for i, over in enumerate(self._over) if not over]
        of = key(self._seed, MIX, self._level, *self.address(self._epoch, self._drawn))
        point = (of >> 11) * 2.0**-53 * sum(self._shares[i] for i in going)
        for i in going:
            point -= self._shares[i]
            if point < 0:
                return i
        return going[-1]

    def _end(self) -> None:
        for node, over in zip(self.sources, self._over, strict=True):
            if not over:
                node.to_epoch(node.epoch + 1)
        self._forget(self._epoch + 1)

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def ranks(self) -> int:
        return max(node.ranks for node in self.sources)

    def to_epoch(self, epoch: int) -> None:
        for node in self.sources:
            node.to_epoch(epoch)
        self._forget(epoch)

    def get_state(self) -> dict[str, Any]:
        sources = [node.state_dict() for node in self.sources]
        return {"epoch": self._epoch, "drawn": self._drawn, "over": list(self._over), "sources": sources}

    def load(self, state: Mapping[str, Any]) -> None:
        epoch, drawn, over = number(state, "epoch"), number(state, "drawn"), state["over"]
        if [type(is_over) for is_over in over] != [bool] * len(self.sources):
            raise TypeError(f"over must be {len(self.sources)} times true or false, got {over!r}")
        for node, place in zip(self.sources, state["sources"], strict=True):
            node.load_state_dict(place)
        self._epoch, self._drawn, self._over = epoch, drawn, list(over)

    @property
    def order(self) -> str:
        return f"{len(self.sources)} streams, {', '.join(self.settings())}"

    def __len__(self) -> int:
        return sum(map(len, self.sources)) if self._ends == "all" else super().__len__()

    def settings(self) -> tuple[str, ...]:
        return (f"weights={self._weights}", f"ends={self._ends!r}", f"seed={self._seed}")
