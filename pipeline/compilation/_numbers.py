"""Numbers of the host in a trace.

What is computed from one is written down as source, and computed again for each frame. What is decided by one becomes a
condition of the graph. Where one meets a tensor it becomes an input of the graph. Anything else that would need its
value (an index, a conversion to `float`, a text) is refused: the graph would keep the value that it was traced with.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._sympy.printers import PythonPrinter

__all__ = ["MOST_INPUTS", "Ledger", "MeetingTensors", "Number", "Untraceable"]

MOST_INPUTS = 1024
"""Expressions that may meet tensors in one trace."""


class Untraceable(TypeError):  # noqa: N818 - it says that a part stays as it is, and never leaves the package
    """What a part of a step does cannot be put into a graph."""


class Ledger:
    """What a trace has noted of numbers: `decided`, expression -> outcome, and `met`, expressions that met tensors."""

    def __init__(self) -> None:
        self.decided: dict[str, bool] = {}
        self.met: dict[str, int] = {}
        self.row: Tensor | None = None  # the input that carries what met tensors
        self.sizes: dict[Any, str] = {}  # symbol of a size that is free -> expression

    def decide(self, code: str, outcome: bool) -> bool:
        """Note that the trace went one way at `code`."""
        return self.decided.setdefault(code, outcome)

    def exact(self, code: str) -> Tensor:
        """What `code` gives, as a 0-d input in float64."""
        place = self.met.setdefault(code, len(self.met))
        if self.row is None or place >= MOST_INPUTS:
            raise Untraceable(f"more than {MOST_INPUTS} numbers of the host meet tensors")
        return self.row[place].clone()  # the row is written anew for the next frame

    def tensor(self, code: str, value: float, like: Tensor | None) -> Tensor:
        """The same, rounded as a Python number is next to `like`."""
        taken = self.exact(code)
        if like is not None and (like.is_floating_point() or like.is_complex()):
            real = like.dtype.to_real()
            return taken.to(real if like.ndim == 0 else torch.promote_types(real, torch.float32))
        return taken.to(torch.get_default_dtype() if isinstance(value, float) else torch.int64)

    def number(self, value: Any) -> Number | None:
        """A size, or what was computed from sizes, as a number of the host; None for anything else."""
        if not isinstance(value, (SymInt, SymFloat, SymBool)):
            return value if isinstance(value, Number) else None
        return Number(self, self.printed(value.node.expr), value.node.hint)

    def printed(self, expression: Any) -> str:
        """An expression over free sizes as source."""
        return f"({_Printer(self.sizes).doprint(expression)})"


class _Printer(PythonPrinter):
    def __init__(self, sizes: Mapping[Any, str]) -> None:
        super().__init__()
        self._sizes = sizes

    def _print_Symbol(self, expr: Any) -> str:  # noqa: N802 - the name that sympy looks for
        return self._sizes[expr]


def _computed(symbol: str, apply: Callable[[Any, Any], Any], swapped: bool = False) -> Callable[[Number, Any], Any]:
    def method(self: Number, other: Any) -> Any:
        if isinstance(other, Tensor):
            mine = self.ledger.tensor(self.code, self.value, other)
            return apply(other, mine) if swapped else apply(mine, other)
        operand = self.operand(other)
        if operand is None:
            return NotImplemented
        code, value = operand
        if swapped:
            return Number(self.ledger, f"({code} {symbol} {self.code})", apply(value, self.value))
        return Number(self.ledger, f"({self.code} {symbol} {code})", apply(self.value, value))

    return method


def _decided(symbol: str, apply: Callable[[Any, Any], Any]) -> Callable[[Number, Any], Any]:
    def method(self: Number, other: Any) -> Any:
        if isinstance(other, Tensor):
            return apply(self.ledger.tensor(self.code, self.value, other), other)
        operand = self.operand(other)
        if operand is None:
            return NotImplemented
        code, value = operand
        return self.ledger.decide(f"({self.code} {symbol} {code})", apply(self.value, value))

    return method


class Number:
    """A number of the host, known by the expression that gives it; `value` is what it is while traced."""

    __slots__ = ("code", "ledger", "value")

    def __init__(self, ledger: Ledger, code: str, value: Any) -> None:
        self.ledger, self.code, self.value = ledger, code, value

    def operand(self, other: Any) -> tuple[str, Any] | None:
        """Another number as an expression and a value."""
        if isinstance(other, (int, float)):
            code = repr(other) if math.isfinite(other) else f"float('{other}')"
            return (f"({code})" if code.startswith("-") else code), other  # a sign binds less than a power
        number = self.ledger.number(other)
        return None if number is None else (number.code, number.value)

    def otherwise(self, other: Any) -> Number:
        """Itself, or `other` where it is 0."""
        operand = self.operand(other)
        assert operand is not None
        return Number(self.ledger, f"({self.code} or {operand[0]})", self.value or operand[1])

    def tensor(self, like: Tensor | None) -> Tensor:
        """As a 0-d tensor, to be computed with `like`."""
        return self.ledger.tensor(self.code, self.value, like)

    def exact(self) -> Tensor:
        """As a 0-d tensor in float64."""
        return self.ledger.exact(self.code)

    __add__, __radd__ = _computed("+", operator.add), _computed("+", operator.add, swapped=True)
    __sub__, __rsub__ = _computed("-", operator.sub), _computed("-", operator.sub, swapped=True)
    __mul__, __rmul__ = _computed("*", operator.mul), _computed("*", operator.mul, swapped=True)
    __truediv__, __rtruediv__ = _computed("/", operator.truediv), _computed("/", operator.truediv, swapped=True)
    __floordiv__ = _computed("//", operator.floordiv)
    __mod__ = _computed("%", operator.mod)
    __pow__, __rpow__ = _computed("**", operator.pow), _computed("**", operator.pow, swapped=True)
    __lt__, __le__ = _decided("<", operator.lt), _decided("<=", operator.le)
    __gt__, __ge__ = _decided(">", operator.gt), _decided(">=", operator.ge)
    __eq__, __ne__ = _decided("==", operator.eq), _decided("!=", operator.ne)

    def __neg__(self) -> Number:
        return Number(self.ledger, f"(-{self.code})", -self.value)

    def __bool__(self) -> bool:
        return self.ledger.decide(f"bool({self.code})", bool(self.value))

    def _refuse(self, *_: Any) -> NoReturn:
        raise Untraceable(f"it needs the value of {self.code.removeprefix('f.')}, which is another one in each step")

    # `float` and `int` ask for `__index__` where there is nothing else; checks of what is a number do not.
    __index__ = __str__ = __format__ = __hash__ = _refuse  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        return f"Number({self.code})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Where a torch function is given one, it takes part as a tensor."""
        like = next((leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)

        def taken(leaf: Any) -> Any:
            return leaf.tensor(like) if isinstance(leaf, Number) else leaf

        return func(*pytree.tree_map(taken, args), **pytree.tree_map(taken, kwargs or {}))


_MAKERS = (torch.tensor, torch.as_tensor, torch.scalar_tensor, Tensor.new_tensor)


class MeetingTensors(TorchFunctionMode):
    """While inside, functions that make a tensor out of a number make an input of the graph out of a `Number`."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _MAKERS:
            return func(*args, **kwargs)
        like, given = (args[0], args[1:]) if func is Tensor.new_tensor else (None, args)
        number = self._ledger.number(given[0]) if given else None
        if number is None:
            return func(*args, **kwargs)
        dtype = kwargs.get("dtype") or (None if like is None else like.dtype)
        made = number.tensor(None)
        return made if dtype is None else made.to(dtype)
