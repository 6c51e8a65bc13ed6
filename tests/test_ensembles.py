"""Ensembles: what is refused, where members begin, how they are picked out, kept, resumed, watched and compared."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from pipeline import (
    Accumulate,
    ClipByGlobalNorm,
    EmitEvents,
    Evaluation,
    EveryUpdates,
    Forward,
    Frame,
    Group,
    Loss,
    LossScale,
    MaybeStep,
    MeasureGradients,
    Optimizer,
    ScaledBackward,
    Updates,
    apply,
    chain,
    fold,
    init,
    initialise,
    monitors,
    named,
    replay,
    scan,
    supervised,
)
from pipeline.ensembles import Ensemble, ensemble, per_member, sweep
from pipeline.errors import (
    LossError,
    MissingFieldError,
    OptimizerMismatchError,
    OrderError,
    SettingError,
    UnknownNameError,
)
from pipeline.events import EvalDone, Event, UpdateDone
from pipeline.records import OptimizerState, Part
from pipeline.testing import assert_records_equal
from pipeline.transform import Chain
from tests.laws.cases import IN, OUT, accuracy, make_batch, make_batches, make_model

SGD = Optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = Optimizer(torch.optim.AdamW, lr=0.01)


def make_step(model: nn.Module, rule: Any = ADAMW, loss: Any = None, window: int = 2) -> Chain:
    return chain(
        Forward(model, loss or supervised(F.cross_entropy, measures={"accuracy": accuracy})),
        ScaledBackward(),
        Accumulate(window),
        ClipByGlobalNorm(0.5),
        MaybeStep(rule),
        EmitEvents(),
    )


def make_ensemble(name: str = "mlp", rule: Any = ADAMW, **settings: Any) -> tuple[Ensemble, nn.Module]:
    model = make_model(name)
    return ensemble(make_step(model, rule), **(settings or {"members": 3})), model


def alone(several: Ensemble, number: int, batches: list[Any], seed: int = 0) -> Any:
    """The run of one member by itself, over a model of its own."""
    step, member = several.steps[number], several.members[number]
    forward: Any = step["Forward"]
    model = copy.deepcopy(forward.model)
    if member.seed is not None:
        initialise(model, seed=seed + member.seed)
    step = step.replace("Forward", attrs.evolve(forward, model=model))
    return fold(step, init(step, model, seed=seed + (member.seed or 0)), batches)


# -- where members begin ----------------------------------------------------------------------------------------------


def test_a_number_of_members_stands_for_as_many_seeds_counted_from_that_of_the_state() -> None:
    several, model = make_ensemble(members=2)
    state = init(several, model, seed=7)
    for number in range(2):
        begun = initialise(copy.deepcopy(model), seed=7 + number)
        own = several.member(state, number)
        assert_records_equal(dict(own.params), dict(begun.named_parameters()))
        assert own.rng.seed == 7 + number


def test_members_without_seeds_begin_as_the_model_is() -> None:
    several, model = make_ensemble(rates=[0.1, 0.2])
    state = init(several, model, seed=7)
    for number in range(2):
        own = several.member(state, number)
        assert_records_equal(dict(own.params), dict(model.named_parameters()))
        assert own.rng.seed == 7


def test_an_initialiser_of_the_users_own_sets_what_members_begin_with() -> None:
    def fill(model: nn.Module, seed: int) -> None:
        for param in model.parameters():
            nn.init.constant_(param, float(seed))

    model = make_model("mlp")
    several = ensemble(make_step(model), seeds=[5, 9], initialiser=fill)
    state = init(several, model)
    assert [float(row.mean()) for row in state.params["0.weight"].detach()] == [5.0, 9.0]


def test_the_module_itself_is_left_as_it_was() -> None:
    several, model = make_ensemble("batchnorm", seeds=[1, 2])
    before = copy.deepcopy(model.state_dict())
    fold(several, init(several, model), make_batches(4))
    assert_records_equal(dict(model.state_dict()), dict(before))
    assert all(param.grad is None for param in model.parameters())


# -- as the single runs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tied", "frozen", "0-dim", "mlp", "batchnorm", "dropout"])
def test_members_of_any_model_equal_their_single_runs(name: str) -> None:
    several, model = make_ensemble(name, members=3)
    batches = make_batches(7)  # the last window is a short one
    run = fold(several, init(several, model), batches)
    for number in range(3):
        own, single = several.member(run.state, number), alone(several, number, batches).state
        for field in ("params", "buffers", "optimizer"):
            assert_records_equal(getattr(own, field), getattr(single, field), rtol=1e-5, what=field)
        assert own.progress == single.progress


def test_a_parameter_that_no_batch_uses_is_left_as_it_is() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.never = nn.Linear(IN, OUT), nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    model = Unused()
    several = ensemble(make_step(model), members=2)
    run = fold(several, init(several, model), make_batches(2))
    assert_records_equal(run.state.params["never"].detach(), torch.ones(2, 2))
    assert not any(key.startswith("never/") for key in run.state.optimizer.tensors)


def test_weights_that_are_tensors_weigh_micro_batches_as_in_the_single_run() -> None:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Loss:
        x, y = batch
        return Loss.sum(F.cross_entropy(model(x), y, reduction="sum", ignore_index=0), (y != 0).sum())

    model = make_model("mlp")
    several = ensemble(make_step(model, loss=loss, window=3), members=2)
    batches = make_batches(6)
    run = fold(several, init(several, model), batches)
    for number in range(2):
        single = alone(several, number, batches).state
        assert_records_equal(several.member(run.state, number).params, single.params, rtol=1e-5)


def test_a_micro_batch_of_no_weight_counts_for_nothing() -> None:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Loss:
        return Loss.mean(F.cross_entropy(model(batch[0]), batch[1]), float(batch[1].shape[0] - 4))

    model = make_model("mlp")
    several = ensemble(make_step(model, loss=loss), members=2)
    batches = [make_batch(0, 4), make_batch(1, 6), make_batch(2, 4), make_batch(3, 4)]
    run = fold(several, init(several, model), batches)
    assert (run.state.progress.updates, run.state.progress.skipped) == (1, 1)
    single = alone(several, 1, batches).state
    assert_records_equal(several.member(run.state, 1).params, single.params, rtol=1e-5)
    assert several.member(run.state, 1).progress == single.progress


def test_functional_dropout_draws_as_in_the_single_run_once_it_is_told_of() -> None:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(F.dropout(x, 0.3) + 0.1 * torch.randn_like(x)), y)

    model = make_model("mlp")
    silent = ensemble(make_step(model, loss=loss), members=2)
    with pytest.raises(SettingError, match="draws"):
        fold(silent, init(silent, model), make_batches(1))
    several = ensemble(make_step(model, loss=loss), members=2, draws=True)
    before = torch.get_rng_state()
    several(Frame(init(several, model), make_batch(0)))
    assert_records_equal(torch.get_rng_state(), before)
    run = fold(several, init(several, model, seed=3), make_batches(4))
    for number in range(2):
        single = alone(several, number, make_batches(4), seed=3).state
        assert_records_equal(several.member(run.state, number).params, single.params, rtol=1e-5)


def test_what_cannot_be_drawn_for_each_member_is_refused() -> None:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x[torch.randperm(4)]), y)

    model = make_model("mlp")
    several = ensemble(make_step(model, loss=loss), members=2, draws=True)
    with pytest.raises(SettingError, match="randperm"):
        fold(several, init(several, model), make_batches(1))


def test_what_draws_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    several, model = make_ensemble("dropout", members=2)
    state = init(several, model)
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    with pytest.raises(SettingError, match="to be compiled"):
        several(Frame(state, make_batch(0)))


def test_dropout_in_eval_mode_draws_nothing() -> None:
    several, model = make_ensemble("dropout", seeds=[4, 4], rates=[0.1, 0.2])
    model.eval()
    run = fold(several, init(several, model), make_batches(2))
    assert_records_equal(
        several.member(run.state, 0).params, alone(several, 0, make_batches(2)).state.params, rtol=1e-5
    )


def test_autocast_goes_with_it() -> None:
    model = make_model("mlp")
    step = make_step(model).replace("Forward", Forward(model, supervised(F.cross_entropy), autocast=torch.bfloat16))
    several = ensemble(step, members=2)
    run = fold(several, init(several, model), make_batches(4))
    single = alone(several, 1, make_batches(4)).state
    assert_records_equal(several.member(run.state, 1).params, single.params, rtol=0.05)


def test_nothing_before_the_step_looks_at_the_value_of_a_tensor() -> None:
    several, model = make_ensemble("batchnorm", members=3)
    state = init(several, model, loss_scale=LossScale(scale=8.0))
    with FakeTensorMode() as mode:
        fakes = pytree.tree_map_only(Tensor, mode.from_tensor, (state, make_batch(0), make_batch(1)))
        frame = Frame(fakes[0])
        for batch in fakes[1:]:
            frame = Frame(frame.state, batch)
            for transform in several.transforms[:-1]:
                frame = transform(frame)
    assert frame.ready


# -- picked out, kept, resumed -------------------------------------------------------------------------------------


def over_its_own(several: Ensemble, number: int, state: Any) -> tuple[Chain, Any]:
    """The step and the state of one member, over a module of its own."""
    step = several.steps[number]
    forward: Any = step["Forward"]
    model = copy.deepcopy(forward.model)
    step = step.replace("Forward", attrs.evolve(forward, model=model))
    return step, several.member(state, number).load_into(model)


@pytest.mark.parametrize("name", ["batchnorm", "dropout"])
def test_a_member_picked_in_the_middle_of_a_window_goes_on_by_itself(name: str) -> None:
    several, model = make_ensemble(name, seeds=[0, 1], rates=[0.02, 0.01], weight_decays=[0.0, 0.1])
    batches = make_batches(9)
    states = (state for state, _ in scan(several, init(several, model), batches))
    middle = next(state.copy() for state in states if state.progress.micro_steps == 5)
    assert middle.is_open
    for number in range(2):
        gone_on = fold(*over_its_own(several, number, middle), batches[5:])
        single = alone(several, number, batches)
        for field in ("params", "buffers", "optimizer"):
            assert_records_equal(getattr(gone_on.state, field), getattr(single.state, field), rtol=1e-5, what=field)
        assert gone_on.state.progress == single.state.progress


def test_members_that_are_kept_go_on_as_they_would_among_all() -> None:
    several, model = make_ensemble("dropout", seeds=[0, 1, 2, 3], rates=[0.1, 0.2, 0.3, 0.4])
    batches = make_batches(8)
    states = (state for state, _ in scan(several, init(several, model, loss_scale=LossScale(scale=4.0)), batches))
    middle = next(state.copy() for state in states if state.progress.micro_steps == 3)
    kept = several.keep(middle, [3, 1])
    assert [name for name, slot in kept.slots.items() if isinstance(slot, Part)] == ["member 1", "member 3"]
    seen = [e for _, events in scan(several, kept, batches[3:]) for e in events if isinstance(e, UpdateDone)]
    assert {event.part for event in seen} == {"member 1", "member 3"}
    assert {event.rates["default"] for event in seen} == {0.2, 0.4}
    few = fold(several, several.keep(middle, [1, 3]), batches[3:]).state
    many = fold(several, middle, batches[3:]).state
    for number in (1, 3):
        assert_records_equal(several.member(few, number).params, several.member(many, number).params, rtol=1e-5)


def test_what_is_not_there_cannot_be_picked_or_kept() -> None:
    several, model = make_ensemble(members=3)
    state = several.keep(init(several, model), [0, 2])
    for ask in (lambda: several.member(state, 1), lambda: several.keep(state, [0, 1])):
        with pytest.raises(UnknownNameError, match="member 1"):
            ask()
    with pytest.raises(SettingError, match="at least one member"):
        several.keep(state, [])


def test_a_run_that_was_stopped_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    def run(folder: Path, until: Updates) -> Any:
        several, model = make_ensemble("dropout", seeds=[0, 1, 2], rates=[0.02, 0.01, 0.03])
        state = init(several, model, loss_scale=LossScale(scale=4.0, interval=2))
        batches, watch = make_batches(12), [per_member(monitors.MeanLoss())]
        return fold(several, state, batches, monitors=watch, until=until, store=folder, resume="latest")

    whole = run(tmp_path / "whole", Updates(6))
    run(tmp_path / "parts", Updates(2))
    parts = run(tmp_path / "parts", Updates(6))
    assert_records_equal(parts.state, whole.state)
    assert parts.results == whole.results


def test_apply_leaves_the_state_as_it_was() -> None:
    several, model = make_ensemble("batchnorm", members=2)
    state = init(several, model)
    before = state.copy()
    after, _ = apply(several, state, make_batch(0))
    assert_records_equal(state, before)
    assert after.progress.micro_steps == 1


def test_batches_may_be_each_members_own() -> None:
    model = make_model("mlp")
    several = ensemble(make_step(model), members=2, batches="own")
    pairs = [(make_batch(i), make_batch(i + 100)) for i in range(4)]
    batches = [(torch.stack([a[0], b[0]]), torch.stack([a[1], b[1]])) for a, b in pairs]
    run = fold(several, init(several, model), batches)
    assert run.state.progress.samples == 16
    for number in range(2):
        single = alone(several, number, [pair[number] for pair in pairs]).state
        assert_records_equal(several.member(run.state, number).params, single.params, rtol=1e-5)
    with pytest.raises(LossError, match="2 rows"):
        fold(several, init(several, model), [make_batch(0)])


# -- told and watched ------------------------------------------------------------------------------------------------


def told(several: Ensemble, state: Any, batches: list[Any]) -> list[Event]:
    return [event for _, events in scan(several, state, batches) for event in events]


def test_events_carry_the_members_name_so_that_any_monitor_can_be_filtered() -> None:
    several, model = make_ensemble(rates=[0.1, 0.2])
    mine = monitors.filter(monitors.LearningRate(), lambda event: event.part == "member 1", name="mine")
    run = fold(several, init(several, model), make_batches(4), monitors=[mine, monitors.MeanLoss()])
    assert run.results["mine"] == 0.2
    events = [e for e in told(several, init(several, model), make_batches(4)) if isinstance(e, UpdateDone)]
    assert [(e.part, e.update) for e in events] == [
        ("member 0", 1), ("member 1", 1), ("member 0", 2), ("member 1", 2)
    ]  # fmt: skip
    assert all(set(e.measures) == {"accuracy"} for e in events)


def test_a_step_without_events_trains_as_well() -> None:
    model = make_model("mlp")
    several = ensemble(make_step(model).without("EmitEvents", "ClipByGlobalNorm"), members=2)
    run = fold(several, init(several, model), make_batches(4))
    single = alone(several, 1, make_batches(4)).state
    assert_records_equal(several.member(run.state, 1).params, single.params, rtol=1e-5)


def test_per_member_finds_in_each_what_the_monitor_finds_in_its_single_run() -> None:
    several, model = make_ensemble("mlp", seeds=[0, 1], rates=[0.02, 0.2])
    watch = [monitors.MeanLoss(), monitors.Best("val_loss"), monitors.GradNorm()]
    forward = Forward(model, supervised(F.cross_entropy, measures={"accuracy": accuracy}))
    evaluation = Evaluation(forward, [make_batch(50), make_batch(51, 6)], when=EveryUpdates(2))
    run = fold(
        several,
        init(several, model),
        make_batches(8),
        monitors=[per_member(monitor) for monitor in watch],
        evaluations=[several.evaluation(evaluation)],
    )
    for number in range(2):
        step, state = over_its_own(several, number, init(several, model))
        own = attrs.evolve(evaluation, step=step["Forward"])
        single = fold(step, state, make_batches(8), monitors=watch, evaluations=[own])
        for monitor in watch:
            found = run.results[monitor.name][f"member {number}"]
            assert found == pytest.approx(single.results[monitor.name], rel=1e-4), monitor.name


def test_an_evaluation_of_all_reports_means_and_each_members_own() -> None:
    several, model = make_ensemble("dropout", members=3)
    forward = Forward(model, supervised(F.cross_entropy, measures={"accuracy": accuracy}))
    evaluation = Evaluation(forward, [make_batch(50), make_batch(51, 6)])
    state = init(several, model)
    values = several.evaluation(evaluation).run(state).values
    for number in range(3):
        step, own = over_its_own(several, number, state)
        single = attrs.evolve(evaluation, step=step["Forward"]).run(own).values
        for name in ("val_loss", "val_accuracy"):
            assert values[f"{name}/member {number}"] == pytest.approx(single[name], rel=1e-5)
    assert values["val_loss"] == pytest.approx(sum(values[f"val_loss/member {i}"] for i in range(3)) / 3)
    with pytest.raises(SettingError, match="a Forward alone"):
        several.evaluation(Evaluation(chain(forward, ScaledBackward()), []))


def update(part: str | None, n: int, loss: float) -> UpdateDone:
    at: dict[str, Any] = {"micro_step": n, "update": n, "epoch": 0, "time": float(n)}
    return UpdateDone(**at, loss=loss, weight=1.0, micro_batches=1, rates={"default": 0.1}, grad_norm=1.0, part=part)


def evaluated(n: int, **values: float) -> EvalDone:
    at: dict[str, Any] = {"micro_step": n, "update": n, "epoch": 0, "time": float(n)}
    named = {name.replace("__", "/member "): value for name, value in values.items()}
    return EvalDone(**at, name="val", values=named, weight=1.0, batches=1)


def test_per_member_passes_over_parts_that_are_no_members() -> None:
    found = per_member(monitors.MeanLoss())
    assert replay([update("generator", 1, 1.0), update(None, 2, 2.0)], [found]) == {"MeanLoss": None}


def test_per_member_merges_where_its_monitor_does() -> None:
    monitor: Any = per_member(monitors.MeanLoss())
    logs = [[update("member 0", 1, 1.0), update("member 1", 1, 5.0)], [update("member 0", 1, 3.0)]]
    accumulators = [monitor.init(), monitor.init()]
    for place, log in enumerate(logs):
        for event in log:
            accumulators[place] = monitor.reduce(accumulators[place], event)
    assert monitor.result(monitor.merge(*accumulators)) == {"member 0": 2.0, "member 1": 5.0}
    assert not hasattr(per_member(monitors.LossScaleHistory()), "watches")


def test_per_member_asks_to_stop_once_every_members_monitor_does() -> None:
    monitor: Any = per_member(monitors.EarlyStopping("val_loss", patience=1))
    accumulator = monitor.init()
    for event, stops in (
        (evaluated(1, val_loss__0=1.0, val_loss__1=1.0, val_loss=1.0), False),
        (evaluated(2, val_loss__0=2.0, val_loss__1=0.5, val_loss=1.2), False),
        (evaluated(3, val_loss__0=2.0, val_loss__1=0.6, val_loss=1.2), True),
    ):
        accumulator = monitor.reduce(accumulator, event)
        assert bool(list(monitor.signals(accumulator))) is stops
    assert repr(monitor) == "per_member(EarlyStopping('val_loss', patience=1))"
    with pytest.raises(SettingError, match="a monitor"):
        per_member(monitors.MeanLoss)  # type: ignore[arg-type]


# -- sweeps ------------------------------------------------------------------------------------------------------------


def test_a_sweep_has_a_row_for_every_combination_as_if_each_had_been_a_run() -> None:
    model, batches = make_model("mlp"), make_batches(8)
    found = sweep(make_step(model), model, batches, seeds=[0, 1], rates=[0.01, 0.1])
    assert [dict(row.settings) for row in found.rows] == [
        {"seed": 0, "rate": 0.01}, {"seed": 0, "rate": 0.1}, {"seed": 1, "rate": 0.01}, {"seed": 1, "rate": 0.1}
    ]  # fmt: skip
    for row in found.rows:
        own = initialise(make_model("mlp"), seed=row.settings["seed"])
        step = make_step(own, Optimizer(torch.optim.AdamW, lr=row.settings["rate"]))
        single = fold(step, init(step, own), batches, monitors=[monitors.MeanLoss()])
        assert row.results["MeanLoss"] == pytest.approx(single.results["MeanLoss"], rel=1e-5)
        assert_records_equal(found.state(row).params, single.state.params.copy(), rtol=1e-5)


def test_a_sweep_prints_as_a_table() -> None:
    model = make_model("mlp")
    found = sweep(
        make_step(model), model, make_batches(2), weight_decays=[0.0, 0.1], loss_weights=[1.0], until=Updates(1)
    )
    head, *rows = str(found).splitlines()
    assert head.split() == ["member", "weight", "decay", "loss", "weight", "MeanLoss"]
    assert [row.split()[:3] for row in rows] == [["0", "0", "1"], ["1", "0.1", "1"]]
    assert repr(found) == "Sweep(2 members, weight decay, loss weight)"
    with pytest.raises(SettingError, match="at least one of them"):
        sweep(make_step(model), model, make_batches(2))


# -- refused ---------------------------------------------------------------------------------------------------------


class MyAdam(torch.optim.Adam):
    """May do anything."""


@pytest.mark.parametrize("cls", [torch.optim.Adafactor, torch.optim.Muon, torch.optim.NAdam, MyAdam])
def test_an_optimizer_that_is_not_known_to_work_element_by_element_is_refused(cls: Any) -> None:
    with pytest.raises(
        SettingError, match=r"one of SGD, Adam, AdamW, RMSprop, Adagrad, Lion, got '\w+'\. Another may mix"
    ):
        make_ensemble(rule=Optimizer(cls, lr=0.1))


class Rule:
    """An update rule of a user's own."""

    def init(self, state: Any) -> Any:
        return state

    def rates(self, count: int) -> dict[str, float]:
        return {}

    def update(self, params: Any, grads: Any, state: Any, **_: Any) -> Any:
        return params, state


@pytest.mark.parametrize(
    ("rule", "setting"),
    [
        (Optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1), "'dampening'"),
        (Optimizer(torch.optim.SGD, lr=0.1, groups=[Group("*", differentiable=True)]), "'differentiable'"),
        (Optimizer(torch.optim.Adam, lr=0.1, betas=lambda count: (0.9, 0.99)), "'betas'"),
        (Optimizer(torch.optim.Adam, lr=0.1, masters=True), "masters"),
        (Optimizer(torch.optim.Adam, lr=0.1, compiled=True), "compiled"),
        (Rule(), "optimizer"),
    ],
)
def test_settings_that_have_no_form_for_members_are_refused(rule: Any, setting: str) -> None:
    with pytest.raises(SettingError, match=setting):
        make_ensemble(rule=rule)


def strange(edit: Callable[[Chain], Chain]) -> Chain:
    return edit(make_step(make_model("mlp")))


@pytest.mark.parametrize(
    "edit",
    [
        lambda step: step.insert_after("Accumulate", MeasureGradients()),
        lambda step: step.insert_before("MaybeStep", named("again", ClipByGlobalNorm(1.0))),
        lambda step: step.insert_after("Forward", lambda frame: frame),
        lambda step: step.without("Accumulate", "ClipByGlobalNorm", "MaybeStep", "EmitEvents"),
        lambda step: chain(*step.transforms[:1]),
    ],
)
def test_a_step_of_another_shape_is_refused(edit: Callable[[Chain], Chain]) -> None:
    with pytest.raises(SettingError, match=r"ensemble\(step\) must be a chain of Forward, ScaledBackward, Accumulate"):
        ensemble(strange(edit), members=2)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({}, "members"),
        ({"members": 0}, "members"),
        ({"members": True}, "members"),
        ({"rates": []}, "members"),
        ({"members": 3, "rates": [0.1, 0.2]}, "one of them|of one length"),
        ({"seeds": [1], "rates": [0.1, 0.2]}, "of one length"),
        ({"seeds": [1, -1]}, r"seeds\)\[1\]"),
        ({"rates": [0.1, -0.1]}, r"rates\)\[1\]"),
        ({"weight_decays": [math.inf]}, r"weight_decays\)\[0\]"),
        ({"loss_weights": [-1.0]}, r"loss_weights\)\[0\]"),
        ({"members": 2, "batches": "mine"}, "batches"),
    ],
)
def test_settings_are_checked_when_it_is_built(settings: dict[str, Any], what: str) -> None:
    model = make_model("mlp")
    with pytest.raises(SettingError, match=what):
        ensemble(make_step(model), **settings)


def test_recomputation_is_refused() -> None:
    model = make_model("mlp")
    step = make_step(model).replace("Forward", Forward(model, supervised(F.cross_entropy), recompute="*"))
    with pytest.raises(SettingError, match="recompute"):
        ensemble(step, members=2)


def test_complex_parameters_are_refused_when_the_state_is_made() -> None:
    model = nn.Linear(2, 2, dtype=torch.complex64)
    several = ensemble(make_step(model), rates=[0.1, 0.2])
    with pytest.raises(SettingError, match="of real numbers"):
        init(several, model)


def test_a_weight_that_hangs_on_the_member_is_refused() -> None:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Loss:
        output = model(batch[0])
        return Loss.mean(F.cross_entropy(output, batch[1]), output.sigmoid().sum())

    model = make_model("mlp")
    several = ensemble(make_step(model, loss=loss), members=2)
    with pytest.raises(LossError, match="the same for all members"):
        fold(several, init(several, model), make_batches(1))


def test_the_state_of_another_optimizer_is_refused() -> None:
    several, model = make_ensemble(rule=SGD, members=2)
    state = fold(several, init(several, model), make_batches(2)).state
    other, _ = make_ensemble(members=2)
    with pytest.raises(OptimizerMismatchError, match="AdamW finds no 'step'"):
        fold(other, state.copy(), make_batches(2))
    fold(other, attrs.evolve(state.copy(), optimizer=OptimizerState()), make_batches(2))


def test_the_state_of_one_model_is_refused() -> None:
    several, model = make_ensemble(members=2)
    with pytest.raises(MissingFieldError, match="init"):
        fold(several, init(several.steps[0], model), make_batches(2))


def test_order_is_checked_around_an_ensemble_too() -> None:
    several, _ = make_ensemble(members=2)
    with pytest.raises(OrderError):
        chain(named("first", ClipByGlobalNorm(1.0)), several)


def test_it_prints_as_it_was_written() -> None:
    several, _ = make_ensemble(rates=[0.1, 0.2])
    assert repr(several).startswith("ensemble(chain(Forward(model=Sequential")
    assert repr(several).endswith("rates=[0.1, 0.2])")
    assert "MaybeStep" in str(several)
