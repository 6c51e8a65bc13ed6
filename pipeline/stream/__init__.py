"""Streams of batches that know their place: small nodes, each a function of the seed and the epoch, put together.

`batches` is the usual stream in one call; `source` and the rest make any other. All of them are nodes of torchdata.
"""

from pipeline.stream.batching import batch, split
from pipeline.stream.devices import pinned, to_device
from pipeline.stream.files import json_lines, lines, parquet, unfold
from pipeline.stream.lengths import bucket_by_length, token_budget
from pipeline.stream.loading import batches
from pipeline.stream.mapping import filter, map
from pipeline.stream.node import Node
from pipeline.stream.passes import repeat, take
from pipeline.stream.places import go_to, is_read_once, place_of
from pipeline.stream.prefetching import prefetch
from pipeline.stream.sampling import balanced, mix, weighted
from pipeline.stream.sharing import shard
from pipeline.stream.shuffling import shuffle
from pipeline.stream.sources import source
from pipeline.stream.workers import Processes, Threads

__all__ = [
    "Node",
    "Processes",
    "Threads",
    "balanced",
    "batch",
    "batches",
    "bucket_by_length",
    "filter",
    "go_to",
    "is_read_once",
    "json_lines",
    "lines",
    "map",
    "mix",
    "parquet",
    "pinned",
    "place_of",
    "prefetch",
    "repeat",
    "shard",
    "shuffle",
    "source",
    "split",
    "take",
    "to_device",
    "token_budget",
    "unfold",
    "weighted",
]
