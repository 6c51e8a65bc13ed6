"""The loop: its ends, its errors, and what it leaves as it was."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipeline import (
    Accumulate,
    AverageWeights,
    EmitEvents,
    Epochs,
    Evaluation,
    EveryEpoch,
    EveryUpdates,
    Forward,
    Loss,
    MaybeStep,
    MicroBatches,
    Optimizer,
    ScaledBackward,
    Seconds,
    Tokens,
    Updates,
    apply,
    chain,
    fold,
    init,
    monitors,
    repeat,
    replay,
    run_of,
    scan,
    stream,
    supervised,
    tap,
    when,
)
from pipeline._publisher import Publisher, Watched
from pipeline.audience import Audience
from pipeline.errors import DuplicateNameError, LossError, MeasureError, SettingError, StreamError, UnknownNameError
from pipeline.events import EpochEnded, EpochStarted, EvalDone, Event, RunEnded, RunStarted, UpdateDone, UpdateSkipped
from pipeline.monitor import Evaluate, Save, ScaleRate, Stop
from pipeline.records import Rng
from pipeline.testing import assert_records_equal
from tests.laws.cases import IN, OUT, accuracy, make_batch, make_batches, make_model, make_step


class Memory:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = 0

    def write(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed += 1

    def names(self) -> list[str]:
        return [type(event).__name__ for event in self.events]


def started(name: str = "mlp", window: int = 2) -> tuple[Any, Any, nn.Module]:
    model = make_model(name)
    step = make_step(model, window).replace("EmitEvents", EmitEvents())
    return step, init(step, model), model


def evaluation(model: nn.Module, **more: Any) -> Evaluation:
    return Evaluation(
        Forward(model, supervised(F.cross_entropy, measures={"accuracy": accuracy})), make_batches(3, 9), **more
    )


class TestUntil:
    @pytest.mark.parametrize(
        ("until", "micro_steps", "updates", "reason"),
        [
            (None, 5, 3, "Epochs(1)"),
            (Updates(4), 7, 4, "Updates(4)"),
            (Epochs(2), 10, 6, "Epochs(2)"),
            (MicroBatches(8), 8, 5, "MicroBatches(8)"),
            (Updates(100) | MicroBatches(3), 3, 2, "MicroBatches(3)"),
            (Updates(0), 0, 0, "Updates(0)"),
        ],
    )
    def test_each_limit_ends_the_run_there(self, until: Any, micro_steps: int, updates: int, reason: str) -> None:
        step, state, _ = started()
        run = fold(step, state, make_batches(5), until=until)
        assert (run.state.progress.micro_steps, run.state.progress.updates) == (micro_steps, updates)
        assert run.stopped_by == (reason,)
        assert run.state.window.micro_batches == 0

    def test_tokens_count_where_the_loss_gives_them(self) -> None:
        model = nn.Linear(IN, OUT)

        def loss(model: Any, batch: Any) -> Loss:
            return Loss.mean(F.cross_entropy(model(batch[0]), batch[1]), 4, tokens=10)

        step = chain(
            Forward(model, loss), ScaledBackward(), Accumulate(1), MaybeStep(Optimizer(torch.optim.SGD, lr=0.1))
        )
        run = fold(step, init(step, model), make_batches(3), until=Tokens(50))
        assert run.state.progress.tokens == 50

    def test_seconds_end_by_the_given_clock_and_say_that_they_do_not_reproduce(self) -> None:
        step, state, _ = started()
        ticks = iter(range(10_000))
        run = fold(step, state, make_batches(5), until=Seconds(20), clock=lambda: float(next(ticks)))
        assert run.stopped_by[0].startswith("Seconds(20)")
        assert "not reproducible" in run.stopped_by[0]

    @pytest.mark.parametrize("make", [Updates, Epochs, MicroBatches, Tokens])
    @pytest.mark.parametrize("n", [-1, 1.5, float("nan"), float("inf")])
    def test_a_limit_that_is_no_count_is_refused(self, make: Any, n: float) -> None:
        with pytest.raises(SettingError, match="whole number"):
            make(n)

    def test_a_run_that_is_over_does_nothing_more_and_says_why(self) -> None:
        step, state, _ = started()
        run = fold(step, state, make_batches(4), until=Updates(2))
        again = fold(step, run.state, make_batches(4), until=Updates(1))
        assert again.state.progress == run.state.progress
        assert again.stopped_by == ("Updates(1)",)

    def test_limits_print_as_they_were_written(self) -> None:
        assert repr(Updates(3) | Epochs(2) | Seconds(1.5)) == "Updates(3) | Epochs(2) | Seconds(1.5)"


class TestOutOfReach:
    """A limit that a whole epoch comes no nearer to ends the run, and says so."""

    def test_tokens_that_the_loss_does_not_give(self) -> None:
        step, state, _ = started()
        run = fold(step, state, make_batches(3), until=Tokens(5))
        assert run.stopped_by == ("Tokens(5) is out of reach: a whole epoch came no nearer (0 windows skipped)",)

    def test_updates_that_are_all_skipped(self) -> None:
        step, state, _ = started()
        batches = [(x * float("nan"), y) for x, y in make_batches(4)]
        run = fold(step, state, batches, until=Updates(5))
        assert "2 windows skipped" in run.stopped_by[0]

    def test_a_window_that_is_carried_over_many_epochs_is_not_out_of_reach(self) -> None:
        model = make_model("mlp")
        step = make_step(model).replace("Accumulate", Accumulate(7, "carry"))
        run = fold(step, init(step, model), make_batches(2), until=Updates(2))
        assert (run.state.progress.micro_steps, run.stopped_by) == (14, ("Updates(2)",))
        step = make_step(model).replace("Accumulate", Accumulate(7, "drop"))
        assert "out of reach" in fold(step, init(step, model), make_batches(2), until=Updates(2)).stopped_by[0]

    def test_micro_batches_are_counted_where_no_accumulate_counts_them(self) -> None:
        model = make_model("dropout")
        forward = Forward(model, supervised(F.cross_entropy))
        keys: list[int] = []
        step = chain(forward, tap(lambda f: keys.append(f.began.micro_steps)))
        run = fold(step, init(step, model), make_batches(3), until=MicroBatches(5))
        assert run.state.progress.micro_steps == 5
        assert keys == [0, 1, 2, 3, 4]


class TestWhatItIsGiven:
    @pytest.mark.parametrize("until", [3, "Updates(3)"])
    def test_a_limit_that_is_none_is_refused(self, until: Any) -> None:
        step, state, _ = started()
        with pytest.raises(SettingError, match=r"Updates\(100\)"):
            fold(step, state, make_batches(1), until=until)

    def test_a_model_in_place_of_a_state_is_refused(self) -> None:
        step, _, model = started()
        with pytest.raises(SettingError, match="init"):
            fold(step, model, make_batches(1))  # type: ignore[arg-type]
        with pytest.raises(SettingError, match="whole number"):
            init(step, model, seed=1.5)  # type: ignore[arg-type]

    def test_parameters_replaced_since_init_are_noticed(self) -> None:
        step, state, model = started()
        model[2] = nn.Linear(8, OUT)
        with pytest.raises(SettingError, match="replaced since `init`"):
            fold(step, state, make_batches(1))

    def test_a_model_changed_since_forward_was_built_is_noticed(self) -> None:
        model = make_model("mlp")
        forward = Forward(model, supervised(F.cross_entropy))
        model[1] = nn.BatchNorm1d(8)
        with pytest.raises(SettingError, match="after the last change"):
            init(forward, model)

    def test_lazy_modules_are_refused_before_they_are_initialised(self) -> None:
        model = nn.LazyLinear(OUT)
        with pytest.raises(SettingError, match="one batch through it"):
            init(Forward(model, supervised(F.cross_entropy)), model)

    def test_a_fact_that_is_no_number_is_named(self) -> None:
        step, state, _ = started()
        step = step.insert_before("EmitEvents", lambda f: f.having(facts={**f.facts, "many": torch.ones(3)}))
        with pytest.raises(LossError, match=r"UpdateDone.facts must be 0-d .* shape \(3,\)"):
            fold(step, state, make_batches(2))


class TestStream:
    def test_no_batches_no_updates_one_epoch_end(self) -> None:
        step, state, _ = started()
        sink = Memory()
        run = fold(step, state, [], sinks=[sink], until=Updates(10))
        assert sink.names() == ["RunStarted", "EpochStarted", "EpochEnded", "RunEnded"]
        assert run.state.progress.updates == 0
        assert run.stopped_by == ("the stream gave no batches",)

    def test_a_generator_serves_one_epoch_and_says_why_it_ends_there(self) -> None:
        step, state, _ = started()
        run = fold(step, state, iter(make_batches(3)), until=Updates(10))
        assert run.state.progress.updates == 2
        assert "read only once" in run.stopped_by[0]

    def test_an_error_of_the_stream_keeps_its_type_and_the_last_state_stays_usable(self) -> None:
        def stream() -> Iterator[Any]:
            yield from make_batches(3)
            raise OSError("disk gone")

        step, state, _ = started()
        twin = state.copy()
        sink = Memory()
        with pytest.raises(OSError, match="disk gone") as caught:
            fold(step, state, stream(), monitors=[monitors.MeanLoss()], sinks=[sink])
        run = run_of(caught.value)
        assert run.state.progress.micro_steps == 3
        assert run.state.window.micro_batches == 1
        assert run.results["MeanLoss"] is not None
        assert run.stopped_by == ("OSError: disk gone",)
        assert sink.closed == 1
        assert isinstance(sink.events[-1], RunEnded)
        rest = fold(step, run.state, make_batches(8)[3:]).state
        assert_records_equal(rest.params, fold(step, twin, make_batches(8)).state.params)

    def test_an_error_of_the_step_names_the_transform_and_keeps_the_state_before_it(self) -> None:
        step, state, _ = started()
        bad = (torch.randn(4, IN + 1), torch.zeros(4, dtype=torch.long))
        with pytest.raises(RuntimeError, match="shape") as caught:
            fold(step, state, [*make_batches(3), bad])
        assert run_of(caught.value).state.progress.micro_steps == 3
        assert any("in Forward at micro-step 3" in note for note in caught.value.__notes__)

    @pytest.mark.parametrize("donate", [True, False])
    def test_an_error_after_the_update_keeps_its_type_and_a_usable_run(self, donate: bool) -> None:
        def fails_at(n: int) -> Any:
            def look(f: Any) -> None:
                if f.began.micro_steps == n:
                    raise ZeroDivisionError("after the update")

            return tap(look)

        step, state, _ = started("batchnorm", 2)
        with pytest.raises(ZeroDivisionError) as caught:
            fold(step.insert_after("MaybeStep", fails_at(3)), state, make_batches(6), donate=donate)
        run = run_of(caught.value)
        assert run.state.progress.updates == 1
        assert len(run.state.copy().params) > 0
        assert ("does not count" in "".join(caught.value.__notes__)) == donate
        assert fold(step, run.state, make_batches(2)).state.progress.updates == (2 if donate else 3)

    def test_an_error_in_an_evaluation_keeps_the_update_before_it(self) -> None:
        step, state, model = started()

        def bad(model: Any, batch: Any) -> Any:
            raise ZeroDivisionError("in the evaluation")

        for moment in (EveryUpdates(2), EveryEpoch()):
            state = init(step, model)
            twin = state.copy()
            with pytest.raises(ZeroDivisionError) as caught:
                fold(step, state, make_batches(4), evaluations=[Evaluation(Forward(model, bad), [1], moment)])
            run = run_of(caught.value)
            assert run.state.progress.updates == 2
            assert_records_equal(run.state.params, fold(step, twin, make_batches(4)).state.params)

    def test_a_sink_that_fails_at_the_end_does_not_hide_the_first_error(self) -> None:
        class Full(Memory):
            def write(self, event: Event) -> None:
                if isinstance(event, RunEnded):
                    raise OSError("disk full")

        step, state, _ = started()
        other = Memory()
        with pytest.raises(ZeroDivisionError) as caught:
            fold(step.insert_after("Forward", tap(lambda f: 1 // 0)), state, make_batches(2), sinks=[Full(), other])
        assert "disk full" in "".join(caught.value.__notes__)
        assert other.names() == ["RunStarted", "EpochStarted", "RunEnded"]
        assert other.events[-1].time > 0

    def test_a_sink_that_fails_takes_the_run_along_and_leaves_the_others_theirs(self) -> None:
        class Failing(Memory):
            def write(self, event: Event) -> None:
                super().write(event)
                if len(self.events) == 4:
                    raise OSError("disk full")

        step, state, _ = started()
        other = Memory()
        with pytest.raises(OSError, match="disk full") as caught:
            fold(step, state, make_batches(30), sinks=[Failing(), other], publish_every=3)
        assert isinstance(other.events[-1], RunEnded)
        assert run_of(caught.value).state.progress.updates == 3
        assert other.names() == ["RunStarted", "EpochStarted", *["UpdateDone"] * 3, "RunEnded"]

    def test_an_average_that_was_written_before_the_error_is_usable_too(self) -> None:
        def fails(f: Any) -> None:
            if f.applied and f.began.updates == 1:
                raise KeyError("mine")

        step, state, model = started("mlp", 1)
        step = step.insert_after("MaybeStep", AverageWeights(0.9), tap(fails))
        state = init(step, model)
        with pytest.raises(KeyError, match="mine") as caught:
            fold(step, state, make_batches(4))
        assert "slot 'average'" in "".join(caught.value.__notes__)
        kept = run_of(caught.value).state.copy()
        assert fold(step.without("tap fails"), kept, make_batches(2)).state.progress.updates == 3

    @pytest.mark.parametrize("fails_in", ["reduce", "result"])
    def test_a_monitor_that_fails_hides_neither_the_error_nor_the_run(self, fails_in: str) -> None:
        class Bad(monitors.MeanLoss):
            def reduce(self, accumulator: Any, event: Event) -> Any:
                if fails_in == "reduce" and isinstance(event, RunEnded):
                    raise ValueError("monitor")
                return super().reduce(accumulator, event)

            def result(self, accumulator: Any) -> Any:
                if fails_in == "result":
                    raise ValueError("monitor")
                return super().result(accumulator)

        def stream() -> Iterator[Any]:
            yield from make_batches(3)
            raise OSError("disk")

        step, state, _ = started()
        sink = Memory()
        with pytest.raises(OSError, match="disk") as caught:
            fold(step, state, stream(), monitors=[Bad("bad"), monitors.GradNorm()], sinks=[sink])
        assert "monitor 'bad'" in "".join(caught.value.__notes__)
        assert list(run_of(caught.value).results) == ["GradNorm"]
        assert sink.names()[-2:] == ["UpdateDone", "RunEnded"]
        state = run_of(caught.value).state
        with pytest.raises(ValueError, match="monitor") as caught:
            fold(step, state, make_batches(3), monitors=[Bad("bad")])
        assert run_of(caught.value).state.progress.micro_steps == 6

    def test_a_sink_that_cannot_be_closed_takes_the_finished_run_along(self) -> None:
        class Open(Memory):
            def close(self) -> None:
                raise OSError("full")

        step, state, _ = started()
        sink = Open()
        with pytest.raises(OSError, match="full") as caught:
            fold(step, state, make_batches(4), sinks=[sink])
        assert run_of(caught.value).stopped_by == ("Epochs(1)",)
        assert sink.names().count("RunEnded") == 1

    def test_a_wrong_argument_leaves_the_state_as_it_was(self) -> None:
        step, state, _ = started()
        for wrong in ({"monitors": [monitors.EarlyStopping("val_loss")]}, {"until": 3}, {"publish_every": 0}):
            with pytest.raises((MeasureError, SettingError)):
                fold(step, state, make_batches(2), **wrong)
        assert fold(step, state, make_batches(2)).state.progress.updates == 1

    def test_an_error_under_scan_takes_the_last_state_along(self) -> None:
        step, state, _ = started()
        step = step.insert_after("MaybeStep", tap(lambda f: 1 // (3 - f.began.micro_steps)))
        with pytest.raises(ZeroDivisionError) as caught:
            list(scan(step, state, make_batches(6)))
        assert (
            fold(step.without("tap <lambda>"), run_of(caught.value).state, make_batches(2)).state.progress.updates == 2
        )

    def test_an_abandoned_scan_leaves_no_sums_behind_in_the_parameters(self) -> None:
        step, state, model = started("mlp", 4)
        running = scan(step, state, make_batches(6))
        next(running)
        assert model[0].weight.grad is not None
        running.close()
        assert all(p.grad is None for p in model.parameters())

    def test_an_evaluation_that_fails_does_not_swallow_the_update_before_it(self) -> None:
        step, state, model = started("mlp", 1)
        sink = Memory()
        bad = Evaluation(Forward(model, supervised(F.cross_entropy)), [3], EveryUpdates(2))
        with pytest.raises(TypeError) as caught:
            fold(step, state, make_batches(6), sinks=[sink], evaluations=[bad])
        assert [e.update for e in sink.events if isinstance(e, UpdateDone)] == [1, 2]
        assert run_of(caught.value).state.progress.updates == 2

    def test_an_error_that_no_fold_raised_holds_no_run(self) -> None:
        with pytest.raises(ValueError, match="did not come out of a fold"):
            run_of(KeyError("x"))


class TestEvents:
    def test_the_order_in_which_they_come(self) -> None:
        step, state, model = started()
        sink = Memory()
        fold(step, state, make_batches(3), sinks=[sink], until=Epochs(2), evaluations=[evaluation(model)])
        epoch = ["EpochStarted", "UpdateDone", "UpdateDone", "EvalDone", "EpochEnded"]
        assert sink.names() == ["RunStarted", *epoch, *epoch, "RunEnded"]
        assert [e.micro_step for e in sink.events] == [0, 0, 2, 3, 3, 3, 3, 5, 6, 6, 6, 6]
        assert sink.closed == 1

    @pytest.mark.parametrize("publish_every", [1, 3, 1000])
    def test_publication_changes_when_they_come_and_nothing_else(self, publish_every: int) -> None:
        results = []
        for every in (1, publish_every):
            step, state, model = started()
            sink = Memory()
            watch = [monitors.MeanLoss(), monitors.GradNorm(), monitors.Mean("accuracy"), monitors.LearningRate()]
            run = fold(
                step, state, make_batches(9), monitors=watch, sinks=[sink], publish_every=every,
                evaluations=[evaluation(model)], clock=lambda: 0.0,
            )  # fmt: skip
            assert replay(sink.events, watch) == run.results
            results.append((sink.events, run.results))
        assert results[0] == results[1]

    def test_published_values_are_numbers_and_hold_no_graph(self) -> None:
        step, state, _ = started()
        sink = Memory()
        fold(step, state, make_batches(4), sinks=[sink])
        for event in sink.events:
            if isinstance(event, UpdateDone):
                assert isinstance(event.loss, float)
                assert isinstance(event.grad_norm, float)
                total, weight = event.measures["accuracy"]
                assert isinstance(total, float)
                assert (weight, event.weight) == (8, 8)

    def test_a_window_with_a_nan_is_skipped_counted_and_told(self) -> None:
        step, state, model = started()
        sink = Memory()
        x, y = make_batch(1)
        weights = [p.detach().clone() for p in model.parameters()]
        run = fold(step, state, [(x * float("nan"), y), (x, y)], sinks=[sink])
        assert (run.state.progress.updates, run.state.progress.skipped) == (0, 1)
        assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
        event = next(e for e in sink.events if isinstance(e, UpdateSkipped))
        assert (event.reason, event.skipped) == ("non-finite gradients", 1)
        assert not run.state.optimizer.tensors

    def test_a_users_fact_reaches_the_event(self) -> None:
        step, state, _ = started()
        step = step.without("ClipByGlobalNorm").insert_before("EmitEvents", add_fact)
        sink = Memory()
        fold(step, state, make_batches(2), sinks=[sink])
        assert [e.facts for e in sink.events if isinstance(e, UpdateDone)] == [{"mine": 7.0}]


def add_fact(frame: Any) -> Any:
    return frame.having(facts={**frame.facts, "mine": torch.tensor(7.0)})


class TestScan:
    def test_an_item_after_every_micro_batch_every_epoch_and_at_the_end(self) -> None:
        step, state, _ = started()
        items = [
            (s.progress.micro_steps, [type(e) for e in events]) for s, events in scan(step, state, make_batches(3))
        ]
        assert items == [
            (1, [RunStarted, EpochStarted]),
            (2, [UpdateDone]),
            (3, []),
            (3, [UpdateDone, EpochEnded]),
            (3, [RunEnded]),
        ]

    def test_it_ends_where_the_fold_ends(self) -> None:
        for name in ("mlp", "dropout", "batchnorm"):
            step, state, _ = started(name)
            twin = state.copy()
            last = state
            for at, _ in scan(step, state, make_batches(5), until=Epochs(2)):
                torch.rand(3)  # what the caller draws in between does not matter
                last = at
            assert_records_equal(last, fold(step, twin, make_batches(5), until=Epochs(2)).state)


class TestEvaluation:
    def test_it_leaves_no_trace_in_the_training(self) -> None:
        ends = []
        for with_evaluation in (False, True):
            step, state, model = started("dropout")
            extra = (
                [evaluation(model), evaluation(model, name="often", when=EveryUpdates(1))] if with_evaluation else []
            )
            ends.append(fold(step, state, make_batches(5), until=Epochs(2), evaluations=extra).state)
        assert_records_equal(ends[0], ends[1])

    def test_values_are_means_over_all_items_in_eval_mode(self) -> None:
        model = nn.Sequential(nn.Linear(IN, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, OUT))
        model[1].eval()  # a frozen BatchNorm: its mode must come back as it was
        modes = [m.training for m in model.modules()]
        forward = Forward(model, supervised(F.cross_entropy, measures={"accuracy": accuracy}))
        batches = [make_batch(1, 5), None, make_batch(2, 2)]
        event = Evaluation(forward, batches).run(init(forward, model))
        assert [m.training for m in model.modules()] == modes
        model.eval()
        x, y = (torch.cat([a, b]) for a, b in zip(make_batch(1, 5), make_batch(2, 2), strict=True))
        with torch.no_grad():
            expected = {"val_loss": float(F.cross_entropy(model(x), y)), "val_accuracy": float(accuracy(model(x), y))}
        assert dict(event.values) == pytest.approx(expected)
        assert (event.weight, event.batches) == (7, 2)

    def test_the_mode_comes_back_after_an_error_too(self) -> None:
        model = make_model("dropout")
        with pytest.raises(RuntimeError):
            Evaluation(Forward(model, supervised(F.cross_entropy)), [(torch.randn(2, 1), torch.zeros(2).long())]).run(
                init(Forward(model, supervised(F.cross_entropy)), model)
            )
        assert all(m.training for m in model.modules())

    def test_when(self) -> None:
        step, state, model = started()
        sink = Memory()
        every = [evaluation(model, name="e2", when=EveryEpoch(2)), evaluation(model, name="u3", when=EveryUpdates(3))]
        fold(step, state, make_batches(4), sinks=[sink], until=Epochs(5), evaluations=every)
        done = [(e.name, e.update) for e in sink.events if isinstance(e, EvalDone)]
        assert done == [("u3", 3), ("e2", 4), ("u3", 6), ("e2", 8), ("u3", 9)]

    def test_every_n_updates_are_met_when_a_step_makes_several(self) -> None:
        model = make_model("mlp")
        step = chain(repeat(2, make_step(model, 1).without("EmitEvents")))
        sink = Memory()
        fold(
            step,
            init(step, model),
            make_batches(5),
            sinks=[sink],
            evaluations=[evaluation(model, when=EveryUpdates(3))],
        )
        assert [e.update for e in sink.events if isinstance(e, EvalDone)] == [4, 6, 10]

    def test_the_last_epoch_is_evaluated_although_a_limit_falls_on_its_end(self) -> None:
        step, state, model = started()
        sink = Memory()
        fold(step, state, make_batches(4), sinks=[sink], until=Updates(4), evaluations=[evaluation(model)])
        assert sink.names()[-3:] == ["EvalDone", "EpochEnded", "RunEnded"]

    def test_what_cannot_be_read_again_is_refused_when_built(self) -> None:
        with pytest.raises(SettingError, match="more than once"):
            Evaluation(Forward(make_model("mlp"), supervised(F.cross_entropy)), iter([]))

    def test_no_batches_is_an_error(self) -> None:
        forward = Forward(make_model("mlp"), supervised(F.cross_entropy))
        with pytest.raises(StreamError, match="no batches"):
            Evaluation(forward, []).run(init(forward, forward.model))


class TestMonitorsInAFold:
    def test_early_stopping_ends_the_run_with_its_reason(self) -> None:
        step, state, model = started()
        step = step.replace("MaybeStep", MaybeStep(Optimizer(torch.optim.SGD, lr=0.0)))
        stopping = monitors.EarlyStopping("val_loss", patience=2)
        run = fold(step, state, make_batches(3), monitors=[stopping], until=Epochs(50), evaluations=[evaluation(model)])
        assert run.state.progress.epoch == 3
        best = run.results["EarlyStopping"]["best"]
        (reason,) = run.stopped_by
        assert reason.startswith("EarlyStopping: val_loss no better for 2 evaluations")
        assert f"best {best:.6g} at update 2" in reason
        assert run.results["EarlyStopping"]["waited"] == 2

    def test_a_monitor_that_watches_nothing_is_told_at_once(self) -> None:
        step, state, _ = started()
        sink = Memory()
        with pytest.raises(MeasureError, match="Evaluation"):
            fold(step, state, make_batches(3), monitors=[monitors.EarlyStopping("val_loss")], sinks=[sink])
        assert sink.closed == 1

    def test_a_misspelt_measure_is_told_with_those_that_exist_after_the_first_evaluation(self) -> None:
        step, state, model = started()
        with pytest.raises(MeasureError, match="val_accuracy, val_loss") as caught:
            fold(
                step, state, make_batches(3), monitors=[monitors.EarlyStopping("val_los")],
                evaluations=[evaluation(model)], until=Epochs(9),
            )  # fmt: skip
        assert run_of(caught.value).state.progress.epoch == 1

    def test_two_of_one_name_are_refused(self) -> None:
        step, state, model = started()
        with pytest.raises(DuplicateNameError, match="monitors are called 'MeanLoss'"):
            fold(step, state, [], monitors=[monitors.MeanLoss(), monitors.MeanLoss()])
        with pytest.raises(DuplicateNameError, match="evaluation"):
            fold(step, state, [], evaluations=[evaluation(model), evaluation(model)])
        assert fold(step, state, make_batches(2), monitors=[monitors.MeanLoss(), monitors.MeanLoss("again")])

    def test_all_reasons_are_kept(self) -> None:
        class Ask:
            def __init__(self, name: str) -> None:
                self.name = name

            def init(self) -> int:
                return 0

            def reduce(self, accumulator: int, event: Event) -> int:
                return accumulator + isinstance(event, UpdateDone)

            def result(self, accumulator: int) -> int:
                return accumulator

            def signals(self, accumulator: int) -> list[Stop]:
                return [Stop(f"{self.name} asks")] if accumulator >= 2 else []

        step, state, _ = started()
        run = fold(step, state, make_batches(10), monitors=[Ask("a"), Ask("b")], publish_every=1)
        assert run.stopped_by == ("a asks", "b asks")
        assert run.state.progress.updates == 2


CTRL_C = """
    import os, signal, sys, time
    import torch
    from pipeline import fold, init, monitors
    from tests.laws.cases import make_batches, make_model, make_step

    class Stream:
        def __iter__(self):
            for i, batch in enumerate(make_batches(100)):
                if i == 5:
                    os.kill(os.getpid(), signal.SIGINT)
                    if {twice}:
                        os.kill(os.getpid(), signal.SIGINT)
                        time.sleep(1)
                yield batch

    model = make_model("mlp")
    step = make_step(model, 4)
    try:
        run = fold(step, init(step, model), Stream(), monitors=[monitors.MeanLoss()])
        print(run.stopped_by, run.state.progress.micro_steps, run.state.progress.updates)
        print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    except KeyboardInterrupt:
        print("at once")
"""


@pytest.mark.parametrize("twice", [False, True])
def test_ctrl_c_ends_after_the_running_micro_batch_and_a_second_one_at_once(twice: bool) -> None:
    code = textwrap.dedent(CTRL_C.replace("{twice}", str(twice)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    if twice:
        assert done.stdout.strip() == "at once", done.stderr
    else:
        assert done.stdout.splitlines() == ["('interrupted (Ctrl-C)',) 6 2", "True"], done.stderr
    assert signal.SIGINT


def test_the_fold_may_run_beside_the_main_thread() -> None:
    step, state, _ = started()
    ends: list[Any] = []
    thread = threading.Thread(target=lambda: ends.append(fold(step, state, make_batches(4))))
    thread.start()
    thread.join()
    assert ends[0].state.progress.updates == 2


class TestRandomness:
    def test_a_step_draws_by_seed_and_number_alone(self) -> None:
        step, state, _ = started("dropout")
        kept = []
        for at, _ in scan(step, state.copy(), make_batches(6)):
            kept.append(at.copy())
        torch.manual_seed(99)
        again, _ = apply(step, kept[3], make_batches(6)[4])
        assert_records_equal(again, kept[4])

    def test_the_closing_pass_draws_by_seed_and_number_alone_too(self) -> None:
        def noisy(f: Any) -> Any:
            grads = f.state.window.grads.map(lambda g: g + torch.rand(()))
            return f.having(state=attrs.evolve(f.state, window=attrs.evolve(f.state.window, grads=grads)))

        def drawing(batches: list[Any]) -> Iterator[Any]:
            yield from batches
            torch.rand(5)

        ends = []
        for given in (make_batches(3), drawing(make_batches(3)), [None, *make_batches(3)]):
            step, state, _ = started()
            step = step.insert_after("Accumulate", when(lambda f: f.ready, noisy))
            ends.append(fold(step, state, given).state.params)
        assert_records_equal(ends[1], ends[0])
        assert_records_equal(ends[2], ends[0])

    def test_other_seeds_and_ranks_draw_otherwise(self) -> None:
        model = make_model("dropout")
        step = make_step(model)
        base = init(step, model).copy()
        losses = set()
        for seed, rank in ((0, 0), (1, 0), (0, 1)):
            state = attrs.evolve(base, rng=Rng(seed, rank))
            item, _ = next(scan(step, state, make_batches(1), donate=False))
            losses.add(float(item.window.loss))
        assert len(losses) == 3

    def test_a_shuffling_stream_has_another_order_each_epoch_and_the_same_in_each_run(self) -> None:
        data = torch.utils.data.TensorDataset(*make_batch(0, 12))
        runs = []
        for _ in range(2):
            loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
            step, state, _ = started()
            seen: list[list[float]] = []
            step = step.insert_before("Forward", tap(lambda f, seen=seen: seen.append(f.batch[0][:, 0].tolist())))
            fold(step, state, loader, until=Epochs(2))
            runs.append(seen)
        assert runs[0] == runs[1]
        assert runs[0][:3] != runs[0][3:]
        first, second = (sorted(x for batch in runs[0][i : i + 3] for x in batch) for i in (0, 3))
        assert first == second


def test_updates_tell_how_long_their_batches_were_waited_for() -> None:
    now = [0.0]

    def slow(seconds: list[float]) -> Iterator[torch.Tensor]:
        for s in seconds:
            now[0] += s
            yield torch.ones(1, 1)

    model = nn.Linear(1, 1)

    def loss(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        now[0] += 100.0  # work is not waiting
        return m(x).mean()

    step = chain(
        Forward(model, loss),
        ScaledBackward(),
        Accumulate(2),
        MaybeStep(Optimizer(torch.optim.SGD, lr=0.1)),
        EmitEvents(),
    )
    items = scan(step, init(step, model), slow([1.0, 2.0, 4.0, 8.0, 16.0]), clock=lambda: now[0])
    assert [e.waited for _, es in items for e in es if isinstance(e, UpdateDone)] == [3.0, 12.0, 16.0]


class TestWhatMonitorsAsk:
    def test_an_evaluation_is_made_at_once_and_told_of_like_any_other(self) -> None:
        @attrs.frozen
        class OnThird:
            """Asks for an evaluation after the third update."""

            which: str | None
            name: str = "OnThird"

            def init(self) -> int:
                return 0

            def reduce(self, seen: int, event: Event) -> int:
                return event.update if isinstance(event, UpdateDone) else 0

            def result(self, seen: int) -> int:
                return seen

            def signals(self, seen: int) -> list[Evaluate]:
                return [Evaluate(self.which)] if seen == 3 else []

        step, state, model = started(window=1)
        forward = Forward(model, supervised(F.cross_entropy))
        evaluations = [Evaluation(forward, make_batches(2), name=name) for name in ("val", "test")]
        memory = Memory()
        fold(
            step,
            state.copy(),
            make_batches(5),
            monitors=[OnThird("test")],
            evaluations=evaluations,
            sinks=[memory],
            publish_every=1,
        )
        told = [(e.name, e.update) for e in memory.events if isinstance(e, EvalDone)]
        assert told == [("test", 3), ("val", 5), ("test", 5)]
        memory = Memory()
        fold(
            step,
            state.copy(),
            make_batches(4),
            monitors=[OnThird(None)],
            evaluations=evaluations,
            sinks=[memory],
            publish_every=1,
        )
        told = [(e.name, e.update) for e in memory.events if isinstance(e, EvalDone)]
        assert told == [("val", 3), ("test", 3), ("val", 4), ("test", 4)]
        with pytest.raises(UnknownNameError, match="tset"):
            fold(
                step,
                state,
                make_batches(5),
                monitors=[OnThird("tset")],
                evaluations=evaluations,
                publish_every=1,
            )

    def test_a_late_publication_is_always_one_late_and_complete_at_the_end(self) -> None:
        step, state, _ = started(window=1)

        def told(late: bool) -> list[tuple[int, list[int]]]:
            memory = Memory()
            watched = Watched(state)
            publisher = Publisher(watched, Audience([], [memory]), (), 2, lambda: 0.0, late)
            seen: list[tuple[int, list[int]]] = []
            for now, events in scan(step, state.copy(), make_batches(5), clock=lambda: 0.0):
                publisher.take(events)
                seen.append((now.progress.updates, [e.update for e in memory.events if isinstance(e, UpdateDone)]))
            return seen

        # What opens a run is told of at once, and so is what ends an epoch.
        assert told(late=False)[:5] == [(1, [1]), (2, [1]), (3, [1, 2, 3]), (4, [1, 2, 3]), (5, [1, 2, 3, 4, 5])]
        assert told(late=True)[:5] == [(1, [1]), (2, [1]), (3, [1]), (4, [1]), (5, [1, 2, 3])]
        assert told(late=True)[-1] == (5, [1, 2, 3, 4, 5])


class TestAStreamThatKnowsItsPlace:
    def batches(self, **more: Any) -> stream.Node:
        x, y = make_batch(0, 12)
        return stream.batches((x, y), 4, shuffle=True, seed=3, **more)

    def test_every_epoch_is_read_and_each_in_an_order_of_its_own(self) -> None:
        step, state, _ = started(window=1)
        memory = Memory()
        run = fold(step, state, self.batches(), until=Epochs(3), sinks=[memory])
        assert (run.state.progress.epoch, run.state.progress.updates) == (3, 9)
        assert [e.batches for e in memory.events if isinstance(e, EpochEnded)] == [3, 3, 3]

    @pytest.mark.parametrize("cut", range(1, 9))
    @pytest.mark.parametrize("known", [True, False], ids=["of known length", "of unknown length"])
    def test_a_second_fold_goes_on_where_the_first_stopped(self, cut: int, known: bool) -> None:
        def made() -> stream.Node:
            node = self.batches()
            return node if known else stream.filter(node, lambda batch: True)

        (whole_step, whole, _), (step, state, _) = started(window=1), started(window=1)
        at_once = fold(whole_step, whole, made(), until=Updates(9))
        node = made()
        first = fold(step, state, node, until=Updates(cut))
        second = fold(step, first.state, node, until=Updates(9))
        assert second.stopped_by == ("Updates(9)",)
        assert_records_equal(dict(second.state.params), dict(at_once.state.params))
        assert second.state.progress.epoch in (2, 3)

    def test_it_serves_an_evaluation_time_and_again(self) -> None:
        step, state, model = started(window=1)
        held_out = Evaluation(Forward(model, supervised(F.cross_entropy)), self.batches())
        memory = Memory()
        fold(step, state, make_batches(2), until=Epochs(2), evaluations=[held_out], sinks=[memory])
        assert [e.batches for e in memory.events if isinstance(e, EvalDone)] == [3, 3]


def test_a_fact_that_is_not_0d_ends_the_run_with_its_results() -> None:
    step, state, _ = started(window=1)
    step = step.insert_after("MaybeStep", lambda f: f.having(facts={**f.facts, "v": torch.ones(3)}))
    memory = Memory()
    with pytest.raises(LossError, match="0-d") as caught:
        fold(step, state, make_batches(3), monitors=[monitors.MeanLoss()], sinks=[memory])
    assert isinstance(memory.events[-1], RunEnded)
    assert run_of(caught.value).results == {"MeanLoss": None}


def test_nothing_comes_after_the_end_and_a_factor_that_is_none_is_refused() -> None:
    asking = monitors.monitor("asks", lambda: 0, lambda n, event: n + 1, lambda n: n, signals=lambda n: [Evaluate()])
    step, state, model = started(window=1)
    memory = Memory()
    fold(step, state, make_batches(3), monitors=[asking], evaluations=[evaluation(model)], sinks=[memory])
    assert isinstance(memory.events[-1], RunEnded)
    for factor in (math.nan, math.inf, -1.0, 0.0):
        with pytest.raises(SettingError, match=r"ScaleRate\.factor"):
            ScaleRate(factor)


def test_a_checkpoint_that_is_asked_for_at_the_end_comes_before_it_or_not_at_all(tmp_path: Path) -> None:
    asking = monitors.monitor("asks", lambda: 0, lambda n, event: n + 1, lambda n: n, signals=lambda n: [Save(f"{n}")])
    step, state, _ = started(window=1)
    memory = Memory()
    fold(step, state, make_batches(3), monitors=[asking], sinks=[memory], store=tmp_path, until=Updates(2))
    assert isinstance(memory.events[-1], RunEnded)
    assert sum(isinstance(event, RunEnded) for event in memory.events) == 1
