"""`Graph`: what is told of one graph of a step; and the graph at work, with what is around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any

import attrs
import torch
from torch import Tensor

from pipeline.compilation._backend import Call
from pipeline.compilation._lifting import Condition, Lifting
from pipeline.compilation._source import Source
from pipeline.compilation._tracing import Traced
from pipeline.compilation._window import Form
from pipeline.records import Frame

__all__ = ["NO_CONDITION", "Graph", "Working"]

NO_CONDITION = (AttributeError, LookupError, TypeError, ArithmeticError, ValueError)
"""What a condition may raise over a frame that another lies in: it does not hold then."""

_set_grad_enabled: Any = torch._C._set_grad_enabled  # pyright: ignore[reportPrivateUsage]
"""What `torch.no_grad` calls, at a tenth of its cost."""


@attrs.frozen
class Graph:
    """One graph that a compiled step has made.

    `parts` are the names of the transforms in it; `why` says what set the frame that it was made for apart from those
    that the graphs before it serve; `traced` and `compiled` are the seconds that it took.
    """

    parts: tuple[str, ...]
    why: str
    traced: float
    compiled: float


class _Row:
    """The numbers that meet tensors as one input, in memory that each call writes anew."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._held, self._write = bytearray(8 * count), Struct(f"{count}d").pack_into
        self._row, self._device = torch.frombuffer(self._held, dtype=torch.float64), device

    def __call__(self, *numbers: float) -> Tensor:
        self._write(self._held, 0, *numbers)
        return self._row if self._device.type == "cpu" else self._row.to(self._device)


class Working:
    """A graph, which frames it serves, and what it makes of one.

    `serves(frame)` says whether it does, or raises an error where the frame has another form. `run(frame)` gives what
    was traced; the records that the graph writes to are copied first where they are lent.
    """

    def __init__(self, lifting: Lifting, traced: Traced, call: Call, modes: Condition, about: Graph) -> None:
        source = lifting.source
        self.about, self.conditions = about, [modes, *_conditions(lifting)]
        self.form: Form | None = None  # that of the windows which it may begin
        self._source = source
        self.serves, self.goes_on = _serving(source, self.conditions)
        self.run = source.function(_lines(lifting, traced, call))

    def failing(self, frame: Frame) -> list[str]:
        """What keeps it from serving the frame."""
        found: list[str] = []
        for condition in self.conditions:
            try:
                actual = self._source.function([f"return {condition.code}"])(frame)
            except NO_CONDITION:
                actual = None
            if actual != condition.expected:
                found.append(condition.difference(actual))
        return found


def _asked(source: Source, condition: Condition) -> str:
    if isinstance(condition.expected, bool):
        return condition.code if condition.expected else f"not {condition.code}"
    return f"{condition.code} == {source.constant(condition.expected)}"


def _serving(source: Source, conditions: Sequence[Condition]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Whether a frame meets the conditions; and whether it does, if its state was made by the graph itself."""
    asked = [_asked(source, condition) for condition in conditions]
    again = [code for code, condition in zip(asked, conditions, strict=True) if not condition.is_lasting]
    return source.function([f"return {' and '.join(asked)}"]), source.function([f"return {' and '.join(again)}"])


def _lines(lifting: Lifting, traced: Traced, call: Call) -> list[str]:
    """A call of the graph without autograd: `w` are the records that it writes to, `o` its outputs."""
    source, lowering = lifting.source, traced.lowering
    written = ", ".join(f"{record.code}.writable(f.began.updates)" for record in lowering.written)
    grad_mode = source.name(_set_grad_enabled)
    return [
        f"w = [{written}]",
        "grad = torch.is_grad_enabled()",
        f"{grad_mode}(False)",
        "try:",
        f"    o = {source.name(call)}([{_arguments(lifting, traced)}])",
        "finally:",
        f"    {grad_mode}(grad)",
        f"return {lowering.code}",
    ]


def _arguments(lifting: Lifting, traced: Traced) -> str:
    """The graph's inputs as source: whole records where all of one is used, tensor by tensor elsewhere."""
    written = {record.code: f"w[{i}]" for i, record in enumerate(traced.lowering.written)}
    used = set(traced.used)
    listed: list[str] = []
    place = 0
    while place < len(lifting.inputs):
        found = lifting.inputs[place]
        size = 1 if found.place is None else len(lifting.records[found.code])
        span = range(place, place + size)
        code = written.get(found.code, found.code)
        if found.place is None:
            listed += [code] if place in used else []
        elif used.issuperset(span):
            listed.append(f"*{code}.flat")
        else:
            listed += [f"{code}.flat[{i - place}]" for i in span if i in used]
        place += size
    if len(lifting.inputs) in used:
        numbers = lifting.ledger.met
        row = _Row(len(numbers), lifting.fakes[0].device)
        listed.append(f"{lifting.source.name(row)}({', '.join(numbers)})")
    return ", ".join(listed)


def _conditions(lifting: Lifting) -> list[Condition]:
    """What was looked at, what was decided by numbers, and what torch has assumed of sizes that are free."""
    ledger = lifting.ledger
    decided = [Condition(code, outcome, code.replace("f.", "")) for code, outcome in ledger.decided.items()]
    environment: Any = lifting.mode.shape_env
    assumed = dict.fromkeys(ledger.printed(guard.expr) for guard in environment.guards)
    sizes = [Condition(f"bool({code})", True, code.replace("f.", "")) for code in assumed]
    return [*lifting.conditions, *decided, *sizes]
