"""`ClipByValue`: against torch, and on complex numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipeline import ClipByValue
from pipeline.errors import SettingError
from tests.transforms.test_clip import EPS, ready, result, same_bits, shapes, tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(shapes=shapes, seed=st.integers(0, 2**16), limit=st.floats(1e-3, 10), factor=st.sampled_from([1.0, 0.25, 0.3]))
def test_the_normalised_gradient_is_torchs_to_the_bit(
    dtype: torch.dtype, shapes: list[list[int]], seed: int, limit: float, factor: float
) -> None:
    sums = {name: value.to(dtype) for name, value in tensors(shapes, seed).items()}
    params = [nn.Parameter(torch.zeros_like(g)) for g in sums.values()]
    for param, grad in zip(params, sums.values(), strict=True):
        param.grad = grad * factor
    nn.utils.clip_grad_value_(params, limit)
    after = ClipByValue(limit)(ready(sums, update_factor=factor))
    for param, grad in zip(params, result(after).values(), strict=True):
        assert same_bits(grad, param.grad)


def test_no_element_is_above_the_limit_even_where_a_factor_has_no_exact_form() -> None:
    grads = result(ClipByValue(0.1)(ready({"a": torch.full((4,), 7.0)}, update_factor=1 / 3)))
    assert torch.equal(grads["a"], torch.full((4,), 0.1))


def test_a_complex_number_keeps_its_phase() -> None:
    grads = result(ClipByValue(1.0)(ready({"a": torch.tensor([3 + 4j, 0.3 - 0.4j, 0j])})))["a"]
    torch.testing.assert_close(grads, torch.tensor([0.6 + 0.8j, 0.3 - 0.4j, 0j]), rtol=4 * EPS, atol=0.0)


def test_what_it_measures() -> None:
    after = ClipByValue(1.0)(ready({"a": torch.tensor([3.0, -4.0])}))
    assert float(after.facts["grad_norm"]) == 5.0
    assert float(after.facts["clip_factor"]) == pytest.approx(2**0.5 / 5)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan, True, "1", torch.ones(())])
def test_any_other_limit_is_refused(bad: Any) -> None:
    with pytest.raises(SettingError, match=r"ClipByValue\.limit must be positive and finite"):
        ClipByValue(bad)
