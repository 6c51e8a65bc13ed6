"""Parts up to Accumulate as graphs."""

from __future__ import annotations

import time
from collections.abc import Sequence

import attrs
from torch import Tensor

from pipeline.compilation._graph import Working
from pipeline.compilation._graphs import FailedError, Graphs, Listener, Settings, reason_of
from pipeline.compilation._tracing import PartError, run
from pipeline.compilation._window import Form, Gathering, contents, supposed
from pipeline.records import Frame, TrainState
from pipeline.transform import Transform
from pipeline.transforms import Accumulate, ScaledBackward

__all__ = ["OfMicroBatches"]


class OfMicroBatches(Graphs):
    """Parts that end with Accumulate: one graph for the micro-batch that begins a window and for those that follow.

    Whether the window is full is for the host to say, so that this is no matter of the graph either.
    """

    def __init__(self, parts: Sequence[Transform], accumulate: Accumulate, settings: Settings, listener: Listener):
        super().__init__(parts, settings, listener)
        self._gathering = Gathering(accumulate)
        self._closing = attrs.evolve(accumulate, at_end="flush")
        self._forms: list[Form] = []
        self._lent: tuple[Form, tuple[Tensor, ...]] | None = None
        self._last: Working | None = None
        self._left: TrainState | None = None

    def __call__(self, frame: Frame) -> Frame:
        self._lent = None
        frame = self._through(frame)
        state = self._left = frame.state
        if not frame.ready and state.window.micro_batches >= self._closing.every:
            frame = self._closing.finish(frame)
            sums = frame.state.window.grads
            form = next((form for form in self._forms if form.has_made(sums)), None) if sums.is_owned else None
            self._lent = None if form is None else (form, sums.flat)
        return frame

    def ended(self, frame: Frame) -> None:
        """Where the window has ended too, its memory serves the next one."""
        if self._lent is not None and not frame.state.window.micro_batches:
            form, sums = self._lent
            form.give_back(sums)

    def _found(self, frame: Frame) -> tuple[Working, Frame]:
        if frame.state is self._left and self._last is not None and self._last.goes_on(frame):
            return self._last, frame
        self._last = None
        working, frame = self._sought(frame)
        self._last = working if working.form is not None else None
        return working, frame

    def _sought(self, frame: Frame) -> tuple[Working, Frame]:
        if frame.state.window.micro_batches:
            return self._serving(frame) or self._of_an_open_window(frame), frame
        for form in self._forms:
            begun = form.begin(frame)
            working = self._serving(begun, form)
            if working is not None:
                form.take(begun.state.window.grads)
                return working, begun
        return self._of_a_new_window(frame)

    def _of_an_open_window(self, frame: Frame) -> Working:
        working = self._made(frame)
        window = frame.state.window
        if self._gathering.fits(contents(window)):
            working.form = next((form for form in self._forms if form.is_of(window)), None)
            if working.form is None:
                working.form = Form(window, frame.state.params.flat[0].device)
                self._forms.append(working.form)
        return working

    def _of_a_new_window(self, frame: Frame) -> tuple[Working, Frame]:
        """A graph for windows of the form that is known or supposed, if this micro-batch begins one, or of its own."""
        began = time.perf_counter()
        form = self._forms[-1] if self._forms else self._form_after(frame, supposed)
        lifting = self._lifted(form.begin(frame))
        traced = self._traced(lifting)
        if not self._gathering.fits(form.contents):
            form = self._form_after(frame)
            lifting = self._lifted(form.begin(frame))
            traced = self._traced(lifting)
        if form not in self._forms:
            self._forms.append(form)
        begun = form.begin(frame)
        working = self._compiled(lifting, traced, begun, time.perf_counter() - began)
        working.form = form
        form.take(begun.state.window.grads)
        return working, begun

    def _form_after(self, frame: Frame, backward: Transform | None = None) -> Form:
        """The form of the window that this micro-batch begins, from a rehearsal without numbers.

        `backward` takes the place of ScaledBackward in it, which takes as long as all else together.
        """
        lifting = self._lifted(frame)
        parts = [backward if backward and isinstance(part, ScaledBackward) else part for part in self._to_trace()]
        try:
            window = run(parts, lifting).state.window
        except PartError as error:
            raise FailedError([self.parts[error.place]], reason_of(error)) from error
        found = next((form for form in self._forms if form.is_of(window)), None)
        return found or Form(window, frame.state.params.flat[0].device)

    def _to_trace(self) -> Sequence[Transform]:
        return [*self.parts[:-1], self._gathering]
