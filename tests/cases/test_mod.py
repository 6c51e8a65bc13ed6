"""Kinds of models: tied weights, buffers, frozen parameters, nested batches, nothing to differentiate.

Left out of MOD-1: saving to disk. Left out of MOD-4: moving a batch to a device, which this library leaves to its user.
"""

import dataclasses
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline import (
    Accumulate,
    Forward,
    Frame,
    Loss,
    MaybeStep,
    Optimizer,
    ScaledBackward,
    Tensors,
    TrainState,
    UpdateInBackward,
    apply,
    branch,
    chain,
    fold,
    init,
    monitors,
    run_of,
    scan,
)
from pipeline.errors import HiddenGraphError, NoGraphError, StateMismatchError
from pipeline.events import UpdateDone, UpdateSkipped
from pipeline.transform import Chain
from tests.cases.probe import Probe, Recorder, bits, items, of, probe_step, step_of

both_ways = pytest.mark.parametrize("donate", [True, False], ids=["donated", "copied"])

# -- MOD-1: tied weights ---------------------------------------------------------------------------


def tied(weight: float = 3.0) -> nn.Sequential:
    """Two 1×1 linear layers that share one weight."""
    model = untied(weight, weight)
    model[1].weight = model[0].weight
    return model


def untied(first: float, second: float) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        for weight, value in zip(weights(model), (first, second), strict=True):
            weight.fill_(value)
    return model


def weights(model: nn.Sequential) -> list[Tensor]:
    """The weight of each layer, as the layer itself has it."""
    return [cast("nn.Linear", layer).weight for layer in model]


def values(model: nn.Sequential) -> list[float]:
    return [weight.item() for weight in weights(model)]


ONE = torch.ones(1, 1)


def output(model: Any, batch: Tensor) -> Tensor:
    return model(batch).sum()


def tied_step(model: nn.Module) -> Chain:
    return step_of(model, output, Optimizer(torch.optim.SGD, lr=0.1), max_norm=100.0)


def is_tied(model: nn.Sequential) -> bool:
    first, second = weights(model)
    return first is second


def test_mod_1_a_tied_weight_is_one_entry() -> None:
    model = tied()
    state = init(tied_step(model), model)
    assert list(state.params) == ["0.weight"]
    assert sum(t.numel() for t in state.params.values()) == 1
    assert list(state.copy().params) == ["0.weight"]


@both_ways
@pytest.mark.parametrize("optimizer", ["bound", "copied by hand"])
def test_mod_1_a_fold_updates_the_tied_weight_once_by_the_whole_gradient(donate: bool, optimizer: str) -> None:
    model, recorder = tied(), Recorder()
    step = tied_step(model)
    state = init(step, model)
    state = state.copy() if optimizer == "copied by hand" else state  # then it runs through a functional call
    run = fold(step, state, [ONE], donate=donate, monitors=[monitors.GradNorm()], sinks=[recorder])
    assert run.state.params["0.weight"].item() == pytest.approx(2.4)
    assert run.results["GradNorm"]["last"] == pytest.approx(6.0)  # 8.49 if it were counted twice
    assert len(run.state.params) == 1
    assert is_tied(model)
    in_module = 2.4 if donate and optimizer == "bound" else 3.0
    assert values(model) == pytest.approx([in_module] * 2)
    run.state.load_into(model)
    assert is_tied(model)
    assert values(model) == pytest.approx([2.4] * 2)
    assert model(ONE).item() == pytest.approx(2.4**2)


@both_ways
def test_mod_1_so_does_a_scan(donate: bool) -> None:
    model = tied()
    step = tied_step(model)
    *_, (state, _) = scan(step, init(step, model), [ONE], donate=donate)
    assert state.params["0.weight"].item() == pytest.approx(2.4)
    assert is_tied(model)


def test_mod_1_apply_leaves_the_module_and_its_tie_alone() -> None:
    model = tied()
    step = tied_step(model)
    after, events = apply(step, init(step, model), ONE)
    assert after.params["0.weight"].item() == pytest.approx(2.4)
    assert float(of(UpdateDone, events)[0].grad_norm) == pytest.approx(6.0)
    assert is_tied(model)
    assert values(model) == [3.0, 3.0]
    # The next step is a functional call with a weight that is not the module's own: 2.4 - 0.1 · 4.8.
    again, _ = apply(step, after, ONE)
    assert again.params["0.weight"].item() == pytest.approx(1.92)
    assert is_tied(model)


def test_mod_1_a_copy_loads_into_a_tied_module_and_stays_tied() -> None:
    model = tied()
    step = tied_step(model)
    state = fold(step, init(step, model), [ONE]).state
    other = tied(7.0)
    loaded = state.copy().load_into(other)
    assert is_tied(other)
    assert values(other) == pytest.approx([2.4, 2.4])
    assert loaded.params["0.weight"] is weights(other)[0]
    # And goes on from there, without a jump in the loss.
    other_step, recorder = tied_step(other), Recorder()
    end = fold(other_step, loaded, [ONE], sinks=[recorder])
    assert float(of(UpdateDone, recorder.events)[0].loss) == pytest.approx(2.4**2)
    assert end.state.params["0.weight"].item() == pytest.approx(1.92)
    assert values(other) == pytest.approx([1.92, 1.92])


def by_hand(first: float, second: float) -> TrainState:
    """A state with both names of the tied weight, as one from an untied model has."""
    model = untied(first, second)
    return TrainState(Tensors(dict(model.named_parameters())))


def test_mod_1_two_values_for_one_tied_weight_are_refused_and_nothing_is_written() -> None:
    model = tied(7.0)
    with pytest.raises(StateMismatchError, match=r"1\.weight.*tied"):
        by_hand(3.0, 4.0).load_into(model)
    assert values(model) == [7.0, 7.0]


def test_mod_1_one_value_under_both_names_is_taken() -> None:
    model = tied(7.0)
    loaded = by_hand(3.0, 3.0).load_into(model)
    assert list(loaded.params) == ["0.weight"]
    assert values(model) == [3.0, 3.0]
    assert is_tied(model)


@pytest.mark.parametrize("both", [(3.0, 4.0), (3.0, 3.0)])
def test_mod_1_a_step_refuses_a_state_with_both_names_and_says_which(both: tuple[float, float]) -> None:
    # Stepped as two parameters they would part, or one of them would be ignored.
    with pytest.raises(StateMismatchError, match=r"1\.weight"):
        apply(tied_step(tied()), by_hand(*both), ONE)


def test_mod_1_a_state_of_a_tied_model_does_not_fit_an_untied_one() -> None:
    model = tied()
    state = init(tied_step(model), model)
    with pytest.raises(StateMismatchError, match=r"lacks 1\.weight"):
        state.load_into(untied(1.0, 2.0))


# -- MOD-2: buffers --------------------------------------------------------------------------------


def normed() -> nn.Module:
    return nn.BatchNorm1d(1)


def squares(model: Any, batch: Tensor) -> Tensor:
    return model(batch).pow(2).mean()


def norm_step(model: nn.Module, every: int = 1) -> Chain:
    return step_of(model, squares, Optimizer(torch.optim.SGD, lr=0.1), every=every)


FIRST, SECOND = torch.tensor([[0.0], [2.0]]), torch.tensor([[10.0], [12.0]])


@pytest.mark.parametrize("bound", [True, False], ids=["bound", "not bound"])
def test_mod_2_apply_leaves_the_old_record_as_it_was_and_updates_the_new_one(bound: bool) -> None:
    model = normed()
    step = norm_step(model)
    state = init(step, model) if bound else init(step, model).copy()
    before, in_module = bits(state), {name: t.clone() for name, t in model.state_dict().items()}
    after, _ = apply(step, state, SECOND)
    assert bits(state) == before
    assert all(torch.equal(model.state_dict()[name], t) for name, t in in_module.items())
    assert after.buffers["running_mean"].item() == pytest.approx(1.1)
    assert after.buffers["running_var"].item() == pytest.approx(1.1)
    assert after.buffers["num_batches_tracked"].item() == 1
    second = bits(after)
    later, _ = apply(step, after, SECOND)
    assert bits(after) == second
    assert later.buffers["num_batches_tracked"].item() == 2


@both_ways
@pytest.mark.parametrize("bound", [True, False], ids=["bound", "not bound"])
def test_mod_2_a_window_of_two_moves_the_statistics_twice(donate: bool, bound: bool) -> None:
    # 1.19, 1.19, 2; the joined batch would give 0.6, 4.367, 1: statistics are those of the micro-batches.
    model = normed()
    step = norm_step(model, every=2)
    state = init(step, model) if bound else init(step, model).copy()
    tracked: list[int] = []
    end = state
    for end, _ in scan(step, state, [FIRST, SECOND], donate=donate):
        tracked.append(int(end.buffers["num_batches_tracked"]))
    assert tracked[:2] == [1, 2]
    assert tracked[-1] == 2  # closing a run draws no further forward
    assert end.progress.updates == 1
    assert end.buffers["running_mean"].item() == pytest.approx(1.19)
    assert end.buffers["running_var"].item() == pytest.approx(1.19)
    whole = init(step, normed()).copy()
    joined, _ = apply(norm_step(normed()), whole, torch.cat([FIRST, SECOND]))
    assert joined.buffers["running_mean"].item() == pytest.approx(0.6)
    assert joined.buffers["running_var"].item() == pytest.approx(4.367, abs=1e-3)
    assert joined.buffers["num_batches_tracked"].item() == 1


def test_mod_2_not_donated_every_record_keeps_its_own_statistics() -> None:
    model = normed()
    step = norm_step(model)
    states = [state for state, _ in scan(step, init(step, model), [FIRST, SECOND, FIRST], donate=False)]
    assert [int(s.buffers["num_batches_tracked"]) for s in states[:3]] == [1, 2, 3]
    assert [s.buffers["running_mean"].item() for s in states[:3]] == pytest.approx([0.1, 1.19, 1.171])
    assert model.num_batches_tracked.item() == 0  # type: ignore[union-attr]


@both_ways
def test_mod_2_in_eval_mode_nothing_moves(donate: bool) -> None:
    model = normed().eval()
    step = norm_step(model)
    run = fold(step, init(step, model), [FIRST, SECOND], donate=donate)
    assert run.state.progress.updates == 2
    assert run.state.buffers["num_batches_tracked"].item() == 0
    assert run.state.buffers["running_mean"].item() == 0


class Counting(nn.Module):
    """Counts its calls twice: in a buffer that it puts anew, and in a plain Python number."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.python_calls = 0

    def forward(self, batch: Tensor) -> Tensor:
        self.calls = self.calls + 1
        self.python_calls += 1
        return self.w * batch


@both_ways
@pytest.mark.parametrize("bound", [True, False], ids=["bound", "not bound"])
def test_mod_2_a_buffer_that_the_forward_puts_anew_is_followed(donate: bool, bound: bool) -> None:
    model = Counting()
    step = norm_step(model)
    state = init(step, model) if bound else init(step, model).copy()
    run = fold(step, state, [ONE] * 3, donate=donate)
    assert run.state.buffers["calls"].item() == 3
    assert model.calls.item() == (3 if bound and donate else 0)


def test_mod_2_a_python_counter_is_no_part_of_the_record() -> None:
    # Not supported: the module's plain attributes go on counting, whatever state a step starts from.
    model = Counting()
    step = norm_step(model)
    state = init(step, model)
    first, _ = apply(step, state, ONE)
    assert model.python_calls == 1  # one forward a micro-batch, and not one more
    second, _ = apply(step, state, ONE)
    assert model.python_calls == 2
    assert bits(first) == bits(second)
    assert first.buffers["calls"].item() == 1


# -- MOD-3: requires_grad --------------------------------------------------------------------------


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([0.5, -0.5]))
        self.b = nn.Parameter(torch.tensor([0.25, 1.0]))
        self.c = nn.Parameter(torch.tensor([-1.0, 2.0]))


def towards(model: Any, target: Tensor) -> Tensor:
    return sum(((p - target) ** 2 / 2).sum() for p in (model.a, model.b, model.c))  # type: ignore[return-value]


TARGETS = [torch.tensor([float(n % 3), float(-n % 4)]) for n in range(30)]

OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "sgd": lambda: Optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda: Optimizer(torch.optim.AdamW, lr=0.1, weight_decay=0.1),
    "adagrad": lambda: Optimizer(torch.optim.Adagrad, lr=0.1, weight_decay=0.1),
}
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)


def flags(state: TrainState) -> dict[str, bool]:
    return {name: p.requires_grad for name, p in state.params.items()}


@both_ways
@each_optimizer
@pytest.mark.parametrize("every", [1, 2])
def test_mod_3_a_frozen_parameter_stays_bitwise_the_same(
    optimizer: Callable[[], Optimizer], donate: bool, every: int
) -> None:
    model = Three()
    model.c.requires_grad_(False)
    step = step_of(model, towards, optimizer(), every=every)
    state = init(step, model)
    start = {name: p.detach().clone() for name, p in state.params.items()}
    kept: list[dict[str, Any]] = []
    for now, _ in scan(step, state, TARGETS[:8], donate=donate):
        assert flags(now) == {"a": True, "b": True, "c": False}
        assert torch.equal(now.params["c"], start["c"])
        if now.progress.updates:  # there may be state of it before its first gradient, but none that moves
            kept.append({key: value for key, value in bits(now).items() if key.startswith("optimizer c")})
        state = now
    assert kept == [kept[0]] * len(kept)
    assert not torch.equal(state.params["a"], start["a"])
    assert not torch.equal(state.params["b"], start["b"])
    assert [p.requires_grad for p in model.parameters()] == [True, True, False]


def freezing(name: str, frozen: Callable[[Frame], bool]) -> Callable[[Frame], Frame]:
    def freeze(frame: Frame) -> Frame:
        frame.state.params[name].requires_grad_(not frozen(frame))
        return frame

    return freeze


@both_ways
@each_optimizer
def test_mod_3_freezing_and_releasing_acts_at_once_as_in_a_plain_loop(
    optimizer: Callable[[], Optimizer], donate: bool
) -> None:
    model = Three()
    step = step_of(model, towards, optimizer()).insert_before(
        "Forward", freezing("b", lambda frame: 3 <= frame.state.progress.updates < 6)
    )
    plain = Three()
    rule = optimizer()
    by_torch, _ = rule.build(Tensors(dict(plain.named_parameters())))
    trace: list[dict[str, Tensor]] = []
    moments: list[dict[str, Any]] = []
    for state, events in scan(step, init(step, model), TARGETS[:9], donate=donate):
        if of(UpdateDone, events):
            trace.append({name: p.detach().clone() for name, p in state.params.items()})
            moments.append({k: v.clone() for k, v in state.optimizer.of("b").items() if isinstance(v, Tensor)})
            assert flags(state) == {"a": True, "b": not 3 <= state.progress.updates - 1 < 6, "c": True}
    assert len(trace) == 9
    for n, target in enumerate(TARGETS[:9]):
        plain.b.requires_grad_(not 3 <= n < 6)
        plain.zero_grad()
        towards(plain, target).backward()
        by_torch.step()
        for name, p in plain.named_parameters():
            assert torch.equal(trace[n][name], p), (n, name)
    frozen = [trace[n]["b"] for n in (2, 3, 4, 5)]
    assert all(torch.equal(b, frozen[0]) for b in frozen)
    assert not torch.equal(trace[6]["b"], frozen[0])
    for n in (3, 4, 5):
        assert moments[n].keys() == moments[2].keys()
        assert all(torch.equal(moments[n][key], moments[2][key]) for key in moments[2])


def mean_step(model: nn.Module, frozen_at: set[int]) -> Chain:
    """Windows of three micro-batches, plain SGD at rate 1, `b` frozen in the micro-steps given."""
    step = step_of(model, towards, Optimizer(torch.optim.SGD, lr=1.0), every=3)
    return step.insert_before("Forward", freezing("b", lambda frame: frame.began.micro_steps in frozen_at))


SIX = [torch.full((2,), y) for y in (3.0, 6.0, 9.0, 1.0, 2.0, 6.0)]
"""Two windows of mean target 6 and 3: at rate 1 a parameter lands on the mean."""


@both_ways
@pytest.mark.parametrize("frozen_at", [{2}, {1, 2}, {0, 1, 2}])
def test_mod_3_what_a_parameter_gathered_before_it_was_frozen_is_dropped(donate: bool, frozen_at: set[int]) -> None:
    model = Three()
    step = mean_step(model, frozen_at)
    seen = [s.params["b"].tolist() for s, e in scan(step, init(step, model), SIX, donate=donate) if of(UpdateDone, e)]
    assert seen[0] == [0.25, 1.0]
    # Nothing of it comes back in the next window, when the parameter is released.
    assert seen[1] == pytest.approx([3.0, 3.0])


@both_ways
def test_mod_3_the_others_get_their_whole_window(donate: bool) -> None:
    model = Three()
    step = mean_step(model, {1, 2})
    seen = [s.params["a"].tolist() for s, e in scan(step, init(step, model), SIX, donate=donate) if of(UpdateDone, e)]
    assert seen == [pytest.approx([6.0, 6.0]), pytest.approx([3.0, 3.0])]


@both_ways
def test_mod_3_released_before_the_window_closes_it_keeps_what_it_gathered(donate: bool) -> None:
    model = Three()
    step = mean_step(model, {1})
    seen = [s.params["b"].tolist() for s, e in scan(step, init(step, model), SIX, donate=donate) if of(UpdateDone, e)]
    # From micro-batches 0 and 2, divided by all three: b - ((b - 3) + (b - 9)) / 3.
    assert seen[0] == pytest.approx([b - ((b - 3) + (b - 9)) / 3 for b in (0.25, 1.0)])


def in_turn_by_torch(rules: tuple[Optimizer, Optimizer], n: int) -> Three:
    """The plain loop: an optimizer over `a` and another over `b`, in turn; `c` frozen for good."""
    model = Three()
    model.c.requires_grad_(False)
    first, _ = rules[0].build(Tensors({"a": model.a}))
    second, _ = rules[1].build(Tensors({"b": model.b}))
    for i, target in enumerate(TARGETS[:n]):
        for p, mine in ((model.a, 0), (model.b, 1)):
            p.requires_grad_(i % 2 == mine)
            p.grad = None
        towards(model, target).backward()
        (first, second)[i % 2].step()
    return model


IN_TURN = [
    ("sgd", "sgd with momentum"),
    ("sgd with momentum", "adamw"),
]
RULES: dict[str, Callable[[], Optimizer]] = {
    "sgd": lambda: Optimizer(torch.optim.SGD, lr=0.1),
    "sgd with momentum": lambda: Optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda: Optimizer(torch.optim.AdamW, lr=0.05),
}


@both_ways
@pytest.mark.parametrize("names", IN_TURN, ids=" then ".join)
def test_mod_3_two_optimizers_in_turn_each_with_a_fold_of_its_own(donate: bool, names: tuple[str, str]) -> None:
    rules = RULES[names[0]](), RULES[names[1]]()
    plain = in_turn_by_torch(rules, 8)
    model = Three()
    model.c.requires_grad_(False)
    steps = [step_of(model, towards, rule) for rule in rules]
    state = init(steps[0], model)
    for i, target in enumerate(TARGETS[:8]):
        state.params["a"].requires_grad_(i % 2 == 0)
        state.params["b"].requires_grad_(i % 2 == 1)
        state = fold(steps[i % 2], state, [target], donate=donate).state
        assert flags(state) == {"a": i % 2 == 0, "b": i % 2 == 1, "c": False}
    for name, p in plain.named_parameters():
        assert torch.equal(state.params[name], p), name


@both_ways
@pytest.mark.parametrize("names", IN_TURN, ids=" then ".join)
def test_mod_3_two_optimizers_in_turn_within_one_chain(donate: bool, names: tuple[str, str]) -> None:
    rules = RULES[names[0]](), RULES[names[1]]()
    plain = in_turn_by_torch(rules, 8)
    model = Three()
    model.c.requires_grad_(False)

    def first_in_turn(frame: Frame) -> bool:
        return frame.began.updates % 2 == 0

    def flip(frame: Frame) -> Frame:
        frame.state.params["a"].requires_grad_(first_in_turn(frame))
        frame.state.params["b"].requires_grad_(not first_in_turn(frame))
        return frame

    step = step_of(model, towards, rules[0])
    step = step.replace("MaybeStep", branch(first_in_turn, MaybeStep(rules[0]), MaybeStep(rules[1])))
    step = step.insert_before("Forward", flip)
    state = fold(step, init(step, model), TARGETS[:8], donate=donate).state
    for name, p in plain.named_parameters():
        assert torch.equal(state.params[name], p), name


# -- MOD-4: nested batches -------------------------------------------------------------------------


class Named(NamedTuple):
    x: Tensor
    label: Tensor | None


@dataclasses.dataclass
class Data:
    x: Tensor
    note: str = "kept"


@attrs.frozen(eq=False)
class Record:
    x: Tensor
    inner: Any = None


X = torch.arange(6.0).reshape(3, 2)
NESTED: dict[str, tuple[Any, int]] = {
    "a tensor": (X, 3),
    "a dict": ({"x": X}, 3),
    "a tuple with None": ((X, None), 3),
    "a NamedTuple": (Named(X, None), 3),
    "a dataclass": (Data(X), 3),
    "an attrs record": (Record(X), 3),
    "a list of str": (["a", "b"], 1),
    "an int": (7, 1),
    "a 0-d tensor": (torch.tensor(2.0), 1),
    "an empty dict": ({}, 1),
    "a tensor used twice": ((X, X), 3),
    "a 0-d tensor first": ((torch.tensor(2.0), X), 3),
    "an OrderedDict": (OrderedDict(scale=torch.tensor(2.0), x=X), 3),
    "a mapping that is no dict": (UserDict(x=X), 3),
    "a record in a record": (Record(torch.tensor(1.0), {"deep": [None, Data(X)]}), 3),
    "all of them": (
        {
            "text": ["a", "b"],
            "count": 7,
            "zero": torch.tensor(2.0),
            "empty": {},
            "pair": (X, None),
            "named": Named(torch.ones(5, 1), None),
            "data": Data(torch.ones(4)),
            "record": Record(torch.ones(2)),
            "twice": X,
        },
        3,
    ),
}


@both_ways
@pytest.mark.parametrize(("batch", "samples"), NESTED.values(), ids=NESTED)
@pytest.mark.parametrize("bound", [True, False], ids=["bound", "not bound"])
def test_mod_4_the_loss_gets_the_very_batch_that_the_stream_gave(
    batch: Any, samples: int, donate: bool, bound: bool
) -> None:
    got: list[Any] = []

    def loss(model: Any, given: Any) -> Tensor:
        got.append(given)
        return model().sum()

    model = Probe()
    step = probe_step(model, loss=loss)
    state = init(step, model) if bound else init(step, model).copy()
    run = fold(step, state, [batch], donate=donate)
    assert len(got) == 1
    assert got[0] is batch
    assert run.state.progress.samples == samples


def test_mod_4_what_is_in_the_batch_is_left_as_it_was() -> None:
    batch, _ = NESTED["all of them"]
    before = {key: id(value) for key, value in batch.items()}
    x = X.clone()
    step = probe_step(model := Probe(), loss=lambda m, b: (m() * b["pair"][0]).sum())
    fold(step, init(step, model), [batch] * 3)
    assert {key: id(value) for key, value in batch.items()} == before
    assert torch.equal(X, x)
    assert not X.requires_grad
    assert X.grad is None


def test_mod_4_the_loss_function_may_count_the_samples_itself() -> None:
    step = probe_step(model := Probe(), loss=lambda m, b: Loss.mean(m().sum(), samples=len(b)))
    assert fold(step, init(step, model), [["a", "b"]]).state.progress.samples == 2


# -- MOD-5: nothing to differentiate ---------------------------------------------------------------

GOOD = [items(2.0), items(4.0)]


@both_ways
def test_mod_5_everything_frozen_is_an_error_that_leaves_the_state_unchanged(donate: bool) -> None:
    model = Probe()
    step = step_of(model, probe_loss(), Optimizer(torch.optim.AdamW, lr=0.1))
    then: dict[str, Any] = {}

    def freeze_third(frame: Frame) -> Frame:
        if frame.began.micro_steps == 2:
            then.update(bits(frame.state))
        frame.state.params["w"].requires_grad_(frame.began.micro_steps != 2 or bool(released))
        return frame

    released: list[bool] = []
    step = step.insert_before("Forward", freeze_third)
    with pytest.raises(NoGraphError, match="every parameter is frozen") as failure:
        fold(step, init(step, model), [*GOOD, items(6.0)], donate=donate)
    state = run_of(failure.value).state
    assert then
    assert bits(state) == then
    # The next window is a normal one.
    released.append(True)
    plain = Probe()
    plain_step = step_of(plain, probe_loss(), Optimizer(torch.optim.AdamW, lr=0.1))
    whole = fold(plain_step, init(plain_step, plain), [*GOOD, items(6.0)]).state
    state.params["w"].requires_grad_(True)
    end = fold(step, state, [items(6.0)], donate=donate).state
    assert torch.equal(end.params["w"], whole.params["w"])
    assert end.progress.updates == 3


def probe_loss() -> Any:
    return lambda model, batch: ((model() - batch.y) ** 2 / 2).mean()


def test_mod_5_apply_leaves_the_state_unchanged_too() -> None:
    model = Probe()
    step = probe_step(model)
    state = init(step, model)
    before = bits(state)
    model.w.requires_grad_(False)
    with pytest.raises(NoGraphError, match="every parameter is frozen"):
        apply(step, state, items(1.0))
    assert bits(state) == before
    model.w.requires_grad_(True)
    assert apply(step, state, items(1.0))[0].params["w"].item() == 1.0


@both_ways
def test_mod_5_a_model_with_statistics_can_go_on_after_that_error(donate: bool) -> None:
    # The forward of the batch that failed has run, and a donated state's statistics may have seen it; all else is as
    # it was, and the state can be used.
    model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    step = step_of(model, squares, Optimizer(torch.optim.AdamW, lr=0.1))
    batch = torch.tensor([[1.0], [3.0]])
    then: dict[str, Any] = {}

    def freeze_third(frame: Frame) -> Frame:
        if frame.began.micro_steps == 2:
            then.update({k: v for k, v in bits(frame.state).items() if not (donate and k.startswith("buffer"))})
            for p in frame.state.params.values():
                p.requires_grad_(False)
        return frame

    freezing_step = step.insert_before("Forward", freeze_third)
    with pytest.raises(NoGraphError) as failure:
        fold(freezing_step, init(step, model), [batch] * 3, donate=donate)
    state = run_of(failure.value).state
    after = bits(state)
    assert then
    assert {key: after[key] for key in then} == then
    for p in state.params.values():
        p.requires_grad_(True)
    assert fold(step, state, [batch], donate=donate).state.progress.updates == 3


@both_ways
def test_mod_5_none_passes_over_such_a_window(donate: bool) -> None:
    model = Probe()
    step = probe_step(model)

    def stream() -> Iterator[Any]:
        yield from GOOD
        model.w.requires_grad_(False)
        yield None
        model.w.requires_grad_(True)
        yield items(6.0)

    run = fold(step, init(step, model), stream(), donate=donate)
    assert run.state.params["w"].item() == 6.0


@both_ways
def test_mod_5_frozen_before_its_window_closes_there_is_nothing_to_update_and_the_event_says_so(donate: bool) -> None:
    model, recorder = Probe(), Recorder()
    step = probe_step(model, every=2)

    def freeze_after_backward(frame: Frame) -> Frame:
        frame.state.params["w"].requires_grad_(frame.began.micro_steps != 1)
        return frame

    step = step.insert_before("Accumulate", freeze_after_backward)
    thaw = freezing("w", lambda frame: False)
    step = step.insert_before("Forward", thaw)
    run = fold(step, init(step, model), [*GOOD, *GOOD], donate=donate, sinks=[recorder])
    (skipped,) = of(UpdateSkipped, recorder.events)
    assert (skipped.micro_step, skipped.update, skipped.skipped) == (2, 0, 1)
    assert "non-finite" not in skipped.reason
    assert run.state.params["w"].item() == 3.0
    assert run.state.progress.updates == 1


@both_ways
def test_mod_5_a_loss_that_depends_on_the_batch_alone_is_told_apart_from_non_finite_gradients(donate: bool) -> None:
    model, recorder = Probe(), Recorder()
    step = probe_step(model, loss=lambda m, b: (b**2).sum())
    state = init(step, model)
    batch = torch.ones(2, requires_grad=True)
    try:
        run = fold(step, state, [batch], donate=donate, sinks=[recorder])
    except NoGraphError as error:
        run = run_of(error)
    else:
        (skipped,) = of(UpdateSkipped, recorder.events)
        assert "non-finite" not in skipped.reason
    assert run.state.params["w"].item() == 0.0
    assert run.state.progress.updates == 0
    assert batch.grad is None


def test_mod_5_a_model_without_parameters_is_an_error_that_says_so() -> None:
    model = nn.Identity()
    step = norm_step(model)
    state = init(step, model)
    with pytest.raises(NoGraphError, match="no parameters"):
        apply(step, state, ONE)
    with pytest.raises(NoGraphError, match="no parameters"):
        fold(step, state, [ONE])


def test_mod_5_a_model_without_parameters_can_be_evaluated() -> None:
    state = init(norm_step(nn.Identity()), nn.Identity())
    frame = Forward(nn.Identity(), squares)(Frame(state, ONE * 2))
    assert frame.loss is not None
    assert frame.loss.item() == 4.0


class Shaped(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(shape))


RULES_OF_ALL_KINDS = pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])


@both_ways
@RULES_OF_ALL_KINDS
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_mod_5_a_parameter_without_elements_is_no_trouble(
    donate: bool, cls: type[torch.optim.Optimizer], max_norm: float | None
) -> None:
    model, recorder = Shaped(0), Recorder()
    step = step_of(model, lambda m, b: (m.w.sum() - b) ** 2, Optimizer(cls, lr=0.1), max_norm=max_norm)
    run = fold(step, init(step, model), [torch.tensor(1.0)] * 2, donate=donate, sinks=[recorder])
    assert run.state.params["w"].shape == (0,)
    updates = of(UpdateDone, recorder.events)
    assert [float(u.grad_norm) for u in updates] == [0.0, 0.0]
    assert [float(u.loss) for u in updates] == [1.0, 1.0]


@both_ways
@pytest.mark.parametrize("max_norm", [None, 100.0])
@pytest.mark.parametrize("every", [1, 2])
def test_mod_5_a_0_d_parameter_trains(donate: bool, max_norm: float | None, every: int) -> None:
    model = Shaped()
    step = step_of(
        model, lambda m, b: (m.w - b) ** 2 / 2, Optimizer(torch.optim.SGD, lr=1.0), every=every, max_norm=max_norm
    )
    run = fold(step, init(step, model), [torch.tensor(5.0)] * 2, donate=donate)
    assert run.state.params["w"].shape == ()
    assert run.state.params["w"].item() == pytest.approx(5.0)


@both_ways
@each_optimizer
@pytest.mark.parametrize("every", [1, 2])
def test_mod_5_a_parameter_that_the_loss_does_not_use_stays_as_it_is_with_its_state(
    optimizer: Callable[[], Optimizer], donate: bool, every: int
) -> None:
    def first_all_then_a(model: Any, batch: tuple[bool, Tensor]) -> Tensor:
        all_of_them, target = batch
        return towards(model, target) if all_of_them else ((model.a - target) ** 2).sum()

    model = Three()
    step = step_of(model, first_all_then_a, optimizer(), every=every)
    state = fold(step, init(step, model), [(True, t) for t in TARGETS[: 2 * every]], donate=donate).state
    before = {k: v for k, v in bits(state).items() if k.startswith(("param b", "optimizer b", "param c"))}
    moving = bits(state)["param a"]
    assert len(before) >= 3
    state = fold(step, state, [(False, t) for t in TARGETS[: 3 * every]], donate=donate).state
    after = bits(state)
    assert {key: after[key] for key in before} == before
    assert after["param a"] != moving
    assert state.progress.updates == 5


@both_ways
def test_mod_5_a_parameter_that_was_never_used_has_no_optimizer_state(donate: bool) -> None:
    model = Three()
    step = step_of(model, lambda m, t: ((m.a - t) ** 2).sum(), OPTIMIZERS["adamw"]())
    run = fold(step, init(step, model), TARGETS[:3], donate=donate)
    assert run.state.optimizer.of("b") == {}
    assert torch.equal(run.state.params["b"], Three().b)


class Reentrant(nn.Sequential):
    """The first layer recomputed by the older way of torch, which calls autograd anew."""

    def forward(self, input: Tensor) -> Tensor:
        return self[1](checkpoint(self[0], input.requires_grad_(), use_reentrant=True))


@pytest.mark.parametrize(
    "through",
    [
        [ScaledBackward(), Accumulate(1), MaybeStep(Optimizer(torch.optim.SGD, lr=0.1))],
        [ScaledBackward(), lambda frame: frame, Accumulate(2), MaybeStep(Optimizer(torch.optim.SGD, lr=0.1))],
        [UpdateInBackward(Optimizer(torch.optim.SGD, lr=0.1))],
    ],
    ids=["into the window", "by itself", "in the backward pass"],
)
def test_mod_5_a_reentrant_checkpoint_is_refused_and_not_passed_over(through: list[Any]) -> None:
    model = Reentrant(nn.Linear(3, 4), nn.Linear(4, 2))
    step = chain(Forward(model, lambda model, batch: model(batch).square().mean()), *through)
    with pytest.raises(HiddenGraphError, match="use_reentrant=False"):
        fold(step, init(step, model), [torch.ones(1, 3)])


def test_mod_5_a_checkpoint_of_the_present_kind_gives_every_gradient() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

    def loss(model: nn.Sequential, batch: Tensor) -> Tensor:
        return model[1](checkpoint(model[0], batch, use_reentrant=False)).square().mean()  # type: ignore[operator]

    step = chain(Forward(model, loss), ScaledBackward())
    frame = step(Frame.begin(init(step, model), torch.ones(1, 3)))
    assert set(frame.grads) == {name for name, _ in model.named_parameters()}
