"""`AdaptiveClip`: against the paper's equation, unit by unit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeline import AdaptiveClip, Tensors, TrainState
from pipeline.errors import SettingError
from pipeline.testing import frame
from tests.transforms.test_clip import result, same_bits, shapes, tensors


def reference(params: dict[str, Tensor], grads: dict[str, Tensor], clip: float, eps: float) -> dict[str, Tensor]:
    """Brock et al. 2021, equation 3, one unit after the other."""

    def unit(grad: Tensor, weight: Tensor) -> Tensor:
        norm, limit = torch.linalg.vector_norm(grad), clip * max(torch.linalg.vector_norm(weight), torch.tensor(eps))
        return grad * (limit / norm) if norm > limit else grad.clone()

    clipped: dict[str, Tensor] = {}
    for name, grad in grads.items():
        if grad.ndim < 2:
            clipped[name] = unit(grad, params[name])
        else:
            rows = [unit(g, w) for g, w in zip(grad, params[name], strict=True)]
            clipped[name] = torch.stack(rows) if rows else grad.clone()
    return clipped


def clipped(clip: AdaptiveClip, params: dict[str, Tensor], grads: dict[str, Tensor], **more: Any) -> dict[str, Tensor]:
    return result(clip(frame(params, sums=grads, ready=True, **more)))


@given(shapes=shapes, seed=st.integers(0, 2**16), clip=st.floats(1e-3, 3), eps=st.floats(1e-4, 2))
def test_it_is_the_papers_rule(shapes: list[list[int]], seed: int, clip: float, eps: float) -> None:
    params, grads = tensors(shapes, seed), tensors(shapes, seed + 1)
    expected = reference(params, grads, clip, eps)
    for name, grad in clipped(AdaptiveClip(clip, eps), params, grads).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-6, atol=0.0)


def test_units_are_filters_rows_and_whole_vectors() -> None:
    params = {"conv": torch.ones(2, 3, 2, 2), "linear": torch.ones(2, 4), "bias": torch.ones(4), "gain": torch.ones(())}
    grads = {name: torch.ones_like(value) for name, value in params.items()}
    for name in ("conv", "linear"):
        grads[name][0] *= 1e-3  # far below the limit, beside one that is above
    ours = clipped(AdaptiveClip(0.1), params, grads)
    for name in ("conv", "linear"):
        assert same_bits(ours[name][0], grads[name][0])
        torch.testing.assert_close(ours[name][1], 0.1 * torch.ones_like(ours[name][1]))
    torch.testing.assert_close(ours["bias"], 0.1 * torch.ones(4))
    torch.testing.assert_close(ours["gain"], torch.tensor(0.1))


def test_the_limit_holds_for_the_normalised_gradient() -> None:
    params, sums = tensors([[4, 3], [3]], 0), tensors([[4, 3], [3]], 1, scale=8.0)
    expected = reference(params, {name: value / 8 for name, value in sums.items()}, 0.1, 1e-3)
    for name, grad in clipped(AdaptiveClip(0.1), params, sums, update_factor=1 / 8).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-6, atol=0.0)


def test_zero_weights_can_move() -> None:
    ours = clipped(AdaptiveClip(0.1, eps=0.5), {"a": torch.zeros(1, 2)}, {"a": torch.tensor([[3.0, 4.0]])})
    torch.testing.assert_close(ours["a"], 0.05 * torch.tensor([[0.6, 0.8]]))


@pytest.mark.parametrize("leave", ["head.*", ["head.*"], ("nothing", "head.weight")])
def test_what_is_left_alone_is_not_clipped(leave: Any) -> None:
    params = {"body.weight": torch.ones(1, 2), "head.weight": torch.ones(1, 2)}
    ours = clipped(AdaptiveClip(0.1, leave=leave), params, {name: torch.ones(1, 2) for name in params})
    assert torch.equal(ours["head.weight"], torch.ones(1, 2))
    torch.testing.assert_close(ours["body.weight"], torch.full((1, 2), 0.1))


def test_only_the_rows_that_a_sparse_gradient_has_are_looked_at() -> None:
    weight = torch.tensor([[3.0, 4.0], [math.nan, math.nan], [6.0, 8.0]])
    sparse = torch.sparse_coo_tensor(torch.tensor([[2, 0]]), torch.ones(2, 2), (3, 2), check_invariants=True)
    ours = clipped(AdaptiveClip(0.01), {"a": weight}, {"a": sparse})["a"]
    torch.testing.assert_close(ours.norm(dim=1), torch.tensor([0.05, 0.0, 0.1]))


class TestSettings:
    @pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan, True, "1", torch.ones(())])
    def test_numbers(self, bad: Any) -> None:
        with pytest.raises(SettingError, match=r"AdaptiveClip\.clip must be positive and finite"):
            AdaptiveClip(bad)
        with pytest.raises(SettingError, match=r"AdaptiveClip\.eps must be positive and finite"):
            AdaptiveClip(eps=bad)

    @pytest.mark.parametrize("bad", [1, [1], None, {"a": 1.0}, [torch.ones(2)]])
    def test_patterns(self, bad: Any) -> None:
        with pytest.raises(SettingError, match=r"AdaptiveClip\.leave must be a pattern on parameter names, or several"):
            AdaptiveClip(leave=bad)

    def test_a_pattern_that_no_parameter_matches_is_an_error_when_the_state_is_made(self) -> None:
        state = TrainState(Tensors({"a.weight": torch.ones(2)}))
        with pytest.raises(SettingError, match=r"AdaptiveClip\.leave must be .*'b\.\*'.*a\.weight"):
            AdaptiveClip(leave=["a.*", "b.*"]).init(state)
        assert AdaptiveClip(leave="a.*").init(state) is state
