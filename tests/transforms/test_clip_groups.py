"""`ClipByGroupNorm` and `ClipPerParameter`: against torch's clip of each set by itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline import ClipByGroupNorm, ClipPerParameter, Tensors, TrainState
from pipeline.errors import SettingError
from tests.transforms.test_clip import clipped_by_torch, ready, result, same_bits, shapes, tensors

factors = st.sampled_from([1.0, 0.25])  # powers of two: the mean is exact


@given(shapes=shapes, seed=st.integers(0, 2**16), max_norm=st.floats(1e-3, 10), factor=factors)
def test_each_parameter_as_torch_clips_it_to_the_bit(
    shapes: list[list[int]], seed: int, max_norm: float, factor: float
) -> None:
    sums = tensors(shapes, seed)
    ours = result(ClipPerParameter(max_norm)(ready(sums, update_factor=factor)))
    for name, value in sums.items():
        expected, _ = clipped_by_torch({name: value * factor}, max_norm, 2)
        assert same_bits(ours[name], expected[name]), name


@given(seed=st.integers(0, 2**16), limits=st.tuples(st.floats(1e-3, 10), st.floats(1e-3, 10)), factor=factors)
def test_each_group_as_torch_clips_it_to_the_bit(seed: int, limits: tuple[float, float], factor: float) -> None:
    names = {"0": "body.0.weight", "1": "body.0.bias", "2": "head.weight", "3": "scale"}
    sums = {names[n]: value for n, value in tensors([[4, 3], [4], [2, 4], []], seed).items()}
    clip = ClipByGroupNorm({"head.*": limits[0], "*.0.*": limits[1]})
    after = clip(ready(sums, update_factor=factor))
    ours = result(after)
    groups = {"head.*": (limits[0], ["head.weight"]), "*.0.*": (limits[1], ["body.0.weight", "body.0.bias"])}
    for pattern, (max_norm, members) in groups.items():
        expected, norm = clipped_by_torch({n: sums[n] * factor for n in members}, max_norm, 2)
        assert same_bits(after.facts[f"grad_norm/{pattern}"], norm)
        for name, grad in expected.items():
            assert same_bits(ours[name], grad), name
    assert same_bits(ours["scale"], sums["scale"] * factor)
    assert same_bits(after.facts["grad_norm/the rest"], sums["scale"].abs() * factor)


def test_the_first_pattern_that_matches_counts() -> None:
    sums = {"a.weight": torch.tensor([2.0]), "a.bias": torch.tensor([2.0])}
    ours = result(ClipByGroupNorm([("*.bias", 1.0), ("a.*", 0.5)])(ready(sums)))
    assert [float(ours[name]) for name in sums] == pytest.approx([0.5, 1.0], rel=1e-5)


def test_a_group_without_a_gradient_in_this_window_is_passed_over() -> None:
    after = ClipByGroupNorm({"a": 1.0, "z": 1.0})(ready({"a": torch.tensor([3.0, 4.0])}))
    assert set(after.facts) == {"grad_norm", "grad_norm/a", "clip_factor"}
    assert float(after.facts["clip_factor"]) == pytest.approx(0.2)


class TestSettings:
    @pytest.mark.parametrize("bad", [{}, [], None, 1.0, "a", [("a",)], [(1, 1.0)], {1: 1.0}, [torch.ones(2)]])
    def test_limits_of_another_form(self, bad: Any) -> None:
        with pytest.raises(SettingError, match=r"ClipByGroupNorm\.limits must be a mapping or a list of pairs"):
            ClipByGroupNorm(bad)

    @pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan, True, "1", torch.ones(())])
    def test_max_norm(self, bad: Any) -> None:
        with pytest.raises(SettingError, match=r"ClipByGroupNorm\.limits\['a'\] must be positive and finite"):
            ClipByGroupNorm({"a": bad})
        with pytest.raises(SettingError, match=r"ClipPerParameter\.max_norm must be positive and finite"):
            ClipPerParameter(bad)

    def test_mappings_and_pairs_are_one_and_what_is_given_may_change_afterwards(self) -> None:
        given = {"a": 1.0, "b": 2.0}
        clip = ClipByGroupNorm(given)
        assert clip == ClipByGroupNorm([("a", 1.0), ("b", 2.0)])
        assert clip != ClipByGroupNorm([("b", 2.0), ("a", 1.0)])
        given["a"] = 5.0
        assert clip.limits == (("a", 1.0), ("b", 2.0))

    @pytest.mark.parametrize(("limits", "pattern"), [({"b.*": 1.0}, "b.*"), ({"*": 1.0, "a.*": 1.0}, "a.*")])
    def test_a_pattern_that_is_the_first_for_no_parameter_is_an_error_when_the_state_is_made(
        self, limits: dict[str, float], pattern: str
    ) -> None:
        state = TrainState(Tensors({"a.weight": torch.ones(2)}))
        with pytest.raises(SettingError, match=r"must be the first to match some parameter.*a\.weight") as caught:
            ClipByGroupNorm(limits).init(state)
        assert caught.value.got == pattern
        assert ClipByGroupNorm({"a.*": 1.0}).init(state) is state
