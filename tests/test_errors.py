"""Bad input gets an error of the tree that names the cure, at the earliest moment, and loses nothing."""

import pickle
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipeline import (
    Accumulate,
    ClipByGlobalNorm,
    Evaluation,
    Forward,
    Group,
    Loss,
    LossScale,
    MaybeStep,
    Optimizer,
    ScaledBackward,
    Tensors,
    apply,
    chain,
    errors,
    fold,
    init,
    supervised,
)
from pipeline.testing import assert_records_equal, frame
from tests.laws.cases import IN, OUT, make_batch, make_batches, make_model, make_step


def test_every_error_is_of_the_tree_and_has_a_builtin_base() -> None:
    for name in errors.__all__:
        cls = getattr(errors, name)
        assert issubclass(cls, errors.FoldtrainError), name
        builtin = [b for b in cls.__mro__ if b.__module__ == "builtins" and b not in (Exception, BaseException, object)]
        assert builtin or cls is errors.FoldtrainError, name
        assert name in (errors.__doc__ or ""), f"{name} is not drawn at the top of errors.py"


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Accumulate(0), "Accumulate.every must be a whole number, 1 or more, got 0"),
        (lambda: Accumulate(1.5), "got 1.5"),  # type: ignore[arg-type]
        (lambda: Accumulate(True), "got True"),
        (lambda: Accumulate(2, "keep"), "'flush', 'drop' or 'carry', got 'keep'"),  # type: ignore[arg-type]
        (lambda: ClipByGlobalNorm(-1.0), "ClipByGlobalNorm.max_norm must be positive and finite, got -1.0."),
        (lambda: ClipByGlobalNorm(0.0), "positive and finite"),
        (lambda: ClipByGlobalNorm(float("nan")), "positive and finite"),
        (lambda: ClipByGlobalNorm(float("inf")), "positive and finite"),
        (lambda: ClipByGlobalNorm(nn.Linear(1, 1).parameters()), "positive and finite"),  # type: ignore[arg-type]
        (lambda: Forward(nn.Linear, F.cross_entropy), "torch.nn.Module"),  # type: ignore[arg-type]
        (lambda: Forward(nn.Linear(1, 1), None), "a function loss"),  # type: ignore[arg-type]
        (lambda: MaybeStep(torch.optim.SGD), "Optimizer(torch.optim.AdamW, lr=1e-3)"),  # type: ignore[arg-type]
        (lambda: Optimizer(torch.optim.AdamW, lr=-1.0), "0 or more and finite"),
        (lambda: Optimizer(torch.optim.AdamW, lr=float("nan")), "0 or more and finite"),
        (lambda: Optimizer(torch.optim.AdamW, lr=0.1, weight_deacy=0.1), "weight_decay"),
        (lambda: Optimizer(torch.optim.LBFGS, lr=0.1), "no closure"),
        (lambda: Optimizer(nn.Linear, lr=0.1), "a subclass of torch.optim.Optimizer"),  # type: ignore[arg-type]
        (lambda: Loss.mean(torch.tensor(1.0), -1.0), "0 or more"),
        (lambda: Loss.sum(torch.tensor(1.0), float("nan")), "0 or more"),
        (lambda: LossScale(scale=0.0), "positive and finite"),
        (lambda: LossScale(scale=0.5, floor=1.0), "floor"),
        (lambda: LossScale(growth=1.0), "above 1"),
        (lambda: Tensors({"w": 3.0}), "Tensors['w'] must be a torch.Tensor, got 3.0"),  # type: ignore[dict-item]
        (lambda: init(chain(), lambda x: x), "torch.nn.Module"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_a_setting_out_of_range_is_refused_when_built(build: Any, says: str) -> None:
    with pytest.raises((errors.SettingError, errors.LossError)) as caught:
        build()
    assert says in str(caught.value)
    assert isinstance(caught.value, ValueError)


def whole(model: nn.Module, loss: Any) -> Any:
    rule = Optimizer(torch.optim.SGD, lr=0.1)
    return chain(Forward(model, loss), ScaledBackward(), Accumulate(1), MaybeStep(rule))


@pytest.mark.parametrize(
    ("loss", "kind", "says"),
    [
        (lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"), errors.LossError, "shape (4,)"),
        (lambda m, b: F.cross_entropy(m(b[0]), b[1])[None], errors.LossError, "0-d"),
        (lambda m, b: None, errors.LossError, "got None: return one of these"),
        (lambda m, b: 3.0, errors.LossError, "Loss.mean"),
        (lambda m, b: F.cross_entropy(m(b[0]), b[1]).detach(), errors.NoGraphError, "the loss has no graph"),
    ],
)
def test_a_loss_that_is_none_is_named_and_the_state_is_as_it_was(loss: Any, kind: type, says: str) -> None:
    model = make_model("mlp")
    step = whole(model, loss)
    state = init(step, model)
    before = state.copy()
    for run in (lambda: apply(step, state, make_batch(0)), lambda: fold(step, state.copy(), make_batches(1))):
        with pytest.raises(kind, match=re.escape(says)):
            run()
    assert_records_equal(state, before)


def test_a_batch_on_another_device_is_told_with_both_devices() -> None:
    model = make_model("mlp")
    step = whole(model, supervised(F.cross_entropy))
    x, y = make_batch(0)
    for batch in ((x.to("meta"), y), (x.to("meta"), y.to("meta"))):
        with pytest.raises(errors.DeviceError, match="batch on meta for parameters on cpu") as caught:
            apply(step, init(step, model), batch)
        assert caught.value.param_device == "cpu"
    nested = whole(model, lambda m, b: F.cross_entropy(m(b["deep"][0]["x"]), b["y"]))
    with pytest.raises(errors.DeviceError):
        apply(nested, init(nested, model), {"deep": [{"x": x.to("meta")}], "y": y})


def test_a_state_of_another_model_lists_what_differs() -> None:
    model, other = make_model("mlp"), make_model("tied")
    step = make_step(model)
    foreign = init(make_step(other), other)
    with pytest.raises(errors.StateMismatchError, match=r"not one of Sequential.*lacks 0\.weight") as caught:
        apply(step, foreign, make_batch(0))
    assert "first.weight" in caught.value.unexpected
    with pytest.raises(errors.StateMismatchError):
        foreign.load_into(model)
    wider = nn.Sequential(nn.Linear(IN, 9), nn.ReLU(), nn.Linear(9, OUT))
    weights = [p.clone() for p in wider.parameters()]
    with pytest.raises(errors.StateMismatchError, match=r"differ in 0\.weight \(\(8, 6\), there \(9, 6\)\)"):
        init(step, model).load_into(wider)
    assert all(torch.equal(a, b) for a, b in zip(weights, wider.parameters(), strict=True))


@pytest.mark.parametrize(
    ("transform", "field"),
    [(ScaledBackward(), "loss"), (Accumulate(1), "grads"), (ClipByGlobalNorm(1.0), "window.grads")],
)
def test_a_frame_that_lacks_what_is_read_says_what_to_put_before(transform: Any, field: str) -> None:
    with pytest.raises(errors.MissingFieldError, match=f"reads {field}.*put it after") as caught:
        transform(frame({"w": [1.0]}, ready=True))
    assert caught.value.field == field


def test_an_unknown_field_of_a_frame_is_refused() -> None:
    with pytest.raises(TypeError, match=r"no field los; .* state.slots"):
        frame().having(los=1)


def test_a_group_that_nothing_matches_is_told_before_the_first_batch() -> None:
    model = make_model("mlp")
    rule = Optimizer(torch.optim.SGD, lr=0.1, groups=[Group("*.wieght")])
    with pytest.raises(errors.SettingError, match=r"0\.weight"):
        init(make_step(model, 1, rule), model)


def test_an_evaluation_step_without_a_loss_is_told() -> None:
    model = make_model("mlp")
    with pytest.raises(errors.MissingFieldError, match="put a Forward into its step"):
        Evaluation(lambda f: f, make_batches(1)).run(init(make_step(model), model))


def test_errors_survive_pickling_between_processes() -> None:
    for error in (
        errors.SettingError("X.y", "positive", -1),
        errors.StateMismatchError("Net", missing=["a"]),
        errors.OrderError("Clip", "grads", "nothing writes", "do"),
        errors.StaleStateError(3),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (type(error), str(error))
