"""What is compiled and what is not, what makes another graph, and what stays outside as it was."""

from __future__ import annotations

import copy
import importlib
import math
import os
import pickle
import subprocess
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline import (
    Accumulate,
    AdaptiveClip,
    AverageWeights,
    ClipByGlobalNorm,
    ClipByGroupNorm,
    ClipByValue,
    ClipPerParameter,
    DropNonFinite,
    EmitEvents,
    Evaluation,
    EveryUpdates,
    Forward,
    Frame,
    Group,
    Loss,
    MaybeStep,
    MeasureGradients,
    MeasureNoise,
    MeasureUpdates,
    MicroBatches,
    Optimizer,
    PenaliseL1,
    PenaliseL2,
    ScaledBackward,
    ScaleRate,
    SharpnessAware,
    SkipSpikes,
    TrainState,
    UpdateInBackward,
    apply,
    chain,
    compiled,
    ensemble,
    every,
    fold,
    init,
    monitors,
    named,
    part,
    repeat,
    scan,
    supervised,
    tap,
    when,
)
from pipeline.compilation import Compiled, EagerPartWarning
from pipeline.errors import NotATransformError, SettingError
from pipeline.testing import assert_records_equal
from pipeline.transform import Chain, Transform
from tests.laws.cases import IN, OUT, make_batches, make_model, make_step


class Pair(NamedTuple):
    inputs: Tensor
    targets: Tensor


@attrs.frozen
class Record:
    inputs: Tensor
    targets: Tensor
    weight: float
    kind: str = "plain"


def both(make: Callable[[nn.Module], Chain], batches: Any, **more: Any) -> tuple[Compiled, TrainState, TrainState]:
    """The compiled step, and what it and the step itself make of the batches from the same start."""
    name, settings = more.pop("model", "mlp"), more.pop("settings", {})
    model, other = make_model(name), make_model(name)
    step, plain = compiled(make(model), backend=more.pop("backend", "eager"), **settings), make(other)
    got = fold(step, init(step, model, seed=3), batches, **more).state
    return step, got, fold(plain, init(plain, other, seed=3), batches, **more).state


def whys(step: Compiled) -> list[str]:
    return [graph.why for graph in step.graphs]


def usual(model: nn.Module, *between: Transform, every: int = 2, loss: Any = None, **settings: Any) -> Chain:
    return chain(
        Forward(model, loss or supervised(F.cross_entropy)),
        ScaledBackward(),
        Accumulate(every),
        *between,
        MaybeStep(Optimizer(torch.optim.AdamW, **{"lr": 0.01, **settings})),
        EmitEvents(),
    )


# -- what is an input ------------------------------------------------------------------------------------------------


def test_one_graph_while_a_window_is_open_and_one_where_it_is_full() -> None:
    step, state, expected = both(lambda model: make_step(model, 3), make_batches(12))
    assert [graph.parts for graph in step.graphs] == [
        ("Forward", "ScaledBackward", "Accumulate"),
        ("ClipByGlobalNorm", "MaybeStep"),
    ]
    assert whys(step) == ["the first", "the first"]
    assert all(graph.traced > 0 and graph.compiled > 0 for graph in step.graphs)
    assert_records_equal(state, expected, rtol=1e-5)


def test_rates_and_other_schedules_and_counters_are_inputs() -> None:
    def make(model: nn.Module) -> Chain:
        return usual(model, lr=lambda count: 0.01 * (1 + count), weight_decay=lambda count: 0.1 / (1 + count))

    step, state, expected = both(make, make_batches(16))
    assert len(step.graphs) == 2
    assert state.progress.updates == 8
    assert_records_equal(state, expected, rtol=1e-5)


def test_a_schedule_of_pairs_leaves_the_step_as_it_is() -> None:
    def make(model: nn.Module) -> Chain:
        return usual(model, betas=lambda count: (0.9 - 0.01 * count, 0.99))

    with pytest.warns(EagerPartWarning, match="MaybeStep .*: a setting of the optimizer is scheduled as a tuple"):
        _, state, expected = both(make, make_batches(12))
    assert_records_equal(state, expected, rtol=1e-5)


def test_a_schedule_that_goes_wrong_is_the_error_that_it_is_uncompiled() -> None:
    model = make_model("mlp")
    wrong = {2: math.inf, 3: -1.0}
    for at, value in wrong.items():
        settings = {"weight_decay": lambda count, at=at, value=value: value if count == at else 0.1}
        step = compiled(usual(model, every=1, **settings), backend="eager")
        with pytest.raises(SettingError, match=f"in update {at}"):
            fold(step, init(step, model), make_batches(6))
        assert not step.eager


def test_weights_are_inputs_as_numbers_and_as_tensors() -> None:
    def loss(model: nn.Module, batch: dict[str, Any]) -> Loss:
        return Loss.mean(F.cross_entropy(model(batch["x"]), batch["y"]), batch["weight"])

    for weigh in (float, torch.tensor):
        batches = [{"x": x, "y": y, "weight": weigh(1.0 + i % 5)} for i, (x, y) in enumerate(make_batches(12))]
        step, state, expected = both(lambda model: usual(model, loss=loss), batches)
        assert len(step.graphs) == 2
        assert_records_equal(state, expected, rtol=1e-5)


def test_a_rate_that_a_signal_moves_makes_no_other_graph() -> None:
    lowered = monitors.monitor("lowered", int, lambda count, _: count, bool, signals=lambda _: [ScaleRate(0.5)])
    step, state, expected = both(usual, make_batches(16), monitors=[lowered])
    assert expected.rate_factor < 1
    assert len(step.graphs) == 2
    assert_records_equal(state, expected, rtol=1e-5)


def test_what_the_code_decides_by_a_number_is_explained() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y, share = batch
        return F.cross_entropy(model(x), y, label_smoothing=0.1 if share > 0.5 else 0.0)

    batches = [(x, y, i / 10) for i, (x, y) in enumerate(make_batches(10))]
    step, state, expected = both(lambda model: usual(model, loss=loss, every=1), batches)
    assert whys(step) == ["the first", "(batch[2] > 0.5): True in the place of False", "the first"]
    assert_records_equal(state, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "form",
    [
        list,
        tuple,
        lambda pair: Pair(*pair),
        lambda pair: {"inputs": pair[0], "targets": pair[1]},
        lambda pair: Record(*pair, weight=2.0),
        lambda pair: {"of": (Record(*pair, weight=2.0), [None, "text", 3])},
    ],
    ids=["list", "tuple", "namedtuple", "dict", "attrs", "nested"],
)
def test_a_batch_is_any_container(form: Callable[[Any], Any]) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        inner = batch["of"][0] if isinstance(batch, dict) and "of" in batch else batch
        if isinstance(inner, Record):
            return F.cross_entropy(model(inner.inputs), inner.targets)
        x, y = inner.values() if isinstance(inner, dict) else inner
        return F.cross_entropy(model(x), y)

    batches = [form(batch) for batch in make_batches(6)]
    step, state, expected = both(lambda model: usual(model, loss=loss), batches)
    assert len(step.graphs) == 2
    assert not step.eager
    assert_records_equal(state, expected, rtol=1e-5)


# -- what makes another graph ----------------------------------------------------------------------------------------


def lengths(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, IN, generator=generator), torch.randint(0, OUT, (size,), generator=generator))
        for size in sizes
    ]


def test_a_size_that_has_changed_becomes_an_input() -> None:
    batches = lengths(4, 4, 6, 6, 9, 3, 12, 5)
    step, state, expected = both(usual, batches)
    first, second, _ = step.graphs
    assert first.why == "the first"
    assert second.why.startswith("batch[0]: (torch.Size([6, 6])")
    assert_records_equal(state, expected, rtol=1e-5)


def test_a_size_of_one_is_a_case_of_its_own() -> None:
    step, state, expected = both(usual, lengths(4, 6, 1, 1, 3, 9), settings={"dynamic": True})
    assert len(step.graphs) == 3
    assert_records_equal(state, expected, rtol=1e-5)


@pytest.mark.parametrize(("dynamic", "graphs"), [(True, 1), (False, 4)])
def test_sizes_are_inputs_from_the_start_or_never(dynamic: bool, graphs: int) -> None:
    settings = {"dynamic": dynamic}
    step, state, expected = both(usual, lengths(4, 6, 9, 3, 4, 6), settings=settings)
    assert len(step.graphs) == graphs + 1
    assert_records_equal(state, expected, rtol=1e-5)


def test_more_graphs_than_the_limit_are_not_made_and_the_rest_runs_as_it_is() -> None:
    settings = {"dynamic": False, "limit": 2}
    with pytest.warns(EagerPartWarning, match=r"^2 graphs of Forward, ScaledBackward and Accumulate were made") as told:
        step, state, expected = both(usual, lengths(4, 6, 9, 3, 4, 6), settings=settings)
    assert len(told) == 1
    assert len(step.graphs) == 3
    assert_records_equal(state, expected, rtol=1e-5)


def test_a_text_or_a_flag_that_changes_makes_another_graph_once() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y, kind = batch
        return F.cross_entropy(model(x), y) * (2.0 if kind == "hard" else 1.0)

    batches = [(x, y, "hard" if i % 3 else "easy") for i, (x, y) in enumerate(make_batches(9))]
    step, state, expected = both(lambda model: usual(model, loss=loss), batches)
    assert whys(step)[1] == "batch[2]: 'hard' in the place of 'easy'"
    assert len(step.graphs) == 3
    assert_records_equal(state, expected, rtol=1e-5)


def test_freezing_in_the_middle_makes_another_graph() -> None:
    def run(*, is_compiled: bool) -> tuple[Any, TrainState]:
        model = make_model("mlp")
        step: Any = usual(model, ClipByGlobalNorm(0.5))
        step = compiled(step, backend="eager") if is_compiled else step
        state = fold(step, init(step, model), make_batches(6)).state
        model[0].weight.requires_grad_(False)
        return step, fold(step, state, make_batches(6)).state

    step, state = run(is_compiled=True)
    assert [why != "the first" for why in whys(step)] == [False, True, False, True]
    assert "which parameters are trained" in whys(step)[1]
    assert_records_equal(state, run(is_compiled=False)[1], rtol=1e-5)


def test_modes_of_modules_make_another_graph() -> None:
    model = make_model("dropout")
    step = compiled(usual(model), backend="eager")
    state = fold(step, init(step, model), make_batches(4)).state
    model.eval()
    fold(step, state, make_batches(4))
    assert "the modes of modules" in whys(step)[1]


# -- the transforms --------------------------------------------------------------------------------------------------

BETWEEN: list[Transform] = [
    ClipByGlobalNorm(0.5),
    ClipByGlobalNorm(0.5, p=1),
    ClipByGlobalNorm(0.5, p=math.inf),
    ClipByValue(0.1),
    ClipByGroupNorm({"*.weight": 0.5, "*.bias": 0.1}),
    ClipPerParameter(0.3),
    AdaptiveClip(0.1, leave="*.bias"),
    PenaliseL1(0.1),
    PenaliseL2(0.1, match="*.weight"),
    MeasureGradients(),
    SkipSpikes(multiple=1.2, over=4, least=2),
    when(lambda frame: frame.ready, ClipByGlobalNorm(0.5)),
    every(2, ClipByGlobalNorm(0.1)),
    named("other", ClipByGlobalNorm(0.5)),
]


@pytest.mark.parametrize("between", BETWEEN, ids=repr)
def test_a_part_behind_the_window_is_in_the_graph(between: Transform) -> None:
    step, state, expected = both(lambda model: usual(model, between), make_batches(12))
    assert not step.eager
    assert [len(graph.parts) for graph in step.graphs][:2] == [3, 2]
    assert_records_equal(state, expected, rtol=1e-5)


@pytest.mark.parametrize("part", [DropNonFinite(), MeasureNoise()], ids=repr)
def test_a_part_before_the_window_is_in_the_graph(part: Transform) -> None:
    batches = make_batches(8)
    batches[3][0][0, 0] = float("inf")
    step, state, expected = both(lambda model: usual(model).insert_before("Accumulate", part), batches)
    assert not step.eager
    assert [len(graph.parts) for graph in step.graphs] == [4, 1]
    assert_records_equal(state, expected, rtol=1e-5)


def test_sharpness_aware_gradients_are_in_the_graph() -> None:
    def make(model: nn.Module) -> Chain:
        return (
            usual(model)
            .replace("Forward")
            .replace("ScaledBackward", SharpnessAware(Forward(model, supervised(F.cross_entropy))))
        )

    step, state, expected = both(make, make_batches(8))
    assert not step.eager
    assert_records_equal(state, expected, rtol=1e-5)


@pytest.mark.parametrize("last", [AverageWeights(decay=0.9), tap(repr)], ids=repr)
def test_what_stands_behind_the_step_runs_as_it_is_without_a_word(last: Transform) -> None:
    step, state, expected = both(lambda model: usual(model).insert_after("MaybeStep", last), make_batches(8))
    assert not step.eager
    assert_records_equal(state, expected, rtol=1e-5)


def test_a_step_in_a_wrapper_runs_as_it_is() -> None:
    def make(model: nn.Module) -> Chain:
        return usual(model).replace("MaybeStep", MeasureUpdates(MaybeStep(Optimizer(torch.optim.SGD, lr=0.1))))

    with pytest.warns(EagerPartWarning, match="^MaybeStep in a compiled step runs as it is"):
        step, state, expected = both(make, make_batches(8))
    assert list(step.eager) == ["MaybeStep"]
    assert_records_equal(state, expected, rtol=1e-5)


def weighted(model: nn.Module, batch: Any) -> Loss:
    return Loss.mean(F.cross_entropy(model(batch[0]), batch[1]), float(batch[1].shape[0]))


def summed(model: nn.Module, batch: Any) -> Loss:
    return Loss.sum(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), (batch[1] > 0).sum())


def right(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).float().mean()


def with_forward(**settings: Any) -> Callable[[nn.Module], Chain]:
    measured = supervised(F.cross_entropy, measures={"accuracy": right})
    return lambda model: usual(model).replace("Forward", Forward(model, measured, **settings))


STEPS: dict[str, Callable[[nn.Module], Chain]] = {
    "autocast": with_forward(autocast=torch.bfloat16),
    "recomputed": with_forward(recompute=("0",)),
    "weights of the host": lambda model: usual(model, loss=weighted),
    "weights of the device": lambda model: usual(model, loss=summed),
    "a window that is dropped": lambda model: usual(model).replace("Accumulate", Accumulate(3, "drop")),
    "a window that is carried": lambda model: usual(model).replace("Accumulate", Accumulate(3, "carry")),
    "told of micro-batches": lambda model: usual(model).replace("EmitEvents", EmitEvents(micro_batches=True)),
    "amsgrad": lambda model: usual(model, amsgrad=True),
    "compiled optimizer": lambda model: usual(model, compiled="aot_eager"),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_of_other_kinds_are_in_graphs(name: str) -> None:
    step, state, expected = both(STEPS[name], make_batches(10))
    assert not step.eager
    assert step.graphs[0].parts == ("Forward", "ScaledBackward", "Accumulate")
    assert_records_equal(state, expected, rtol=1e-5)


def in_backward(model: nn.Module) -> Chain:
    update = UpdateInBackward(Optimizer(torch.optim.AdamW, lr=0.01))
    return chain(Forward(model, supervised(F.cross_entropy)), update, EmitEvents())


@pytest.mark.parametrize(
    "make",
    [
        lambda model: chain(part("first", "0.*", usual(model)), part("rest", "2.*", usual(model))),
        lambda model: chain(repeat(2, usual(model))),
        in_backward,
    ],
    ids=["parts", "repeat", "UpdateInBackward"],
)
def test_steps_within_others_run_as_they_are(make: Callable[[nn.Module], Chain]) -> None:
    with pytest.warns(EagerPartWarning):
        step, state, expected = both(make, make_batches(6))
    assert step.eager
    assert_records_equal(state, expected)


class HalfUsed(nn.Module):
    """A model with a layer that its forward leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.left_out = nn.Linear(IN, OUT), nn.Linear(IN, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_a_parameter_that_the_loss_does_not_use_has_no_sum() -> None:
    ends: list[tuple[Any, TrainState]] = []
    for wrap in (lambda step: compiled(step, backend="eager"), lambda step: step):
        model = HalfUsed()
        for param in model.parameters():
            nn.init.constant_(param, 0.1)
        step = wrap(usual(model, ClipByGlobalNorm(0.5), every=3))
        ends.append((step, fold(step, init(step, model), make_batches(8), until=MicroBatches(8)).state))
    (step, state), (_, expected) = ends
    assert set(state.optimizer.tensors) == set(expected.optimizer.tensors)
    assert_records_equal(state, expected, rtol=1e-5)
    assert len(step.graphs) == 2


def test_groups_have_rates_and_settings_of_their_own() -> None:
    def make(model: nn.Module) -> Chain:
        groups = [Group("0.*", lr=lambda count: 0.1 / (1 + count)), Group("*.bias", lr=0.02, weight_decay=0.0)]
        return usual(model, ClipByGlobalNorm(0.5), groups=groups, weight_decay=0.1)

    step, state, expected = both(make, make_batches(12))
    assert len(step.graphs) == 2
    assert_records_equal(state, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "cls",
    [
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.Adadelta,
        torch.optim.ASGD,
        torch.optim.Rprop,
        torch.optim.Adafactor,
    ],
)
def test_every_optimizer_of_torch_trains_as_it_does_uncompiled(cls: type[torch.optim.Optimizer]) -> None:
    def make(model: nn.Module) -> Chain:
        return usual(model).replace("MaybeStep", MaybeStep(Optimizer(cls, lr=0.01)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerPartWarning)  # Some look at values: those run as they are.
        _, state, expected = both(make, make_batches(12))
    assert_records_equal(state, expected, rtol=1e-5)


# -- what falls back -------------------------------------------------------------------------------------------------


def looking(frame: Frame) -> Frame:
    """A part that looks at the value of a tensor."""
    return frame.having(update_factor=frame.update_factor * (0.5 if float(frame.state.window.loss) > 0 else 1.0))


def test_a_part_that_looks_at_a_value_runs_as_it_is_and_says_so_once() -> None:
    with pytest.warns(EagerPartWarning) as told:
        step, state, expected = both(lambda model: usual(model, looking, ClipByGlobalNorm(0.5)), make_batches(12))
    [message] = [str(warning.message) for warning in told]
    assert message == "looking in a compiled step runs as it is: it looks at the value of a tensor."
    assert step.eager == {"looking": "it looks at the value of a tensor"}
    assert [graph.parts[-1] for graph in step.graphs] == ["Accumulate", "MaybeStep"]
    assert_records_equal(state, expected, rtol=1e-5)


def test_a_forward_that_looks_at_a_value_leaves_the_rest_compiled() -> None:
    with pytest.warns(EagerPartWarning, match=r"^Forward in a compiled step runs as it is: it looks at the value"):
        step, state, expected = both(lambda model: usual(model, ClipByGlobalNorm(0.5)), make_batches(8), model="unused")
    assert list(step.eager) == ["Forward"]
    assert ("ClipByGlobalNorm", "MaybeStep") in [graph.parts for graph in step.graphs]
    assert_records_equal(state, expected, rtol=1e-5)


def test_a_number_that_would_become_a_constant_is_refused() -> None:
    def named_after_the_update(frame: Frame) -> Frame:
        return frame.having(facts={**frame.facts, f"at {frame.state.progress.updates}": frame.state.window.loss})

    with pytest.warns(EagerPartWarning, match=r"it needs the value of state\.progress\.updates, which is another one"):
        step, *_ = both(lambda model: usual(model, named_after_the_update), make_batches(6))
    assert list(step.eager) == ["named_after_the_update"]


def test_an_error_of_ones_own_comes_out_as_it_is() -> None:
    def failing(frame: Frame) -> Frame:
        raise ZeroDivisionError("of one's own")

    model = make_model("mlp")
    step = compiled(usual(model, failing), backend="eager")
    with pytest.raises(ZeroDivisionError, match="of one's own"):
        fold(step, init(step, model), make_batches(2))
    assert not step.eager


def test_a_backend_that_fails_leaves_the_parts_as_they_are() -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise NotImplementedError("not on this machine")

    with pytest.warns(EagerPartWarning, match=r"cannot compile their graph \(NotImplementedError: not on this machine"):
        step, state, expected = both(usual, make_batches(8), backend=broken)
    assert not step.graphs
    assert_records_equal(state, expected, rtol=1e-5)


def test_sparse_gradients_are_summed_as_they_are() -> None:
    def run(*, is_compiled: bool) -> TrainState:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Flatten(), nn.Linear(8, OUT))
            batches = [(torch.randint(0, 7, (4, 2)), torch.randint(0, OUT, (4,))) for _ in range(6)]
        step: Any = usual(model).replace("MaybeStep", MaybeStep(Optimizer(torch.optim.SGD, lr=0.1)))
        step = compiled(step, backend="eager") if is_compiled else step
        return fold(step, init(step, model), batches).state

    assert_records_equal(run(is_compiled=True), run(is_compiled=False), rtol=1e-5)


class Opaque:
    """Something that nobody can look into."""


@pytest.mark.parametrize(
    ("thing", "reason"),
    [
        (
            Opaque,
            r"batch\[2\] is a Opaque, which cannot be looked into: make it a tensor",
        ),
        (lambda: torch.eye(2).to_sparse(), r"batch\[2\] is a sparse tensor"),
    ],
    ids=["object", "sparse"],
)
def test_what_a_graph_cannot_take_in_a_batch_leaves_its_parts_as_they_are(thing: Any, reason: str) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    batches = [(*batch, thing()) for batch in make_batches(6)]
    with pytest.warns(EagerPartWarning, match=f"^Forward, ScaledBackward and Accumulate in a .*: {reason}"):
        step, state, expected = both(lambda model: usual(model, loss=loss), batches)
    assert [graph.parts for graph in step.graphs] == [("MaybeStep",)]
    assert_records_equal(state, expected, rtol=1e-5)


def test_many_parameters_keep_the_optimizers_own_kernel() -> None:
    model = nn.Sequential(*(nn.Linear(IN, IN) for _ in range(20)), nn.Linear(IN, OUT))
    step = compiled(usual(model, ClipByGlobalNorm(1.0)), backend="eager")
    fold(step, init(step, model), make_batches(6))
    assert [graph.parts for graph in step.graphs] == [("Forward", "ScaledBackward", "Accumulate")]
    assert not step.eager


# -- what is around it -----------------------------------------------------------------------------------------------


def test_any_step_can_be_replayed_by_itself_with_its_dropout() -> None:
    model = make_model("dropout")
    step = compiled(make_step(model, 2), backend="eager")
    state = init(step, model, seed=5)
    batch = make_batches(1)[0]
    outputs: list[Tensor] = []
    for _ in range(3):
        once, _ = apply(step, state, batch)
        again, _ = apply(step, state, batch)
        assert_records_equal(again, once)
        outputs.append(once.window.loss if once.window.micro_batches else outputs[-1])
        state = once
    assert not torch.equal(outputs[0], outputs[2])


def test_evaluations_between_change_nothing() -> None:
    model = make_model("batchnorm")
    held_out = Evaluation(Forward(model, supervised(F.cross_entropy)), make_batches(2), EveryUpdates(2))
    plain = both(lambda model: make_step(model, 2), make_batches(12), model="batchnorm")[1]
    step = compiled(make_step(model, 2), backend="eager")
    run = fold(
        step, init(step, model, seed=3), make_batches(12), evaluations=[held_out], monitors=[monitors.Best("val_loss")]
    )
    assert run.results["Best val_loss"] is not None
    assert len(step.graphs) == 2
    assert_records_equal(run.state, plain)


def test_one_compiled_step_serves_two_runs_whose_windows_are_open_at_once() -> None:
    def run(*, is_compiled: bool) -> list[TrainState]:
        model = make_model("mlp")
        step: Any = make_step(model, 3)
        step = compiled(step, backend="eager") if is_compiled else step
        states = [init(step, make_model("mlp", seed), seed=seed) for seed in (1, 2)]
        runs = [scan(step, state, make_batches(9)) for state in states]
        for _ in range(9):
            states = [next(run)[0] for run in runs]
        return states

    assert_records_equal(run(is_compiled=True), run(is_compiled=False), rtol=1e-5)


def test_a_compiled_step_is_part_of_a_chain() -> None:
    def make(model: nn.Module) -> Chain:
        return chain(usual(model).without("EmitEvents"))

    model, other = make_model("mlp"), make_model("mlp")
    step = chain(compiled(make(model), backend="eager"), EmitEvents())
    plain = chain(make(other), EmitEvents())
    ends = [fold(s, init(s, m), make_batches(8)).state for s, m in ((step, model), (plain, other))]
    assert_records_equal(*ends, rtol=1e-5)


def test_a_short_last_window_is_divided_by_what_it_holds() -> None:
    step, state, expected = both(lambda model: make_step(model, 4), make_batches(10))
    assert state.progress.updates == 3
    assert len(step.graphs) == 2
    assert_records_equal(state, expected, rtol=1e-5)


def test_a_batch_to_skip_is_skipped() -> None:
    batches = [*make_batches(3), None, *make_batches(3)]
    _, state, expected = both(lambda model: make_step(model, 2), batches)
    assert_records_equal(state, expected, rtol=1e-5)


def test_it_prints_as_it_was_written_and_is_declared_as_the_step() -> None:
    model = make_model("mlp")
    step = usual(model)
    wrapped = compiled(step)
    assert repr(wrapped) == f"compiled({step!r})"
    assert (wrapped.reads, wrapped.writes, wrapped.uses_up) == (step.reads, step.writes, step.uses_up)
    assert [wrapped.windows(batches) for batches in (7, 8)] == [step.windows(batches) for batches in (7, 8)]
    assert wrapped == compiled(step)
    assert wrapped != compiled(step, dynamic=True)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"backend": "inductr"}, r"compiled\(backend\) must be 'inductor', 'eager' or a function"),
        ({"dynamic": "yes"}, r"compiled\(dynamic\) must be True, False or None, got 'yes'"),
        ({"limit": 0}, r"compiled\(limit\) must be"),
        ({"limit": 1.5}, r"compiled\(limit\) must be"),
        ({"options": {"max_autotun": True}}, r"compiled\(options\) must be settings of .*, got 'max_autotun'"),
        ({"options": {"max_autotune": True}, "backend": "eager"}, r"compiled\(options\) must be left out"),
    ],
)
def test_settings_are_checked_when_it_is_built(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        compiled(usual(make_model("mlp")), **settings)


def test_a_step_is_compiled_once() -> None:
    step = compiled(usual(make_model("mlp")).without("EmitEvents"))
    for again in (step, chain(step, EmitEvents())):
        with pytest.raises(SettingError, match=r"^compiled\(step\) must be a step of which nothing is compiled yet"):
            compiled(again)


def test_a_class_in_the_place_of_a_transform_is_refused() -> None:
    with pytest.raises(NotATransformError, match="did you mean"):
        compiled(ClipByGlobalNorm)  # pyright: ignore[reportArgumentType]


# -- ensembles -------------------------------------------------------------------------------------------------------


def test_an_ensemble_is_compiled_up_to_its_step() -> None:
    batches, ends = make_batches(8), []
    for wrap in (lambda step: compiled(step, backend="eager"), lambda step: step):
        model = make_model("mlp")
        several = ensemble(make_step(model, 2), seeds=[0, 1, 2], rates=[0.01, 0.02, 0.03])
        step = wrap(several)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            ends.append(fold(step, init(step, model), batches).state)
        if isinstance(step, Compiled):
            assert list(step.eager) == ["MaybeStep"]
            assert next(graph.parts for graph in step.graphs) == ("Forward", "ScaledBackward", "Accumulate")
            assert [warning.category for warning in told] == [EagerPartWarning]
    assert_records_equal(*ends, rtol=1e-5)


# -- inductor --------------------------------------------------------------------------------------------------------


def settings_of_torch() -> dict[str, Any]:
    """What a caller might miss if it were another one afterwards."""
    filters = list(warnings.filters)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, when inductor is loaded
        configs = [importlib.import_module(f"torch.{name}.config") for name in ("_inductor", "_functorch", "_dynamo")]
    return {
        "configs": [config.get_config_copy() for config in configs],
        "gradients": torch.is_grad_enabled(),
        "compiling": torch.compiler.is_compiling(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "random": torch.get_rng_state().tolist(),
        "filters": filters,
    }


def test_what_inductor_makes_takes_any_size_and_leaves_the_settings_of_torch_alone() -> None:
    before = settings_of_torch()
    settings = {"dynamic": True}
    step, state, expected = both(usual, lengths(4, 6, 9, 3), settings=settings, backend="inductor")
    assert settings_of_torch() == before
    assert len(step.graphs) == 2
    assert_records_equal(state, expected, rtol=1e-5)


TRAINING = """
import torch
from pipeline import Accumulate, Forward, MaybeStep, Optimizer, ScaledBackward, chain, compiled, fold, init, supervised

model = torch.nn.Linear(2, 3)
loss = supervised(torch.nn.functional.mse_loss)
rule = Optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
step = chain(Forward(model, loss), ScaledBackward(), Accumulate(), MaybeStep(rule))
step = compiled(step, options={"cpp_wrapper": False})  # quicker to compile
fold(step, init(step, model), [(torch.ones(4, 2), torch.ones(4, 3))] * 3)
from torch._dynamo.utils import counters
print(len(step.graphs), counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"])
"""


def test_a_second_process_takes_its_code_from_disk(tmp_path: Path) -> None:
    where = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    run = [sys.executable, "-c", TRAINING]
    said = [subprocess.run(run, check=True, capture_output=True, text=True, env=where).stdout for _ in range(2)]
    assert said == ["2 2 0\n", "2 0 2\n"]


WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0])[:OUT]


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], weight=WEIGHTS),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]) * torch.tensor([0.5, 2.0]).sum(),
    ],
    ids=["weights of the classes", "made in the loss"],
)
def test_inductor_takes_a_tensor_that_is_no_part_of_the_state(loss: Any) -> None:
    _, got, expected = both(lambda m: usual(m, loss=loss), make_batches(4), backend="inductor")
    assert_records_equal(got.params, expected.params, rtol=1e-5)


def test_a_window_in_which_nothing_counts_is_skipped() -> None:
    def loss(model: nn.Module, batch: Any) -> Loss:
        return Loss.mean(F.cross_entropy(model(batch[0]), batch[1]), batch[2])

    weighed = [(*batch, w) for batch, w in zip(make_batches(6), [1.0, 1.0, 0.0, 0.0, 1.0, 1.0], strict=True)]
    _, got, expected = both(lambda m: usual(m, loss=loss), weighed)
    assert_records_equal(got, expected, rtol=1e-5)
    assert got.progress.skipped == 1


def test_a_number_below_0_is_one_in_a_power_too() -> None:
    def turned(frame: Frame) -> Frame:
        assert frame.loss is not None
        return frame.having(loss=frame.loss * (-1.0) ** frame.state.progress.updates)

    def make(model: nn.Module) -> Chain:
        return usual(model, every=1).insert_after("Forward", named("turned", turned))

    _, got, expected = both(make, make_batches(4))
    assert_records_equal(got.params, expected.params, rtol=1e-5)


@attrs.frozen(init=False, slots=False)
class Backwards(Optimizer):
    """One that goes the other way."""

    def update(self, params: Any, grads: Any, state: Any, *, rates: Any, factor: Any = 1.0, count: Any = 0) -> Any:
        return super().update(params, grads, state, rates=rates, factor=-1.0 * factor, count=count)


def test_an_optimizer_of_ones_own_is_asked_itself() -> None:
    def make(model: nn.Module) -> Chain:
        rule = Backwards(torch.optim.SGD, lr=0.1)
        return usual(model).replace("MaybeStep", MaybeStep(rule))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerPartWarning)
        _, got, expected = both(make, make_batches(4))
    assert_records_equal(got.params, expected.params, rtol=1e-5)


def test_hooks_on_a_parameter_are_not_left_out() -> None:
    def make(model: nn.Module) -> Chain:
        next(model.parameters()).register_hook(lambda grad: grad * 0.5)
        return usual(model)

    with pytest.warns(EagerPartWarning, match="a parameter with hooks"):
        _, got, expected = both(make, make_batches(4))
    assert_records_equal(got.params, expected.params, rtol=1e-5)


def test_a_condition_that_cannot_be_asked_of_a_frame_does_not_hold() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = F.cross_entropy(model(batch[0]), batch[1])
        return value * 2 if batch[2] and 10 / batch[2] > 3 else value

    batches = [(*batch, n) for batch, n in zip(make_batches(4), [4, 4, 0, 0], strict=True)]
    _, got, expected = both(lambda m: usual(m, loss=loss), batches)
    assert_records_equal(got.params, expected.params, rtol=1e-5)


@pytest.mark.parametrize("form", [lambda b: defaultdict(int, x=b), lambda b: {"self.batch": b}], ids=["default", "key"])
def test_a_batch_of_any_form_is_trained_on(form: Callable[[Any], Any]) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        ((inputs, targets),) = batch.values()
        return F.cross_entropy(model(inputs), targets)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerPartWarning)
        _, got, expected = both(lambda m: usual(m, loss=loss), [form(batch) for batch in make_batches(4)])
    assert_records_equal(got.params, expected.params, rtol=1e-5)


def test_one_that_has_run_can_be_copied_and_sent_to_another_process() -> None:
    model = make_model("mlp")
    step = compiled(usual(model), backend="eager")
    state = fold(step, init(step, model), make_batches(4), donate=False).state
    assert step.graphs
    for twin in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        assert twin.graphs == ()
        assert fold(twin, state.copy(), make_batches(2)).state.progress.updates == 3
