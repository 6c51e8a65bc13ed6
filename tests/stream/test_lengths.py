"""Batches by length: the budget is kept, little is padded, nothing is lost, and a fold weighs every token the same."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from pipeline import (
    Accumulate,
    EmitEvents,
    Forward,
    Loss,
    MaybeStep,
    Optimizer,
    ScaledBackward,
    chain,
    fold,
    init,
    stream,
)
from pipeline.errors import SettingError, StreamError


def words(n: int, longest: int = 60) -> list[str]:
    """Most of them short, a few long."""
    draw = random.Random(0)
    return [f"{i:03}" + "x" * min(int(draw.paretovariate(1.2)) - 1, longest - 3) for i in range(n)]


def padded(batch: list[str]) -> int:
    return len(batch) * max(map(len, batch))


def wasted(batches: Any) -> float:
    batches = [*batches]
    return 1 - sum(len(word) for batch in batches for word in batch) / sum(map(padded, batches))


@given(lengths=st.lists(st.integers(0, 20), max_size=60), budget=st.integers(20, 70), pool=st.integers(1, 70))
def test_the_budget_is_kept_and_every_item_comes_once(lengths: list[int], budget: int, pool: int) -> None:
    items = [(i, length) for i, length in enumerate(lengths)]
    node = stream.token_budget(items, budget, length=lambda item: item[1], pool=pool, collate=list)
    for _ in range(2):
        batches = [*node]
        assert sorted(item for batch in batches for item in batch) == items
        assert all(len(batch) * max(length for _, length in batch) <= budget for batch in batches)


@given(lengths=st.lists(st.integers(0, 20), max_size=60), size=st.integers(1, 6), pool=st.integers(1, 10))
def test_buckets_are_full_but_for_the_last(lengths: list[int], size: int, pool: int) -> None:
    items = [(i, length) for i, length in enumerate(lengths)]
    settings: Any = {"length": lambda item: item[1], "pool": pool, "collate": list}
    node = stream.bucket_by_length(items, size, **settings)
    batches = [*node]
    assert len(node) == len(batches)
    assert sorted(item for batch in batches for item in batch) == items
    assert sum(len(batch) != size for batch in batches) <= 1
    node = stream.bucket_by_length(items, size, drop_last=True, **settings)
    batches = [*node]
    assert len(node) == len(batches)
    assert all(len(batch) == size for batch in batches)


def test_less_is_padded_than_in_fixed_batches() -> None:
    shuffled = stream.shuffle(words(1000))
    fixed = wasted(stream.batch(shuffled, 16, collate=list))
    assert wasted(stream.bucket_by_length(shuffled, 16, pool=20, collate=list)) < fixed / 2
    assert wasted(stream.token_budget(shuffled, 120, pool=320, collate=list)) < fixed / 3


def test_batches_come_in_another_random_order_in_each_epoch() -> None:
    for node in (
        stream.bucket_by_length(words(200), 8, collate=list),
        stream.token_budget(words(200), 120, collate=list),
    ):
        first, second = [*node], [*node]
        assert first != second
        for batches in (first, second):
            longest = [max(map(len, batch)) for batch in batches]
            assert longest != sorted(longest)


def test_none_is_left_out_however_many_there_are() -> None:
    rows = ["a", *[None] * 7, "b", None]
    for node in (
        stream.token_budget(rows, 9, pool=2, collate=list),
        stream.bucket_by_length(rows, 1, pool=2, collate=list),
    ):
        assert sorted(item for batch in node for item in batch) == ["a", "b"]
    assert sorted(map(sorted, stream.token_budget(["a", None, "b", None], 1, collate=list))) == [["a"], ["b"]]


def test_the_short_batch_that_is_left_out_is_that_of_the_epoch_though_there_are_none_among_the_items() -> None:
    rows = ["a", None, "b", "c", None, None, "d", "e", "f", "g"]
    node = stream.bucket_by_length(rows, 2, pool=2, drop_last=True, collate=list)
    batches = [*node]
    assert [*map(len, batches)] == [2, 2, 2]
    assert len({item for batch in batches for item in batch}) == 6


@pytest.mark.parametrize("length", [float("nan"), -1, float("inf")])
@pytest.mark.parametrize("build", [stream.token_budget, stream.bucket_by_length])
def test_a_length_that_is_none_is_told(build: Any, length: Any) -> None:
    with pytest.raises(StreamError, match=rf"got an item of length {length}: give a `length` that is 0 or more"):
        next(build(["a"], 8, length=lambda item: length, collate=list))
    with pytest.raises(TypeError) as failure:
        next(build(["a"], 8, length=lambda item: None, collate=list))
    assert "(length), at an item of epoch 0" in failure.value.__notes__[0]


def test_lengths_may_be_numbers_of_any_kind() -> None:
    for length in (lambda item: torch.tensor(len(item)), lambda item: float(len(item)), lambda item: len(item) / 2):
        batches = [*stream.token_budget(words(30), 60, length=length, collate=list)]
        assert sorted(item for batch in batches for item in batch) == words(30)


def test_an_item_above_the_budget_is_told_with_the_cure() -> None:
    with pytest.raises(StreamError, match=r"an item of length 9, above its budget: .*`filter`"):
        next(stream.token_budget(["abc", "abcdefghi"], 8, collate=list))


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: stream.token_budget(["a"], 0), r"token_budget\(tokens\)"),
        (lambda: stream.token_budget(["a"], 5, pool=0), r"token_budget\(pool\)"),
        (lambda: stream.token_budget(["a"], 5, length=3), r"token_budget\(length\)"),
        (lambda: stream.bucket_by_length(["a"], 0), r"bucket_by_length\(size\)"),
        (lambda: stream.bucket_by_length(["a"], 5, pool=0), r"bucket_by_length\(pool\)"),
    ],
)
def test_settings_are_checked(build: Any, says: str) -> None:
    with pytest.raises(SettingError, match=says):
        build()


# -- a fold over them --------------------------------------------------------------------------------------------------


class Bigram(nn.Module):
    """Logits for the next token from the present one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(
            torch.randn(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64), freeze=False
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


def next_token(model: Any, batch: tuple[Tensor, Tensor]) -> Loss:
    tokens, lengths = batch
    logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
    counted = torch.arange(targets.shape[1]) < (lengths - 1)[:, None]
    each = nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return Loss.sum(each[counted].sum(), weight=int(counted.sum()), tokens=int(counted.sum()))


def with_padding(items: list[Tensor]) -> tuple[Tensor, Tensor]:
    return pad_sequence(items, batch_first=True), torch.tensor([len(item) for item in items])


def test_a_window_over_batches_of_a_budget_gives_the_update_of_one_batch() -> None:
    chance = torch.Generator().manual_seed(1)
    sequences = [torch.randint(8, (n,), generator=chance) for n in (2, 9, 3, 3, 7, 12, 2, 5)]

    def trained(batches: Any, every: int) -> Tensor:
        model = Bigram()
        optimizer = Optimizer(torch.optim.SGD, lr=1.0)
        step = chain(
            Forward(model, next_token), ScaledBackward(), Accumulate(every=every), MaybeStep(optimizer), EmitEvents()
        )
        run = fold(step, init(step, model), batches)
        assert run.state.progress.updates == 1
        assert run.state.progress.tokens == sum(len(s) - 1 for s in sequences)
        return model.table.weight.detach()

    whole = trained([with_padding(sequences)], 1)
    budget = stream.token_budget(sequences, 16, collate=with_padding)
    sizes = [tokens.numel() for tokens, _ in budget]
    assert len(sizes) > 2
    assert max(sizes) <= 16
    assert torch.allclose(trained(budget, len(sizes) + 1), whole, rtol=0, atol=1e-12)
    halves = stream.split(stream.batch(sequences, 8, collate=with_padding), 3)
    assert torch.allclose(trained(halves, 3), whole, rtol=0, atol=1e-12)
