"""`Optimizer`: any `torch.optim.Optimizer` class as a pure function of parameters, gradients, state and rate."""

from __future__ import annotations

import fnmatch
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from pipeline._running import Running
from pipeline.errors import DuplicateNameError, SettingError
from pipeline.records import OptimizerState, Scalar, TrainState
from pipeline.tensors import Tensors

__all__ = ["Group", "Optimizer", "Rate", "layer_decay", "no_decay"]

Rate = float | Callable[[int], float]
"""A learning rate, or a schedule: a function of the update count, from 0."""

_FUSED_ON = frozenset({"cpu", "cuda", "xpu", "mps"})
_DEFAULT = "default"


def _check_rate(setting: str, lr: object) -> None:
    if callable(lr):
        return
    if not isinstance(lr, (int, float)) or not 0 <= lr < math.inf:
        raise SettingError(setting, "a number, 0 or more and finite, or a schedule", lr)


@attrs.frozen(init=False)
class Group:
    """Parameters with settings of their own: `Group("*.bias", weight_decay=0.0)`.

    Args: match: a pattern on the parameter's name as in `fnmatch`, or `f(name, tensor) -> bool`; lr: a rate or schedule
          in place of the optimizer's; name: what events call the group, the pattern by default; settings: as for the
          optimizer's class.
    """

    match: str | Callable[[str, Tensor], bool]
    name: str
    lr: Rate | None
    settings: Mapping[str, Any]

    def __init__(
        self,
        match: str | Callable[[str, Tensor], bool],
        *,
        lr: Rate | None = None,
        name: str | None = None,
        **settings: Any,
    ) -> None:
        if not (isinstance(match, str) or callable(match)) or isinstance(match, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SettingError("Group.match", "a pattern on names or a function f(name, tensor)", match)
        if lr is not None:
            _check_rate("Group.lr", lr)
        label = name or (match if isinstance(match, str) else getattr(match, "__name__", "group"))
        self.__attrs_init__(match, label, lr, settings)  # pyright: ignore[reportAttributeAccessIssue]

    def matches(self, name: str, tensor: Tensor) -> bool:
        """Whether the parameter belongs to this group."""
        return fnmatch.fnmatchcase(name, self.match) if isinstance(self.match, str) else self.match(name, tensor)


@attrs.frozen(init=False, repr=False)
class Optimizer:
    """A `torch.optim.Optimizer` class with its settings, used as a pure function; it holds no state of its own.

    `Optimizer(torch.optim.AdamW, lr=1e-3, weight_decay=0.01)`. State is kept by parameter name in
    `state.optimizer`. Gradients are multiplied by the update factor (normalisation, unscaling, clipping) on the way:
    inside the kernel where the optimizer is fused, which rounds once differently, and in place otherwise.

    Args:   cls: the class, torch's own or a third party's; lr: a rate, or a schedule of the update count; groups: each
            parameter belongs to the first `Group` that matches it, the rest to the group "default"; settings: what
            the class takes. `fused=True` is chosen for you where the class and the parameters allow it and no
            momentum is asked for (torch's fused SGD cannot start one late); `fused=False` and `foreach=True` overrule.
    Raises: SettingError, when built, for a class that is no optimizer or needs a closure (LBFGS), or a setting that
            the class does not take; when used, for a group that no parameter belongs to.
    """

    cls: type[torch.optim.Optimizer]
    lr: Rate
    groups: tuple[Group, ...]
    masters: bool
    settings: Mapping[str, Any]

    def __init__(
        self,
        cls: type[torch.optim.Optimizer],
        lr: Rate,
        *,
        groups: Iterable[Group] = (),
        masters: bool = False,
        **settings: Any,
    ) -> None:
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SettingError("Optimizer.cls", "a subclass of torch.optim.Optimizer", cls)
        _check_rate("Optimizer.lr", lr)
        closure = inspect.signature(cls.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            cure = "It calls the loss several times an update; use an optimizer that takes the gradients as they are."
            raise SettingError("Optimizer.cls", "one whose step() needs no closure", cls.__name__, cure)
        taken = inspect.signature(cls).parameters
        groups = tuple(groups)
        labels = [_DEFAULT]
        for group in groups:
            if not isinstance(group, Group):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise SettingError("Optimizer.groups", "of `Group(...)`", group)
            if group.name in labels:
                raise DuplicateNameError("group", group.name)
            labels.append(group.name)
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values()):
            for name in (*settings, *(key for group in groups for key in group.settings)):
                if name not in taken or name in ("params", "lr"):
                    known = ", ".join(key for key in taken if key not in ("params", "lr"))
                    raise SettingError(
                        f"Optimizer setting {name!r}", f"one that {cls.__name__} takes", name, known + "."
                    )
        self.__attrs_init__(cls, lr, groups, masters, settings)  # pyright: ignore[reportAttributeAccessIssue]

    # -- the schedule -------------------------------------------------------------------------------------------

    def rates(self, count: int) -> dict[str, float]:
        """The learning rate of each group in update number `count`, from 0; "default" is the rest."""
        rates = {g.name: _rate(self.lr if g.lr is None else g.lr, count) for g in self.groups}
        return {_DEFAULT: _rate(self.lr, count), **rates}

    # -- as a pure function -------------------------------------------------------------------------------------

    def init(self, state: TrainState) -> TrainState:
        """Check the groups against the parameters; the state itself comes with the first update."""
        members = self._members(state.params)
        for group, names in zip(self.groups, members[1:], strict=True):
            if not names:
                known = ", ".join(list(state.params)[:8])
                raise SettingError(f"Group {group.name!r}", "one that some parameter matches", group.match, known + ".")
        if len(state.params):
            self.build(state.params)  # what torch refuses in the settings, it refuses here
        return state

    def update(
        self,
        params: Tensors,
        grads: Tensors,
        state: OptimizerState,
        *,
        rates: Mapping[str, float],
        factor: Scalar,
        count: int,
    ) -> tuple[Tensors, OptimizerState]:
        """Parameters and optimizer state after update number `count` with gradients `grads` × `factor` at these rates.

        In place where the records own their buffers, in copies where they do not; the same bits. Parameters without an
        entry in `grads` are left as they are, their state too.
        """
        keep = params.is_owned
        params, grads = params.writable(count), grads.writable(count)
        mine = keep and state.is_owned
        live = state.live if mine and isinstance(state.live, Running) and state.live.serves(self, params) else None
        if live is not None:
            generation = live.lease.renew(state.generation, count)
        else:  # a new lineage: the state's own tensors where they are given, copies where they are lent
            given = state if mine else state.copy()
            numbers = given.numbers
            live, generation = Running(self, params, given.tensors.owned(count), numbers), 0
        live.step(params, grads, rates, factor)
        return params, OptimizerState(live=live, generation=generation, is_owned=keep)

    def _members(self, params: Tensors) -> list[list[str]]:
        """Parameter names by group: the default first, then each of `groups`."""
        members: list[list[str]] = [[] for _ in range(len(self.groups) + 1)]
        for name, tensor in params.items():
            place = next((i for i, g in enumerate(self.groups, 1) if g.matches(name, tensor)), 0)
            members[place].append(name)
        return members

    def build(self, params: Tensors) -> tuple[torch.optim.Optimizer, list[str]]:
        """The torch optimizer over these very tensors, and the parameters' names in its order."""
        members = self._members(params)
        settings = dict(self.settings)
        taken = inspect.signature(self.cls).parameters
        # Where it helps and never fails: fused SGD refuses sparse gradients, and momentum that starts late.
        fusable = issubclass(self.cls, (torch.optim.Adam, torch.optim.AdamW)) and "fused" in taken
        if fusable and not {"fused", "foreach", "differentiable", "capturable"} & settings.keys():
            dense = all(p.is_floating_point() and p.device.type in _FUSED_ON for p in params.flat)
            settings["fused"] = True if dense and len(params) else None
        groups: list[dict[str, Any]] = [{"params": [params[n] for n in members[0]], "name": _DEFAULT}]
        for group, names in zip(self.groups, members[1:], strict=True):
            groups.append({"params": [params[n] for n in names], "name": group.name, **group.settings})
        rates = self.rates(0)
        for group in groups:
            group["lr"] = rates[group["name"]]
        optimizer = self.cls([g for g in groups if g["params"]], lr=rates[_DEFAULT], **settings)  # type: ignore[call-arg]
        return optimizer, [name for names in members for name in names]

    def __repr__(self) -> str:
        parts = [self.cls.__name__, f"lr={self.lr!r}"]
        parts += [f"groups={list(self.groups)!r}"] if self.groups else []
        parts += ["masters=True"] if self.masters else []
        parts += [f"{key}={value!r}" for key, value in self.settings.items()]
        return f"Optimizer({', '.join(parts)})"


def no_decay(*patterns: str) -> Group:
    """The group that weight decay leaves alone: biases, norms and other parameters of fewer than two dimensions.

    Args: patterns: on the names of further ones, such as "embedding.*".
    """

    def unshaped(name: str, tensor: Tensor) -> bool:
        return tensor.ndim < 2 or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    return Group(unshaped, name="no decay", weight_decay=0.0)


@attrs.frozen
class _Scaled:
    lr: Rate
    factor: float

    def __call__(self, count: int) -> float:
        return _rate(self.lr, count) * self.factor


def layer_decay(layers: Sequence[str], lr: Rate, decay: float, **settings: Any) -> list[Group]:
    """Groups whose rate falls by `decay` with each layer away from the output.

    Args: layers: patterns on names, from the input to the output: `["embed.*", "blocks.0.*", "blocks.1.*", "head.*"]`;
          the last has the rate `lr` itself.
    Raises: SettingError unless 0 < decay <= 1.
    Source: Howard, Ruder 2018, arXiv:1801.06146, discriminative fine-tuning.
    """
    if not 0 < decay <= 1:
        raise SettingError("layer_decay(decay)", "above 0 and at most 1", decay)
    last = len(layers) - 1
    return [Group(name, lr=_Scaled(lr, decay ** (last - i)), **settings) for i, name in enumerate(layers)]


def _rate(lr: Rate, count: int) -> float:
    return lr(count) if callable(lr) else lr
