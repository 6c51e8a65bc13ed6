"""What a checkpoint has a form for comes back equal; what it has none for is refused by name."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from fractions import Fraction
from typing import Any, NamedTuple

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline import LossScale, Progress, Tensors, Window
from pipeline.checkpoint._pieces import put_together, taken_apart
from pipeline.errors import CheckpointError
from pipeline.records import OptimizerState, Part, Rng
from pipeline.testing import assert_records_equal
from tests.checkpoint.cases import a_checkpoint


def carried(value: Any) -> Any:
    """`value` through JSON and a shelf of tensors."""
    shelf: dict[str, Any] = {}
    form = json.loads(json.dumps(taken_apart(value, "it", shelf), allow_nan=False))
    return put_together(form, shelf)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


@given(PLAIN)
def test_plain_values_come_back_equal_and_of_their_class(value: Any) -> None:
    assert repr(carried(value)) == repr(value)


def test_nan_and_the_infinities_come_back() -> None:
    assert repr(carried((math.nan, math.inf, -math.inf, -0.0))) == "(nan, inf, -inf, -0.0)"


def test_a_dict_that_looks_like_a_form_comes_back_as_it_was() -> None:
    assert carried({"is": "TrainState", "items": {}}) == {"is": "TrainState", "items": {}}


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
TENSORS = {
    **{str(dtype): torch.tensor([[1, 0], [3, 4]]).to(dtype) for dtype in DTYPES},
    "complex": torch.tensor([1 + 2j, 3 - 1j]),
    "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "complex double": torch.tensor([[1 + 2j]], dtype=torch.complex128),
    "0-d": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "trained": torch.ones(2, requires_grad=True),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "not finite": torch.tensor([math.nan, math.inf]),
    "sparse": torch.sparse_coo_tensor(torch.tensor([[2, 0, 2]]), torch.ones(3, 2), (3, 2), check_invariants=True),
    "coalesced": torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_tensors_come_back(tensor: torch.Tensor) -> None:
    back = carried(tensor)
    assert back.layout == tensor.layout
    if tensor.layout is torch.sparse_coo:
        assert back.is_coalesced() == tensor.is_coalesced()
        assert back._nnz() == tensor._nnz()
    assert_records_equal(back, tensor)


RECORDS = [
    LossScale(scale=4.0, finite_windows=2),
    Progress(3, 1, 1, 0, 12, 0, 1),
    Rng(seed=-5, rank=2),
    Window(Tensors({"w": torch.ones(2)}), 2.0, torch.tensor(1.0), 0.5, {"accuracy": (1.0, 2.0)}, 1, (1.0,)),
    OptimizerState(Tensors({"w/exp_avg": torch.ones(2)}), {"w/count": 3}),
    Part(OptimizerState(Tensors({"w/m": torch.ones(1)})), Window(), LossScale(), 4, 1, 0),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_records_come_back(record: Any) -> None:
    assert_records_equal(carried(record), record)
    assert_records_equal(carried({"of a transform": (record, [record])}), {"of a transform": (record, [record])})


def test_a_whole_state_comes_back() -> None:
    state = a_checkpoint().state
    assert state.window.micro_batches == 1
    assert len(state.optimizer.tensors) > 0
    assert_records_equal(carried(state), state)


class Pair(NamedTuple):
    a: int
    b: int


@attrs.frozen
class Own:
    x: int = 1


NO_FORM = [
    Own(),
    Pair(1, 2),
    {1, 2},
    {1: "a"},
    Fraction(1, 2),
    len,
    Own,
    Counter("ab"),
    defaultdict(int, a=1),
    torch.ones(2).to_mkldnn(),
    torch.ones(2, device="meta"),
]


@pytest.mark.parametrize("value", NO_FORM, ids=repr)
def test_what_has_no_form_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(CheckpointError, match="it/controller/1 has no form in a checkpoint"):
        taken_apart({"controller": [0, value]}, "it", {})


def test_two_tensors_of_one_name_are_refused() -> None:
    clash = {"a/b": torch.ones(1), "a": {"b": torch.ones(1)}}
    with pytest.raises(CheckpointError, match="'it/a/b'"):
        taken_apart(clash, "it", {})


@pytest.mark.parametrize(
    "form",
    [
        {"is": "Progress", "items": {"micro_steps": "3"}},
        {"is": "Window", "items": {"grads": {"is": "dict", "items": {}}}},
        {"is": "TrainState", "items": {"params": None}},
        {"is": "TrainState", "items": {}},
        {"is": "Rng", "items": {"seed": 1, "pid": 2}},
        {"is": "os.system", "items": {"command": "true"}},
        {"is": "tensor", "name": "elsewhere"},
        {"is": "float", "value": "many"},
        {"is": "bytes", "value": "?"},
        {"is": "tensors", "items": {"w": 1.0}},
        {"is": ["dict"], "items": {}},
        {"module": "os"},
    ],
    ids=str,
)
def test_a_form_that_none_was_written_in_makes_nothing(form: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        put_together(form, {})
