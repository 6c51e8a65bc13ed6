"""An update through `torch.compile`: one graph for all updates, and whatever a schedule moves is an input of it."""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import SettingError

Step = Callable[[torch.optim.Optimizer], object]

_BY_ITSELF = ("state", "param_groups")
_HOOKS = {
    f"_optimizer_{of}_{when}_hooks" for of in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")
}
_MARKS = (-0.5, 0.0, 0.5, 1.0, 1.5)
"""Where the code of an optimizer takes another way: `if momentum != 0`, powers of 1, `torch.lerp` by v or 1 - v."""


class CompiledStep:
    """The `step` of a class as a function of tensors, so that one graph serves any tensors of the same shapes.

    Numbers that move go in as one float64 tensor, and are taken out of it inside the graph. What the code may branch
    on, their place among the marks, is given with them: crossing one is compiled once more. A number on a mark is a
    constant, and so is whatever is no float.
    """

    def __init__(self, cls: type[torch.optim.Optimizer], step: Step, backend: str) -> None:
        self._name, self._backend = cls.__name__, backend
        self._dynamo: Any = torch._dynamo  # loaded by torch when it is asked for  # pyright: ignore[reportPrivateUsage]
        try:
            self._update = torch.compile(_function(cls, step), backend=backend, fullgraph=True)
        except self._dynamo.exc.InvalidBackend as error:
            expected = "True, False or the name of a backend of torch.compile"
            raise SettingError("Optimizer.compiled", expected, backend, str(error)) from error
        self._while_at_work = self._dynamo.config.patch(capture_scalar_outputs=True, specialize_float=True)

    def __call__(self, optimizer: torch.optim.Optimizer, moving: Mapping[str, Mapping[str, Any]]) -> None:
        """One update of the optimizer's parameters by their `.grad`; `moving` names by group the entries that move."""
        groups = optimizer.param_groups
        moved = [moving[group["name"]] for group in groups]
        numbers = [n for values in moved for value in values.values() for n in _numbers(value)]
        fixed = [n if not isinstance(n, float) or n in _MARKS else None for n in numbers]
        free = [n if constant is None else 0.0 for n, constant in zip(numbers, fixed, strict=True)]
        attributes = {k: v for k, v in vars(optimizer).items() if k not in _BY_ITSELF and k not in _HOOKS}
        kept = [{k: v for k, v in g.items() if k not in moving[g["name"]]} for g in groups]
        states = [[optimizer.state.get(p, {}) for p in group["params"]] for group in groups]
        with self._while_at_work, torch.no_grad():
            try:
                after = self._update(
                    attributes,
                    kept,
                    states,
                    [{k: len(v) if isinstance(v, tuple) else None for k, v in values.items()} for values in moved],
                    torch.tensor(free, dtype=torch.float64),
                    fixed,
                    [[n > mark for mark in _MARKS] for n in free],
                )
            except self._dynamo.exc.TorchDynamoException as error:
                expected = f"left out: torch cannot compile the step of {self._name} as one graph"
                own = isinstance(error.__cause__, self._dynamo.exc.ObservedException)  # of the step itself
                reason = " ".join(str(error.__cause__ if own else error).split("\n")[:2])
                raise SettingError("Optimizer.compiled", expected, self._backend, f"It says: {reason}") from error
            except self._dynamo.exc.FailOnRecompileLimitHit as error:
                expected = f"left out: what {self._name} keeps, or which parameters have gradients, changes too often"
                cure = "torch._dynamo.config.recompile_limit says how many graphs there may be."
                raise SettingError("Optimizer.compiled", expected, self._backend, cure) from error
        vars(optimizer).update(after[0])
        for group, entries, new in zip(groups, after[1], after[2], strict=True):
            group.update(entries)
            optimizer.state.update({p: state for p, state in zip(group["params"], new, strict=True) if state})


def _numbers(value: object) -> Sequence[Any]:
    return value if isinstance(value, tuple) else (value,)


def _with_count(state: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The state with its count of updates in this precision: torch keeps it in float32.

    1 - 0.999**2 has three digits fewer there than in Python's floats, which uncompiled optimizers compute it in.
    """
    return {k: v.to(dtype) if k == "step" and isinstance(v, Tensor) else v for k, v in state.items()}


def _function(cls: type[torch.optim.Optimizer], step: Step) -> Callable[..., Any]:
    """`step` of an object that is made inside, out of what it is given."""
    # torch marks this method as not to be compiled, since it has a way of its own to compile an optimizer.
    init_group = getattr(cls, "_init_group", None)
    body = {} if init_group is None else {"_init_group": getattr(init_group, "_torchdynamo_orig_callable", init_group)}
    made = type(cls.__name__, (cls,), body)

    def number(place: int, free: Tensor, fixed: list[Any], above: list[list[bool]]) -> Any:
        if fixed[place] is not None:
            return fixed[place]
        value = free[place].item()
        for mark, is_above in zip(_MARKS, above[place], strict=True):
            torch._check(value > mark if is_above else value < mark)  # pyright: ignore[reportPrivateUsage]
        return value

    def update(
        attributes: dict[str, Any],
        kept: list[dict[str, Any]],
        states: list[list[dict[str, Any]]],
        moving: list[dict[str, int | None]],
        free: Tensor,
        fixed: list[Any],
        above: list[list[bool]],
    ) -> tuple[Any, ...]:
        optimizer = made.__new__(made)
        for name, value in attributes.items():
            setattr(optimizer, name, value)
        optimizer.state = defaultdict(dict)
        optimizer.param_groups = []
        place = 0
        for entries, those, lengths in zip(kept, states, moving, strict=True):
            group = dict(entries)
            for key, length in lengths.items():
                taken = [number(place + i, free, fixed, above) for i in range(length or 1)]
                group[key] = taken[0] if length is None else tuple(taken)
                place += len(taken)
            if "capturable" in group:  # the step counts are tensors, and stay so
                group["capturable"] = True
            for param, state in zip(group["params"], those, strict=True):
                if state:
                    optimizer.state[param] = _with_count(state, torch.float64)
            optimizer.param_groups.append(group)
        step(optimizer)
        after = [
            {k: v for k, v in group.items() if k not in lengths and k not in ("params", "capturable")}
            for group, lengths in zip(optimizer.param_groups, moving, strict=True)
        ]
        found = [
            [_with_count(optimizer.state.get(p, {}), torch.float32) for p in group["params"]]
            for group in optimizer.param_groups
        ]
        return {name: getattr(optimizer, name) for name in attributes}, after, found

    # Graphs are counted by code object, and there is a limit to them: each function gets one of its own.
    code = update.__code__.replace()
    return types.FunctionType(code, update.__globals__, cls.__name__, None, update.__closure__)
