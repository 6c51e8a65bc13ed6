"""The global norm and `ClipByGlobalNorm`: against torch, and where torch gives up."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from pipeline import ClipByGlobalNorm, ClipPerParameter, Frame
from pipeline.errors import MissingFieldError, SettingError
from pipeline.testing import frame
from pipeline.transforms import global_norm

INF = math.inf
EPS = torch.finfo(torch.float32).eps
NORMS = pytest.mark.parametrize("p", [1, 2, INF])
shapes = st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=6)


def tensors(shapes: list[list[int]], seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {str(i): scale * torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)}


def ready(sums: dict[str, Any], **more: Any) -> Frame:
    return frame({name: torch.zeros(value.shape) for name, value in sums.items()}, sums=sums, ready=True, **more)


def result(after: Frame) -> dict[str, Tensor]:
    """The gradients that the optimizer will see, dense."""
    return {name: g.to_dense() * after.update_factor for name, g in after.state.window.grads.items()}


def clipped_by_torch(sums: dict[str, Tensor], max_norm: float, p: float) -> tuple[dict[str, Tensor], Tensor]:
    # Torch has no largest magnitude of nothing, and raises.
    params = {n: nn.Parameter(torch.zeros_like(g)) for n, g in sums.items() if g.numel() or p != INF}
    for name, param in params.items():
        param.grad = sums[name].clone()
    norm = nn.utils.clip_grad_norm_(params.values(), max_norm, p)
    return {name: param.grad for name, param in params.items() if param.grad is not None}, norm


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5))


class TestParityWithTorch:
    @NORMS
    @given(shapes=shapes, seed=st.integers(0, 2**16), max_norm=st.floats(1e-3, 1e3))
    def test_norm_and_gradients_are_torchs_to_the_bit(
        self, p: float, shapes: list[list[int]], seed: int, max_norm: float
    ) -> None:
        sums = tensors(shapes, seed)
        expected, norm = clipped_by_torch(sums, max_norm, p)
        after = ClipByGlobalNorm(max_norm, p=p)(ready(sums))
        assert same_bits(after.facts["grad_norm" if p == 2 else f"grad_norm_{p:g}"], norm)
        ours = result(after)
        for name, grad in expected.items():
            assert same_bits(ours[name], grad), name

    @NORMS
    @given(seed=st.integers(0, 2**16), windows=st.integers(1, 9))
    def test_sums_are_clipped_as_the_mean_that_they_stand_for(self, p: float, seed: int, windows: int) -> None:
        sums = tensors([[4, 3], [3], []], seed, scale=windows)
        expected, _ = clipped_by_torch({n: g / windows for n, g in sums.items()}, 0.5, p)
        ours = result(ClipByGlobalNorm(0.5, p=p)(ready(sums, update_factor=1.0 / windows)))
        for name, grad in expected.items():
            torch.testing.assert_close(ours[name], grad, rtol=8 * EPS, atol=0.0)

    def test_mixed_precisions_are_one_list(self) -> None:
        sums = {"a": torch.randn(5, dtype=torch.float64), "b": torch.randn(4), "c": torch.randn(3, 2).bfloat16()}
        norm = ClipByGlobalNorm(0.1)(ready(sums)).facts["grad_norm"]
        assert norm.dtype is torch.float64
        assert float(norm) == pytest.approx(sum(float((g.double() ** 2).sum()) for g in sums.values()) ** 0.5, rel=1e-2)

    def test_tensors_on_other_devices_are_one_list_on_the_first_ones(self) -> None:
        # Tensors of the device `meta` have no values: that nothing raises is what can be seen.
        given = [torch.ones(2, device="meta"), torch.ones(3)]
        assert [global_norm(given, p).device.type for p in (1, 2, INF)] == ["meta"] * 3


class TestWhatIsMeasured:
    def test_grad_norm_is_the_l2_norm_whatever_is_clipped(self) -> None:
        sums = {"a": torch.tensor([3.0, -4.0])}
        for p, name, norm in ((1, "grad_norm_1", 7.0), (INF, "grad_norm_inf", 4.0)):
            after = ClipByGlobalNorm(1.0, p=p)(ready(sums))
            assert float(after.facts["grad_norm"]) == 5.0
            assert float(after.facts[name]) == norm
            assert float(after.facts["clip_factor"]) == pytest.approx(1 / norm)
        assert set(ClipByGlobalNorm(1.0)(ready(sums)).facts) == {"grad_norm", "clip_factor"}

    def test_two_clips_report_the_norm_before_both_and_the_product_of_their_factors(self) -> None:
        after = ClipByGlobalNorm(1.0)(ClipByGlobalNorm(2.0)(ready({"a": torch.tensor([3.0, 4.0])})))
        assert float(after.facts["grad_norm"]) == 5.0
        assert float(after.facts["clip_factor"]) == pytest.approx(0.2)
        torch.testing.assert_close(result(after)["a"], torch.tensor([0.6, 0.8]))

    def test_a_rewriting_clip_hands_on_the_norm_of_what_it_wrote(self) -> None:
        first = ClipPerParameter(0.5)(ready(tensors([[4, 3], [3], []], 0, 3.0), update_factor=0.25))
        known = first.sum_norm
        assert known is not None
        assert known[0] is first.state.window.grads
        torch.testing.assert_close(known[1], global_norm(known[0].flat), rtol=4 * EPS, atol=0.0)
        second = ClipByGlobalNorm(0.1)(first)
        assert float(global_norm(result(second).values())) == pytest.approx(0.1, rel=1e-4)


class TestOverflowOfTheNorm:
    """A finite gradient whose squares are not is scaled right, and never to zeros."""

    @NORMS
    def test_a_hundred_elements_of_1e20(self, p: float) -> None:
        norm = {1: 1e22, 2: 1e21, INF: 1e20}[p]
        after = ClipByGlobalNorm(1.0, p=p)(ready({"a": torch.full((100,), 1e20)}))
        assert float(after.facts["grad_norm"]) == pytest.approx(1e21, rel=1e-6)
        torch.testing.assert_close(result(after)["a"], torch.full((100,), 1e20 / norm), rtol=1e-6, atol=0.0)

    def test_each_norm_is_finite_and_only_the_norm_of_the_norms_is_not(self) -> None:
        after = ClipByGlobalNorm(1.0)(ready({str(i): torch.tensor([1e19]) for i in range(4)}))
        assert float(after.facts["grad_norm"]) == pytest.approx(2e19, rel=1e-6)
        assert [float(g) for g in result(after).values()] == pytest.approx([0.5] * 4, rel=1e-6)

    @given(exponent=st.integers(-18, 29), shapes=shapes, seed=st.integers(0, 2**16))
    def test_the_norm_is_right_over_the_whole_range(self, exponent: int, shapes: list[list[int]], seed: int) -> None:
        given = list(tensors(shapes, seed, 10.0**exponent).values())
        exact = math.sqrt(sum(float((g.double() ** 2).sum()) for g in given))
        assert float(global_norm(given)) == pytest.approx(exact, rel=1e-6)

    @pytest.mark.parametrize("dtype", [torch.complex64, torch.float16])
    def test_other_dtypes(self, dtype: torch.dtype) -> None:
        large = 3e20 + 4e20j if dtype.is_complex else 30000.0
        norm = global_norm([torch.full((16,), large, dtype=dtype), torch.zeros(3, dtype=dtype)])
        assert norm.dtype is torch.float32
        assert float(norm) == pytest.approx(4 * abs(large), rel=1e-3)

    def test_a_norm_whose_inverse_would_leave_float32_is_infinite_and_not_a_silent_zero(self) -> None:
        assert float(global_norm([torch.full((100,), 1e29)])) == pytest.approx(1e30, rel=1e-6)
        assert float(global_norm([torch.full((100,), 1e30)])) == INF
        assert float(global_norm([torch.full((100,), 1e30, dtype=torch.float64)])) == pytest.approx(1e31)

    def test_a_traced_norm_is_right_without_a_look_at_any_value(self) -> None:
        traced = make_fx(lambda a, b: global_norm([a, b]))(torch.ones(3), torch.ones(2, 2))
        assert float(traced(torch.full((3,), 1e20), torch.full((2, 2), 1e20))) == pytest.approx(7**0.5 * 1e20, rel=1e-6)
        assert float(traced(torch.ones(3), torch.ones(2, 2))) == pytest.approx(7**0.5, rel=1e-6)

    @pytest.mark.parametrize("bad", [INF, -INF, math.nan])
    def test_an_infinity_or_nan_stays_one(self, bad: float) -> None:
        for p in (1, 2, INF):
            assert not math.isfinite(float(global_norm([torch.ones(3), torch.tensor([1e20, bad])], p)))


class TestOddGradients:
    def test_duplicates_of_a_sparse_gradient_are_added_up_first(self) -> None:
        sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.full((2, 3), 2.0), (4, 3), check_invariants=True)
        assert not sparse.is_coalesced()
        for p in (1, 2, INF):
            assert float(global_norm([sparse], p)) == float(global_norm([sparse.to_dense()], p))
        after = ClipByGlobalNorm(1.0)(ready({"a": sparse}))
        assert float(after.facts["grad_norm"]) == pytest.approx(48**0.5)
        assert float(result(after)["a"][1].norm()) == pytest.approx(1.0, rel=1e-6)
        assert not sparse.is_coalesced()

    def test_complex_gradients_count_by_their_magnitude(self) -> None:
        given = {"a": torch.tensor([3 + 4j, 0j]), "b": torch.tensor([12.0])}
        assert [float(global_norm(given.values(), p)) for p in (1, 2, INF)] == [17.0, 13.0, 12.0]
        clipped = result(ClipByGlobalNorm(1.3)(ready(given)))["a"]
        torch.testing.assert_close(clipped, torch.tensor([0.3 + 0.4j, 0j]))

    @NORMS
    def test_empty_ones_and_none_at_all(self, p: float) -> None:
        empty = torch.zeros(0, 3)
        assert float(global_norm([], p)) == 0.0
        assert float(global_norm([empty], p)) == 0.0
        assert float(global_norm([empty, torch.tensor(-2.0)], p)) == 2.0
        after = ClipByGlobalNorm(1.0, p=p)(ready({}, micro_batches=1))
        assert float(after.facts["grad_norm"]) == 0.0
        assert float(after.update_factor) == 1.0


class TestSettings:
    @pytest.mark.parametrize("bad", [0.0, -1.0, INF, math.nan, True, "1", None, torch.ones(())])
    def test_max_norm(self, bad: Any) -> None:
        with pytest.raises(SettingError, match=r"ClipByGlobalNorm\.max_norm must be positive and finite"):
            ClipByGlobalNorm(bad)

    @pytest.mark.parametrize("bad", [0, 3, -INF, math.nan, True, "inf", torch.ones(2)])
    def test_p(self, bad: Any) -> None:
        with pytest.raises(SettingError, match=r"ClipByGlobalNorm\.p must be 1, 2 or infinity"):
            ClipByGlobalNorm(1.0, p=bad)

    def test_it_prints_as_it_was_written_and_compares_by_value(self) -> None:
        assert repr(ClipByGlobalNorm(1.0)) == "ClipByGlobalNorm(max_norm=1.0)"
        assert repr(ClipByGlobalNorm(1.0, p=INF)) == "ClipByGlobalNorm(max_norm=1.0, p=inf)"
        assert ClipByGlobalNorm(1.0) == ClipByGlobalNorm(1.0, p=2)
        assert ClipByGlobalNorm(1.0) != ClipByGlobalNorm(1.0, p=1)

    def test_a_window_that_is_full_of_nothing_is_an_error_with_a_cure(self) -> None:
        with pytest.raises(MissingFieldError, match="put it after ScaledBackward and Accumulate"):
            ClipByGlobalNorm(1.0)(frame({"w": [1.0]}, ready=True))
