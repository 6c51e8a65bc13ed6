"""Orders: permutations, draws by weight, mixtures. Each is a function of the seed and the epoch, and fair."""

from __future__ import annotations

import math
from collections import Counter
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline import stream
from pipeline._splitmix import splitmix64
from pipeline.errors import SettingError
from pipeline.stream import _permutation
from pipeline.stream._keys import key, mixed, uniform
from pipeline.stream._permutation import feistel, permutation
from tests.stream import work
from tests.stream.cases import END, by_epoch, read


def within(count: int, n: int, p: float, sigmas: float = 5.0) -> bool:
    """Whether a count is what n draws with probability p give, within so many standard deviations."""
    return abs(count - n * p) <= sigmas * math.sqrt(n * p * (1 - p)) + 1e-9


def epochs(node: Any, n: int) -> list[list[Any]]:
    return [[*node] for _ in range(n)]


# -- permutations -----------------------------------------------------------------------------------------------------


@given(x=st.integers(0, 2**63 - 1), of=st.integers(0, 2**64 - 1))
def test_the_mixer_over_tensors_is_the_one_over_numbers(x: int, of: int) -> None:
    (ours,) = mixed(torch.tensor([x]), of).tolist()
    assert ours % 2**64 == splitmix64((x + of) % 2**64)


@given(n=st.integers(1, 3000), of=st.integers(0, 2**64 - 1))
def test_the_network_gives_each_number_once(n: int, of: int) -> None:
    assert sorted(feistel(torch.arange(n), n, of).tolist()) == list(range(n))


@pytest.mark.parametrize("n", [100, _permutation._SMALL, _permutation._SMALL + 1, 70_001])
def test_a_permutation_gives_each_number_once_and_the_same_however_it_is_asked(n: int) -> None:
    order = permutation(n, 5)
    whole = order.at(range(n))
    assert torch.equal(whole.sort().values, torch.arange(n))
    places = torch.randint(n, (50,), generator=torch.Generator().manual_seed(0))
    for start, stop, step in ((0, 7, 1), (n - 90, n, 1), (3, n, 7), (5, n, 40), (n // 2, n // 2, 1)):
        assert torch.equal(order.at(range(start, stop, step)), whole[start:stop:step])
    assert torch.equal(order.at(places), whole[places])
    assert not torch.equal(whole, permutation(n, 6).at(range(n)))


@pytest.mark.parametrize("n", [5, 60])
def test_every_place_is_as_likely_for_every_number(n: int) -> None:
    # Over many keys, what stands at the first places: chi-squared, whose mean is n - 1 and variance 2 (n - 1).
    for draw in (feistel, lambda places, n, of: permutation(n, of).at(places)):
        for place in (0, n - 1):
            seen = Counter(int(draw(torch.tensor([place]), n, key(of))) for of in range(10 * n))
            squared = sum((seen[i] - 10) ** 2 / 10 for i in range(n))
            assert squared < n - 1 + 5 * math.sqrt(2 * (n - 1))


def test_a_billion_items_are_shuffled_without_a_list_of_them() -> None:
    node = stream.batch(stream.shuffle(range(10**9), seed=1), 1000, collate=list)
    node.load_state_dict({**node.state_dict(), "row": 10**9 - 2500})
    tail = [*node]
    assert list(map(len, tail)) == [1000, 1000, 500]
    found = {item for batch in tail for item in batch}
    assert len(found) == 2500
    assert all(0 <= item < 10**9 for item in found)


def test_another_seed_or_epoch_is_another_order_and_the_same_ones_are_the_same() -> None:
    def orders(seed: int) -> list[list[int]]:
        return epochs(stream.shuffle(range(50), seed=seed), 3)

    seen = [*orders(0), *orders(1)]
    assert len({tuple(order) for order in seen}) == 6
    assert all(sorted(order) == list(range(50)) for order in seen)
    assert orders(0) + orders(1) == seen


def test_shuffling_draws_from_no_generator_of_the_users() -> None:
    before = torch.get_rng_state()
    epochs(stream.shuffle(range(50)), 2)
    epochs(stream.shuffle(by_epoch, buffer=3), 2)
    epochs(stream.weighted(range(5), [1.0] * 5), 2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("buffer", [1, 2, 7, 100])
def test_a_buffer_moves_no_item_further_than_it_is_long(buffer: int) -> None:
    found = [*stream.shuffle(lambda epoch: range(40), buffer=buffer, seed=2)]
    assert sorted(found) == list(range(40))
    assert max(abs(item - place) for place, item in enumerate(found)) < buffer
    assert (found == list(range(40))) == (buffer == 1)


def test_a_buffer_is_refilled_item_by_item() -> None:
    read_so_far: list[int] = []
    node = stream.shuffle(stream.map(lambda epoch: range(100), lambda x: read_so_far.append(x) or x), buffer=10)
    counts = []
    for _ in range(20):
        next(node)
        counts.append(len(read_so_far))
    assert counts == [*range(11, 31)]


# -- by weight ---------------------------------------------------------------------------------------------------------


def test_numbers_are_even_and_never_0_or_1() -> None:
    drawn = uniform(torch.arange(100_000), key(3))
    assert 0 < float(drawn.min()) < 1e-3
    assert 1 - 1e-3 < float(drawn.max()) < 1
    counts = torch.histc(drawn, 10, 0, 1).long().tolist()
    assert all(within(count, 100_000, 0.1) for count in counts)


def test_items_come_as_often_as_their_weights_say() -> None:
    weights = [1.0, 0.0, 2.0, 0.5, 0.0, 6.5, 0.0]
    n = 40_000
    seen = Counter([*stream.weighted(range(7), weights, draws=n, seed=4)])
    assert all(within(seen[i], n, weight / 10) for i, weight in enumerate(weights))
    assert not seen[1] + seen[4] + seen[6]


def test_without_replacement_the_first_draws_are_by_weight_and_nothing_comes_twice() -> None:
    weights, n = [1.0, 2.0, 3.0, 0.0, 4.0], 4000
    firsts: Counter[int] = Counter()
    seconds_after_four: Counter[int] = Counter()
    for order in epochs(stream.weighted(range(5), weights, replacement=False, draws=4, seed=1), n):
        assert sorted(order) == [0, 1, 2, 4]
        firsts[order[0]] += 1
        if order[0] == 4:
            seconds_after_four[order[1]] += 1
    assert all(within(firsts[i], n, weight / 10) for i, weight in enumerate(weights))
    rest = sum(seconds_after_four.values())
    assert all(within(seconds_after_four[i], rest, weights[i] / 6) for i in range(3))


@pytest.mark.parametrize("replacement", [True, False])
def test_there_may_be_more_items_than_two_to_the_24(replacement: bool) -> None:
    n = 2**24 + 3
    weights = torch.zeros(n)
    weights[[0, 2**24 - 1, 2**24 + 1]] = torch.tensor([1.0, 1.0, 2.0])
    node = stream.weighted(range(n), weights, draws=3 if not replacement else 400, replacement=replacement)
    seen = Counter([*node])
    assert set(seen) == {0, 2**24 - 1, 2**24 + 1}
    if replacement:
        assert within(seen[2**24 + 1], 400, 0.5)


def test_draws_differ_between_epochs_and_seeds() -> None:
    seen = [epochs(stream.weighted(range(30), [1.0] * 30, seed=seed), 2) for seed in range(2)]
    assert len({tuple(order) for pair in seen for order in pair}) == 4


def test_balanced_weights_draw_every_class_as_often() -> None:
    labels = ["cat"] * 2 + ["dog"] * 90 + ["eel"] * 8
    assert torch.allclose(stream.balanced(labels), torch.tensor([1 / 2] * 2 + [1 / 90] * 90 + [1 / 8] * 8).double())
    numbers = torch.tensor([7, 7, 3])
    assert stream.balanced(numbers).tolist() == [0.5, 0.5, 1.0]
    n = 9000
    seen = Counter([labels[i] for i in stream.weighted(range(100), stream.balanced(labels), draws=n)])
    assert all(within(seen[name], n, 1 / 3) for name in ("cat", "dog", "eel"))


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: stream.weighted(range(3), [1, 1]), "one for each of 3 items"),
        (lambda: stream.weighted(range(2), [0, 0]), "not all 0"),
        (lambda: stream.weighted(range(2), [1, -1]), "not negative"),
        (lambda: stream.weighted(range(2), [1, math.nan]), "finite"),
        (lambda: stream.weighted(range(2), [1, math.inf]), "finite"),
        (lambda: stream.weighted(range(2), [1, 1], draws=0), r"weighted\(draws\) must be a whole number"),
        (lambda: stream.weighted(range(3), [1, 1, 0], replacement=False), "at most 2, the items that have a weight"),
        (lambda: stream.weighted(by_epoch, [1]), "read at any place"),
        (lambda: stream.mix([]), "one stream at least"),
        (lambda: stream.mix([[1], [2]], [1]), "2 numbers"),
        (lambda: stream.mix([[1], [2]], [1, 0]), "each positive"),
        (lambda: stream.mix([[1], [2]], ends="last"), "'all' or 'first'"),
        (lambda: stream.weighted(range(2), ["a", "b"]), "a sequence of numbers"),
        (lambda: stream.weighted(range(2), iter([1, 1])), "a sequence of numbers"),
        (lambda: stream.mix([[1], [2]], ["a", 1]), "2 numbers"),
        (lambda: stream.balanced([[1], [2]]), "a number or a name for each item"),
        (lambda: stream.balanced(torch.ones(2, 2)), r"a number or a name for each item, got 'shape \(2, 2\)'"),
        (lambda: stream.balanced([torch.ones(2)]), "a number or a name for each item"),
        (lambda: stream.shuffle(stream.repeat(range(3))), r"with an end.*`repeat\(shuffle\(data\)\)`"),
        (lambda: stream.shuffle(range(3), buffer=0), r"shuffle\(buffer\)"),
        (lambda: stream.take(range(3), 0), r"take\(n\)"),
        (lambda: stream.repeat(range(3), 0), r"repeat\(passes\)"),
    ],
)
def test_settings_are_checked(build: Any, says: str) -> None:
    with pytest.raises(SettingError, match=says):
        build()


# -- mixtures, takes, repeats -----------------------------------------------------------------------------------------


def test_a_mixture_takes_from_each_stream_by_weight_and_in_its_order() -> None:
    a, b = stream.repeat(["a"]), stream.repeat(["b"])
    n = 5000
    seen = Counter(islice(iter(stream.mix([a, b], [1, 3], seed=2)), n))
    assert within(seen["a"], n, 0.25)
    mixed_ = [*stream.mix([range(10), range(100, 130)], [1, 3])]
    assert [x for x in mixed_ if x < 100] == list(range(10))
    assert [x for x in mixed_ if x >= 100] == list(range(100, 130))


def test_a_mixture_may_end_with_the_first_stream_and_begins_all_anew() -> None:
    node = stream.mix([stream.shuffle(range(1000)), range(5000, 5005)], ends="first", seed=3)
    first, second = epochs(node, 2)
    for found in (first, second):
        assert [x for x in found if x >= 5000] == list(range(5000, 5005))
    assert len(first) < 40
    orders = epochs(stream.shuffle(range(1000)), 2)
    for found, order in zip((first, second), orders, strict=True):
        taken = [x for x in found if x < 1000]
        assert taken == order[: len(taken)]


def test_a_mixture_draws_another_order_in_each_epoch() -> None:
    orders = epochs(stream.mix([range(20), range(100, 120)]), 2)
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


def test_taking_begins_at_the_start_of_each_epoch() -> None:
    for data in (range(5), lambda epoch: range(5)):
        assert epochs(stream.take(data, 2), 2) == [[0, 1], [0, 1]]
    shuffled = stream.shuffle(range(50))
    assert epochs(stream.take(shuffled, 3), 2) == [order[:3] for order in epochs(shuffled, 2)]


def test_repeating_goes_through_the_epochs_of_the_source() -> None:
    for data in (stream.shuffle(range(5)), by_epoch):
        whole = read(stream.source(data), 40)
        items = [item for item in whole if item != END]
        twice = epochs(stream.repeat(data, 2), 2)
        assert [item for epoch in twice for item in epoch] == items[: len(twice[0]) * 2]
    assert [*islice(iter(stream.repeat(range(3))), 8)] == [0, 1, 2, 0, 1, 2, 0, 1]


def test_a_batch_may_reach_over_the_end_of_a_repeated_epoch() -> None:
    columns = torch.arange(5)
    batches = [*stream.batch(stream.repeat(columns, 2), 4)]
    assert [batch.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4]]
    rows = [*stream.batch(stream.repeat(range(5), 2), 4, collate=list)]
    assert rows == [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4]]


def test_a_stream_without_an_end_has_no_length_and_one_that_gives_nothing_says_so() -> None:
    for node in (stream.repeat(range(3)), stream.batch(stream.repeat(range(3)), 2), stream.repeat(by_epoch)):
        with pytest.raises(TypeError, match="does not know its length"):
            len(node)
    assert len(stream.take(stream.repeat(range(3)), 7)) == 7
    with pytest.raises(ValueError, match="would never end"):
        next(stream.repeat(stream.filter(lambda epoch: range(3), lambda x: False)))


# -- with one seed ----------------------------------------------------------------------------------------------------


def test_a_shuffle_of_a_shuffle_is_as_random_as_one_though_they_have_one_seed() -> None:
    # The same permutation twice leaves 3 items as they are in 4 of 6 cases, two permutations in 1 of 6.
    n = 1200
    for data in (range(3), lambda epoch: range(3)):
        same = sum([*stream.shuffle(stream.shuffle(data, seed=i), seed=i)] == [0, 1, 2] for i in range(n))
        assert within(same, n, 1 / 6)


def test_a_mixture_of_a_mixture_draws_from_all_though_they_have_one_seed() -> None:
    n = 2000
    firsts = Counter(next(stream.mix([stream.mix([["a"], ["b"]], seed=i), ["c"]], seed=i)) for i in range(n))
    assert all(within(firsts[name], n, p) for name, p in (("a", 0.25), ("b", 0.25), ("c", 0.5)))


def test_draws_of_draws_are_even_though_they_have_one_seed() -> None:
    # The same draws twice would give the first item in 5 of 9 cases, two draws give it in 1 of 3.
    n = 2000
    kept = sum(
        next(stream.weighted(stream.weighted(range(3), [1] * 3, seed=i), [1] * 3, seed=i)) == 0 for i in range(n)
    )
    assert within(kept, n, 1 / 3)


def test_batches_by_length_of_a_buffer_are_drawn_by_themselves() -> None:
    # All lengths are equal, so that nothing but chance orders the items; the same chance twice would show as above.
    n = 1200
    same = 0
    for i in range(n):
        buffer = stream.shuffle(lambda epoch: range(3), buffer=3, seed=i)
        batches = stream.bucket_by_length(buffer, 3, length=lambda item: 1, collate=list, seed=i)
        same += [*batches] == [[0, 1, 2]]
    assert within(same, n, 1 / 6)


def test_what_is_drawn_more_often_than_there_is_has_numbers_of_its_own() -> None:
    source = stream.repeat(range(3), 2)
    node = stream.map(stream.weighted(source, [1] * 6, draws=24), work.tokens, seed=1)
    drawn = [number for _ in range(2) for _, number in node]
    assert len(set(drawn)) == 48


@pytest.mark.parametrize("weights", [[1e308, 1e308, 0.0], [0.0, 5e-324, 5e-324], [1e-320, 0.0, 1e-320]])
@pytest.mark.parametrize("replacement", [True, False])
def test_weights_may_be_as_large_and_as_small_as_numbers_are(weights: list[float], replacement: bool) -> None:
    n = 300
    seen: Counter[int] = Counter()
    for order in epochs(stream.weighted(range(3), weights, draws=1, replacement=replacement), n):
        seen.update(order)
    assert all(within(seen[i], n, 0.5 if weight else 0.0) for i, weight in enumerate(weights))
    if not replacement:
        drawn = epochs(stream.weighted(range(3), [1e-320, 0, 1], draws=2, replacement=False), 30)
        assert all(sorted(order) == [0, 2] for order in drawn)
    seen = Counter(stream.take(stream.mix([stream.repeat(["a"]), stream.repeat(["b"])], [1e308, 1e308]), n))
    assert within(seen["a"], n, 0.5)


def test_weights_may_be_part_of_a_graph_and_labels_tensors() -> None:
    assert len([*stream.weighted(range(2), torch.ones(2, requires_grad=True))]) == 2
    assert stream.balanced([torch.tensor(0), torch.tensor(0), torch.tensor(1)]).tolist() == [0.5, 0.5, 1.0]
    assert stream.balanced([]).tolist() == []


def test_wrong_weights_are_told_by_the_first_of_them_and_not_all_shown() -> None:
    with pytest.raises(SettingError, match=r"got '-1\.0 for item 7'") as failure:
        stream.weighted(range(10**4), [1.0] * 7 + [-1.0] * (10**4 - 7))
    assert len(str(failure.value)) < 200


@pytest.mark.parametrize("seed", [None, 1.5, "a", True])
@pytest.mark.parametrize(
    "build",
    [
        lambda seed: stream.shuffle(range(3), seed=seed),
        lambda seed: stream.shuffle(by_epoch, seed=seed),
        lambda seed: stream.weighted(range(3), [1] * 3, seed=seed),
        lambda seed: stream.mix([[1]], seed=seed),
        lambda seed: stream.bucket_by_length(["a"], 1, seed=seed),
        lambda seed: stream.token_budget(["a"], 1, seed=seed),
        lambda seed: stream.source([1], seed=seed or 1.5),
        lambda seed: stream.map([1], work.tokens, seed=seed or 1.5),
        lambda seed: stream.batches([1], 1, seed=seed or 1.5),
    ],
)
def test_a_seed_is_a_whole_number(build: Any, seed: Any) -> None:
    with pytest.raises(SettingError, match=r"\(seed\) must be a whole number, got"):
        build(seed)


def test_any_whole_number_is_a_seed() -> None:
    orders = {tuple(stream.shuffle(range(20), seed=seed)) for seed in (-1, 0, 1, 2**63)}
    assert len(orders) == 4
