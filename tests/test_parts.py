"""Several optimizers in one step: each part of the model with a step of its own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline import (
    Accumulate,
    AverageWeights,
    EmitEvents,
    Forward,
    Loss,
    LossScale,
    MaybeStep,
    Optimizer,
    ScaledBackward,
    Updates,
    apply,
    chain,
    every,
    fold,
    init,
    part,
    repeat,
    run_of,
    scan,
    when,
)
from pipeline.errors import OrderError, SettingError
from pipeline.events import UpdateDone, UpdateSkipped
from pipeline.records import Part
from pipeline.testing import assert_records_equal
from pipeline.transform import Chain, Transform


class Gan(nn.Module):
    """Two networks that train against each other."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
        self.d = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def judging(model: Gan, batch: tuple[Tensor, Tensor]) -> Tensor:
    noise, real = batch
    return F.softplus(-model.d(real)).mean() + F.softplus(model.d(model.g(noise))).mean()


def forging(model: Gan, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.softplus(-model.d(model.g(batch[0]))).mean()


def make_gan() -> Gan:
    torch.manual_seed(0)
    return Gan()


def make_batches(n: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 2, generator=generator), torch.randn(4, 3, generator=generator)) for _ in range(n)]


def schedule_d(n: int) -> float:
    return 0.1 / (1 + n)


def schedule_g(n: int) -> float:
    return 0.05 / (1 + n)


def player(name: str, loss: Any, model: nn.Module, rule: Optimizer, window: int = 1) -> Transform:
    inner = chain(
        Forward(model, loss), ScaledBackward(), Accumulate(window), MaybeStep(rule), EmitEvents(micro_batches=True)
    )
    return part(name, f"{name[0]}.*", inner)


def gan_step(model: Gan, window: int = 1) -> Chain:
    sgd = Optimizer(torch.optim.SGD, lr=schedule_d, momentum=0.9)
    adam = Optimizer(torch.optim.Adam, lr=schedule_g, fused=False)
    return chain(player("discriminator", judging, model, sgd), player("generator", forging, model, adam, window))


def plain_gan(model: Gan, batches: list[Any], window: int = 1) -> None:
    """What a careful person would write: each network's gradients are its own."""
    sgd = torch.optim.SGD(model.d.parameters(), lr=0.1, momentum=0.9)
    adam = torch.optim.Adam(model.g.parameters(), lr=0.05)
    forged = 0
    for i, batch in enumerate(batches):
        grads = torch.autograd.grad(judging(model, batch), list(model.d.parameters()))
        for p, grad in zip(model.d.parameters(), grads, strict=True):
            p.grad = grad
        sgd.param_groups[0]["lr"] = schedule_d(i)
        sgd.step()
        grads = torch.autograd.grad(forging(model, batch) / window, list(model.g.parameters()))
        for p, grad in zip(model.g.parameters(), grads, strict=True):
            p.grad = grad if p.grad is None or i % window == 0 else p.grad + grad
        if (i + 1) % window == 0:
            adam.param_groups[0]["lr"] = schedule_g(forged)
            adam.step()
            forged += 1


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("donate", [True, False])
def test_two_optimizers_in_one_step_equal_the_plain_loop_to_the_bit(window: int, donate: bool) -> None:
    plain, model, batches = make_gan(), make_gan(), make_batches(12)
    plain_gan(plain, batches, window)
    step = gan_step(model, window)
    run = fold(step, init(step, model), batches, donate=donate)
    run.state.load_into(model)
    assert_records_equal(dict(model.state_dict()), dict(plain.state_dict()))
    judge, forger = run.state.slots["part discriminator"], run.state.slots["part generator"]
    assert isinstance(judge, Part)
    assert (judge.updates, forger.updates) == (12, 12 // window)
    assert run.state.progress.updates == 12 + 12 // window
    assert run.state.progress.micro_steps == 12
    assert run.state.progress.samples == 48
    assert all(p.requires_grad for p in model.parameters())


def test_schedules_count_the_parts_own_updates_and_events_those_of_the_run() -> None:
    model = make_gan()
    step = gan_step(model, window=2)
    told = [e for _, events in scan(step, init(step, model), make_batches(4)) for e in events]
    done = [e for e in told if isinstance(e, UpdateDone)]
    assert [(e.part, e.update, e.rates["default"]) for e in done] == [
        ("discriminator", 1, 0.1),
        ("discriminator", 2, 0.05),
        ("generator", 3, 0.05),
        ("discriminator", 4, 0.1 / 3),
        ("discriminator", 5, 0.025),
        ("generator", 6, 0.025),
    ]
    updates = [e.update for e in told]
    assert updates == sorted(updates)
    assert [e.micro_step for e in done] == [1, 2, 2, 3, 4, 4]


def test_an_open_window_of_a_part_is_closed_at_the_end_of_the_stream() -> None:
    model = make_gan()
    step = gan_step(model, window=4)
    run = fold(step, init(step, model), make_batches(5))
    forger = run.state.slots["part generator"]
    assert forger.updates == 2
    assert not run.state.is_open
    assert run.state.progress.micro_steps == 5


def test_only_the_parts_parameters_move_and_their_flags_are_as_before() -> None:
    model = make_gan()
    model.d[0].bias.requires_grad_(False)
    step = gan_step(model).without("generator")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    fold(step, init(step, model), make_batches(3))
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"d.0.weight", "d.2.weight", "d.2.bias"}
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["d.0.bias"]


def test_flags_are_as_before_when_a_part_fails_and_the_run_says_what_it_had_seen() -> None:
    model = make_gan()

    def breaking(model: Gan, batch: Any) -> Tensor:
        if float(batch[0].max()) > 100:
            raise RuntimeError("broken")
        return forging(model, batch)

    sgd = Optimizer(torch.optim.SGD, lr=0.1)
    step = chain(player("discriminator", judging, model, sgd), player("generator", breaking, model, sgd))
    good, bad = make_batches(2)
    with pytest.raises(RuntimeError, match="broken") as caught:
        fold(step, init(step, model), [good, (bad[0] + 1000.0, bad[1])])
    assert all(p.requires_grad for p in model.parameters())
    state = run_of(caught.value).state
    assert state.progress.updates == 2
    assert_records_equal(dict(state.params), dict(model.named_parameters()))
    assert any("has seen an update that it does not count" in note for note in caught.value.__notes__)
    fold(step, state, [good])  # and can be gone on from


def test_apply_leaves_the_state_and_the_module_as_they_were() -> None:
    model = make_gan()
    step = gan_step(model)
    state, before = init(step, model), make_gan()
    after, _ = apply(step, state, make_batches(1)[0])
    assert_records_equal(dict(model.state_dict()), dict(before.state_dict()))
    assert all(p.requires_grad for p in (*model.parameters(), *after.params.values()))
    assert after.slots["part generator"].updates == 1
    assert state.slots["part generator"].updates == 0


def test_a_copy_in_the_middle_of_the_parts_windows_goes_on_to_the_same_bits() -> None:
    model, batches = make_gan(), make_batches(7)
    step = gan_step(model, window=4)
    kept = None
    for state, _ in scan(step, init(step, model), batches):
        if state.progress.micro_steps == 2 and kept is None:
            kept = state.copy()
    assert kept is not None
    assert kept.is_open
    other = make_gan()
    again = gan_step(other, window=4)
    run = fold(again, kept.load_into(other), batches[2:])
    assert_records_equal(dict(other.state_dict()), dict(model.state_dict()))
    assert run.state.slots["part generator"].updates == 2


def test_each_part_has_a_loss_scale_and_skips_of_its_own() -> None:
    model = make_gan()

    def overflowing(model: Gan, batch: Any) -> Loss:
        return Loss.mean(forging(model, batch) * math.inf)

    sgd = Optimizer(torch.optim.SGD, lr=0.01)
    step = chain(player("discriminator", judging, model, sgd), player("generator", overflowing, model, sgd))
    state = init(step, model, loss_scale=LossScale(scale=8.0))
    told = [e for _, events in scan(step, state, make_batches(3)) for e in events]
    skipped = [(e.part, e.skipped, e.in_row) for e in told if isinstance(e, UpdateSkipped)]
    assert skipped == [("generator", 1, 1), ("generator", 2, 2), ("generator", 3, 3)]
    run = fold(step, init(step, model, loss_scale=LossScale(scale=8.0)), make_batches(3))
    judge, forger = run.state.slots["part discriminator"], run.state.slots["part generator"]
    assert (judge.loss_scale.scale, forger.loss_scale.scale) == (8.0, 1.0)
    assert (run.state.progress.updates, run.state.progress.skipped, run.state.progress.skips_in_row) == (3, 3, 3)


def test_parts_alternate_by_the_combinators_and_are_limited_by_updates() -> None:
    model = make_gan()
    sgd = Optimizer(torch.optim.SGD, lr=0.01)
    judge, forger = player("discriminator", judging, model, sgd), player("generator", forging, model, sgd)
    critic = chain(repeat(3, judge), forger)
    run = fold(critic, init(critic, model), make_batches(2))
    assert run.state.slots["part discriminator"].updates == 6
    assert run.state.progress.micro_steps == 2
    in_turn = chain(when(lambda f: f.began.micro_steps % 2 == 0, judge), every(2, forger, of="micro_batches"))
    run = fold(in_turn, init(in_turn, model), make_batches(4), until=Updates(3))
    assert (run.state.slots["part discriminator"].updates, run.state.slots["part generator"].updates) == (2, 1)


def test_what_stands_behind_the_parts_sees_that_something_was_applied() -> None:
    model = make_gan()
    step = chain(gan_step(model), AverageWeights(decay=0.5))
    run = fold(step, init(step, model), make_batches(3))
    assert run.state.slots["average"] is not None
    with pytest.raises(OrderError, match="closed"):
        chain(gan_step(model), EmitEvents())


def test_a_part_that_no_parameter_belongs_to_is_refused_when_the_state_is_made() -> None:
    model = make_gan()
    step = part("x", "nothing.*", chain(Forward(model, judging), ScaledBackward()))
    with pytest.raises(SettingError, match="one that some parameter matches"):
        init(step, model)
    for name, match in (("", "d.*"), ("x", []), ("x", [3])):
        with pytest.raises(SettingError):
            part(name, match, chain())  # type: ignore[arg-type]


def test_it_prints_as_it_was_written() -> None:
    assert repr(part("judge", "d.*", chain())) == "part('judge', 'd.*', chain())"
