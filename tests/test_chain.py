"""Composition: what a chain accepts, how it is edited, and what it says when something is in the wrong place."""

import re
from typing import Any

import attrs
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipeline import (
    Accumulate,
    ClipByGlobalNorm,
    EmitEvents,
    Forward,
    Frame,
    MaybeStep,
    Optimizer,
    ScaledBackward,
    TrainState,
    apply,
    branch,
    chain,
    every,
    fold,
    init,
    named,
    repeat,
    supervised,
    tap,
    when,
)
from pipeline.errors import (
    CompositionError,
    DuplicateNameError,
    MissingFieldError,
    NotATransformError,
    OrderError,
    UnknownNameError,
)
from pipeline.testing import assert_records_equal, frame
from tests.laws.cases import make_batch, make_batches, make_model, make_step


def forward(model: nn.Module | None = None) -> Forward:
    return Forward(model or make_model("mlp"), supervised(F.cross_entropy))


def step_transform() -> MaybeStep:
    return MaybeStep(Optimizer(torch.optim.SGD, lr=0.1))


def mark(name: str) -> Any:
    def transform(f: Frame) -> Frame:
        return f.having(facts={**f.facts, name: float(len(f.facts))})

    transform.__name__ = name
    return transform


class TestOrder:
    def test_clipping_before_the_window_is_an_error_with_the_cure(self) -> None:
        message = (
            "ClipByGlobalNorm reads window.grads, which nothing before it writes: "
            "put it after ScaledBackward and Accumulate."
        )
        with pytest.raises(OrderError, match=re.escape(message)) as caught:
            chain(forward(), ScaledBackward(), attrs.evolve(ClipByGlobalNorm(1.0)), Accumulate(2))
        assert (caught.value.transform, caught.value.field) == ("ClipByGlobalNorm", "window.grads")
        assert isinstance(caught.value, ValueError)

    @pytest.mark.parametrize(
        ("order", "cure"),
        [
            ((1, 0, 2, 3, 4, 5), "put it after Forward"),
            ((0, 2, 1, 3, 4, 5), "put it after ScaledBackward"),
            ((0, 1, 3, 2, 4, 5), "put it after ScaledBackward and Accumulate"),
            ((0, 1, 2, 4, 3, 5), "put it before MaybeStep"),
            ((0, 1, 2, 3, 5, 4), "put it after MaybeStep"),
            ((0, 2, 3, 4, 5), "put it after ScaledBackward"),
            ((0, 1, 4, 5), "Accumulate"),
            ((0, 1, 2, 5), "put it after MaybeStep"),
        ],
    )
    def test_each_wrong_order_names_its_cure(self, order: tuple[int, ...], cure: str) -> None:
        parts = [
            forward(), ScaledBackward(), Accumulate(2), ClipByGlobalNorm(1.0), step_transform(), EmitEvents()
        ]  # fmt: skip
        chain(*parts)
        with pytest.raises(OrderError, match=re.escape(cure)):
            chain(*(parts[i] for i in order))

    def test_a_fragment_is_checked_when_it_is_joined(self) -> None:
        tail = chain(Accumulate(2), ClipByGlobalNorm(1.0), step_transform())
        whole = chain(forward(), ScaledBackward(), tail)
        assert len(whole.transforms) == 5
        with pytest.raises(OrderError, match="put it after ScaledBackward"):
            chain(forward(), tail)

    def test_two_clips_of_their_own_names_may_stand_in_a_row(self) -> None:
        assert len(chain(named("a", ClipByGlobalNorm(1.0)), named("b", ClipByGlobalNorm(0.5))).transforms) == 2

    def test_what_declares_nothing_may_provide_anything_but_not_what_comes_later(self) -> None:
        chain(lambda f: f, ScaledBackward(), Accumulate(2), step_transform())
        with pytest.raises(OrderError):
            chain(lambda f: f, ClipByGlobalNorm(1.0), ScaledBackward(), Accumulate(2))

    def test_wrappers_are_checked_like_what_they_wrap(self) -> None:
        with pytest.raises(OrderError, match="put it after"):
            chain(forward(), when(lambda f: True, ClipByGlobalNorm(1.0)), ScaledBackward(), Accumulate(2))

    @pytest.mark.parametrize(
        "field", ["tokens", "samples", "optimizer", "loss_scale", "rng", "window", "facts", "events"]
    )
    def test_what_a_frame_has_may_be_read_behind_forward(self, field: str) -> None:
        @attrs.frozen
        class Reader:
            reads = frozenset({field})
            writes = frozenset[str]()

            def __call__(self, f: Frame) -> Frame:
                return f

        assert len(chain(forward(), Reader()).transforms) == 2

    def test_two_steps_that_take_turns_may_stand_in_a_row(self) -> None:
        model = make_model("mlp")
        parts = make_step(model, 1).transforms
        turns = [
            named(name, when(lambda f, i=i: f.began.micro_steps % 2 == i, step_transform()))
            for i, name in enumerate(("even", "odd"))
        ]
        step = chain(*parts[:4], *turns)
        assert fold(step, init(step, model), make_batches(4)).state.progress.updates == 4

    def test_a_step_without_a_window_is_told_at_the_first_micro_batch(self) -> None:
        model = make_model("mlp")
        step = chain(lambda f: f, forward(model), ScaledBackward(), step_transform())
        with pytest.raises(MissingFieldError, match="put Accumulate after ScaledBackward"):
            apply(step, init(step, model), make_batch(0))

    def test_a_tap_hides_nothing(self) -> None:
        with pytest.raises(OrderError):
            chain(tap(print), forward(), ClipByGlobalNorm(1.0), step_transform())


class TestWhatAChainHolds:
    def test_the_empty_chain_is_the_identity(self) -> None:
        given = frame({"w": [1.0]})
        assert chain()(given) is given
        assert chain(chain(), chain()) == chain()

    def test_chains_are_flattened_and_compared_by_value(self) -> None:
        a, b, c = Accumulate(2), ClipByGlobalNorm(1.0), EmitEvents()
        assert chain(a, chain(b, c)) == chain(chain(a, b), c)
        assert chain(a, b) != chain(a)

    @pytest.mark.parametrize("thing", [None, 3, "clip", ClipByGlobalNorm, [EmitEvents()]])
    def test_what_is_no_transform_is_refused_when_composed(self, thing: Any) -> None:
        with pytest.raises(NotATransformError, match="Frame -> Frame") as caught:
            chain(thing)
        assert isinstance(caught.value, TypeError)
        if thing is ClipByGlobalNorm:
            assert "an instance" in str(caught.value)

    def test_a_function_that_forgets_to_return_the_frame_is_named(self) -> None:
        def forgetful(f: Frame) -> Any:
            f.having(ready=True)

        with pytest.raises(NotATransformError, match="'forgetful' returned None: return the frame"):
            chain(forgetful)(frame())  # type: ignore[arg-type]

    def test_two_of_one_name_are_refused(self) -> None:
        with pytest.raises(DuplicateNameError, match="named"):
            chain(Accumulate(2), ClipByGlobalNorm(1.0), ClipByGlobalNorm(2.0))
        with pytest.raises(DuplicateNameError, match="<lambda>"):
            chain(lambda f: f, lambda f: f)

    def test_an_error_says_in_which_transform_it_came_up(self) -> None:
        def broken(f: Frame) -> Frame:
            raise KeyError("x")

        with pytest.raises(KeyError) as caught:
            chain(mark("a"), broken)(frame())
        assert caught.value.__notes__ == ["in broken at micro-step 0"]

    def test_print_shows_what_each_reads_and_writes(self) -> None:
        model = make_model("mlp")
        text = str(make_step(model, 4))
        assert len(text.splitlines()) == 6
        for part in ("Forward(model=Sequential", "Accumulate(every=4", "window.grads", "→ grads"):
            assert part in text
        assert repr(chain(ClipByGlobalNorm(1.0))) == "chain(ClipByGlobalNorm(max_norm=1.0))"
        assert str(chain()) == "chain(): the identity"

    def test_durable_state_of_a_users_own_is_added_by_init_and_kept_in_slots(self) -> None:
        @attrs.frozen
        class CountWindows:
            def init(self, state: TrainState) -> TrainState:
                return attrs.evolve(state, slots={**state.slots, "windows": 0})

            def __call__(self, f: Frame) -> Frame:
                if f.applied is None:
                    return f
                slots = {**f.state.slots, "windows": f.state.slots["windows"] + 1}
                return f.having(state=attrs.evolve(f.state, slots=slots))

        model = make_model("mlp")
        step = make_step(model, 2).insert_after("MaybeStep", CountWindows())
        run = fold(step, init(step, model), make_batches(5))
        assert run.state.slots["windows"] == 3


class TestEditing:
    def test_by_name(self) -> None:
        step = chain(mark("a"), mark("b"), mark("c"))
        names = lambda s: [t.__name__ for t in s.transforms]  # noqa: E731
        assert names(step.insert_before("b", mark("x"), mark("y"))) == ["a", "x", "y", "b", "c"]
        assert names(step.insert_after("b", mark("x"))) == ["a", "b", "x", "c"]
        assert names(step.replace("b", mark("x"))) == ["a", "x", "c"]
        assert names(step.without("a", "c")) == ["b"]
        assert names(step) == ["a", "b", "c"]
        assert step["b"] is step.transforms[1]

    def test_each_edit_is_checked_anew(self) -> None:
        step = make_step(make_model("mlp"))
        with pytest.raises(OrderError):
            step.without("Accumulate")
        with pytest.raises(DuplicateNameError):
            step.insert_after("Accumulate", named("MaybeStep", tap(print)))

    def test_an_unknown_name_is_answered_with_those_that_exist(self) -> None:
        with pytest.raises(UnknownNameError, match="ClipByGlobalNorm") as caught:
            make_step(make_model("mlp")).without("Clip")
        assert isinstance(caught.value, LookupError)
        assert isinstance(caught.value, CompositionError)

    def test_named_gives_a_name_and_changes_nothing_else(self) -> None:
        clip = named("clip", ClipByGlobalNorm(0.5))
        given = frame({"w": [0.0]}, sums={"w": [3.0]}, ready=True)
        assert_records_equal(clip(given), ClipByGlobalNorm(0.5)(given))
        assert repr(clip) == "named('clip', ClipByGlobalNorm(max_norm=0.5))"
        assert chain(clip)["clip"] is clip
        model = make_model("mlp")
        plain = make_step(model, 3)
        renamed = plain.replace("Accumulate", named("window", Accumulate(3)))
        ends = [fold(s, init(s, model).copy(), make_batches(4)).state for s in (plain, renamed)]
        assert_records_equal(ends[0], ends[1])
        assert ends[1].progress.updates == 2


class TestCombinators:
    def test_when_and_branch_choose_by_the_frame(self) -> None:
        step = chain(when(lambda f: f.ready, mark("a")), branch(lambda f: f.ready, mark("b"), mark("c")))
        assert set(step(frame(ready=True)).facts) == {"a", "b"}
        assert set(step(frame(ready=False)).facts) == {"c"}

    def test_every_counts_windows_wherever_it_stands(self) -> None:
        seen: dict[str, list[int]] = {"before": [], "after": [], "micro": []}

        def note(name: str) -> Any:
            return named(name, tap(lambda f: seen[name].append(f.began.micro_steps)))

        model = make_model("mlp")
        step = (
            make_step(model, 2)
            .insert_before("Forward", every(3, note("before")), every(5, note("micro"), of="micro_batches"))
            .insert_after("EmitEvents", every(3, note("after")))
        )
        fold(step, init(step, model), make_batches(12))
        assert seen == {"before": [4, 5, 10, 11], "after": [4, 5, 10, 11], "micro": [4, 9]}

    @pytest.mark.parametrize("n", [0, -1, 1.5])
    def test_every_and_repeat_refuse_what_is_no_count(self, n: Any) -> None:
        for combinator in (every, repeat):
            with pytest.raises(ValueError, match="1 or more"):
                combinator(n, mark("a"))

    def test_repeat_makes_several_updates_of_one_batch_as_several_folds_would(self) -> None:
        model = make_model("mlp")
        parts = make_step(model, 1)
        step = chain(repeat(3, chain(*parts.transforms)))
        state = init(parts, model)
        thrice = fold(parts, state.copy(), [make_batch(0)] * 3).state
        repeated = fold(step, state.copy(), [make_batch(0)]).state
        assert_records_equal(repeated.params, thrice.params)
        assert repeated.progress.updates == 3

    def test_a_tap_looks_and_does_not_touch(self) -> None:
        seen: list[Frame] = []
        given = frame(ready=True)
        assert tap(seen.append)(given) is given
        assert seen == [given]
        with pytest.raises(NotATransformError, match="only looks"):
            tap(lambda f: f.having(ready=False))(given)
        with pytest.raises(NotATransformError):
            tap(3)  # type: ignore[arg-type]

    def test_wrapped_parts_are_initialised_and_finished(self) -> None:
        model = make_model("mlp")
        plain = make_step(model, 4)
        wrapped = chain(when(lambda f: True, chain(*plain.transforms)))
        ends = [fold(s, init(s, model).copy(), make_batches(6)).state for s in (plain, wrapped)]
        assert ends[0].progress.updates == 2
        assert_records_equal(ends[0], ends[1])


def test_two_clips_clip_to_the_smaller_and_report_the_norm_before_either() -> None:
    given = frame({"w": [0.0]}, sums={"w": [10.0]}, ready=True)
    after = chain(ClipByGlobalNorm(1.0), named("second", ClipByGlobalNorm(0.5)))(given)
    assert float(after.update_factor) * 10 == pytest.approx(0.5, rel=1e-5)
    assert float(after.facts["grad_norm"]) == 10.0
    assert float(after.facts["clip_factor"]) == pytest.approx(0.05, rel=1e-5)


def test_what_changes_the_gradients_behind_a_clip_is_seen_by_the_finite_check() -> None:
    def poison(f: Frame) -> Frame:
        grads = f.state.window.grads.map(lambda g: g * float("nan"))
        return f.having(state=attrs.evolve(f.state, window=attrs.evolve(f.state.window, grads=grads)))

    given = frame({"w": [0.0]}, sums={"w": [10.0]}, ready=True)
    after = chain(ClipByGlobalNorm(1.0), poison, step_transform())(given)
    assert after.applied is False
    assert after.state.params["w"].tolist() == [0.0]


def test_a_factor_that_is_not_finite_is_skipped() -> None:
    given = frame({"w": [0.0]}, sums={"w": [10.0]}, ready=True)
    spoil = lambda f: f.having(update_factor=float("nan"), facts={})  # noqa: E731
    after = chain(ClipByGlobalNorm(1.0), spoil, step_transform())(given)
    assert after.applied is False
    assert after.state.params["w"].tolist() == [0.0]


def test_a_plain_function_as_a_whole_step() -> None:
    model = make_model("mlp")
    state = init(lambda f: f, model)
    after, events = apply(lambda f: f.having(facts={"x": 1.0}), state, make_batch(0))
    assert events == ()
    assert after.progress.micro_steps == 1  # counted by the loop, where no Accumulate counts
    assert_records_equal(after.params, state.params)
