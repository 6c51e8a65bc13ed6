"""`batches`: the usual stream, in one call."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import default_collate

from pipeline.stream._collate import Collate
from pipeline.stream._guard import Errors
from pipeline.stream._indexed import Indexed
from pipeline.stream._parallel import Workers, checked
from pipeline.stream.batching import batch
from pipeline.stream.devices import pinned, to_device
from pipeline.stream.mapping import map
from pipeline.stream.node import Node
from pipeline.stream.passes import repeat
from pipeline.stream.prefetching import prefetch
from pipeline.stream.sampling import Weights, weighted
from pipeline.stream.sharing import Uneven, shard
from pipeline.stream.shuffling import shuffle as shuffled
from pipeline.stream.sources import source

__all__ = ["batches"]


def batches(
    data: Any,
    batch_size: int,
    *,
    shuffle: bool = False,
    weights: Weights | None = None,
    seed: int = 0,
    buffer: int = 1000,
    epochs: int = 1,
    rank: int = 0,
    world: int = 1,
    uneven: Uneven = "drop",
    drop_last: bool = False,
    collate: Collate = default_collate,
    workers: Workers = None,
    ahead: int = 0,
    errors: Errors = "raise",
    pin: bool = False,
    device: torch.device | str | None = None,
) -> Node:
    """Batches of a dataset: `source`, `shuffle` or `weighted`, `repeat`, `shard`, `batch`, workers, `prefetch`.

    Each part is told of where it is defined; whatever this does not do is a composition of them. An epoch's order, and
    what the items draw, is a function of the seed and the epoch.

    Args:   data: what `source` takes; batch_size: of one rank; shuffle: another order in each epoch, through a `buffer`
            where the data can only be read in a row; weights: draw by weight, in place of `shuffle`; epochs: passes
            over the data in one of the stream; rank, world, uneven: of `shard`; drop_last, collate: of `batch`;
            workers: who makes the batches, 0 or None for the reader itself; ahead: batches that a thread reads ahead
            besides; errors: "skip" to leave out items that could not be made; pin: batches in pinned memory; device:
            where they are to be.
    Raises: SettingError, when built.
    """
    node = source(data, seed=seed, errors=errors)
    if weights is not None:
        node = weighted(node, weights, seed=seed)
    elif shuffle:
        node = shuffled(node, seed=seed, buffer=buffer)
    if epochs != 1:
        node = repeat(node, epochs)
    if (rank, world) != (0, 1):
        node = shard(node, rank, world, uneven=uneven)
    if isinstance(node, Indexed):
        node = batch(node, batch_size, drop_last=drop_last, collate=collate)
        node = node if checked("batches(workers)", workers) is None else prefetch(node, workers=workers)
    else:
        node = batch(node, batch_size, drop_last=drop_last, collate=list)
        node = map(node, collate, workers=workers)
    if device is not None:
        node = to_device(node, device)
    elif pin:
        node = pinned(node)
    return prefetch(node, ahead) if ahead else node
