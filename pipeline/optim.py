"""`Optimizer`: any `torch.optim.Optimizer` class as a pure function of parameters, gradients, state and rate."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from pipeline._groups import Group, GroupSettings, Rate, check_rate, layer_decay, no_decay
from pipeline._running import Running
from pipeline.errors import DuplicateNameError, SettingError
from pipeline.records import OptimizerState, Scalar, TrainState
from pipeline.tensors import Tensors

__all__ = ["Group", "Optimizer", "Rate", "layer_decay", "no_decay"]

_FUSED_ON = frozenset({"cpu", "cuda", "xpu", "mps"})
_DEFAULT = "default"


@attrs.frozen(init=False, repr=False)
class Optimizer:
    """A `torch.optim.Optimizer` class with its settings, used as a pure function; it holds no state of its own.

    `Optimizer(torch.optim.AdamW, lr=1e-3, weight_decay=0.01)`. State is kept by parameter name in
    `state.optimizer`. Gradients are multiplied by the update factor (normalisation, unscaling, clipping) on the way:
    inside the kernel where the optimizer is fused, which rounds once differently, and in place otherwise.

    Edges:  a master is written back where its parameter was updated, and nowhere else. Where a parameter is not what
            its master rounds to, somebody else has set it, and the master goes on from there.
    Args:   cls: the class, torch's own or a third party's; lr: a rate, or a schedule of the update count; groups: each
            parameter belongs to the first `Group` that matches it, the rest to the group "default"; masters: step
            float32 copies of narrower parameters; compiled: run each update but the first, which makes the state,
            through `torch.compile`, with this backend if it is a name; settings: what the class takes, each of them a
            value, or a function of the update count that gives it: `betas=lambda count: (0.9, 0.99)`. `fused=True` is
            chosen for you for Adam and AdamW where the parameters allow it and nothing is compiled; `fused=False` and
            `foreach=True` overrule.
    Raises: SettingError, when built, for a class that is no optimizer or needs a closure (LBFGS), or a setting that
            the class does not take; by `init`, for a group that no parameter belongs to, for what the class refuses,
            and for a schedule of a setting that it reads only once; when used, for a scheduled value that is not finite
            or that the class refuses, and for a step that cannot be compiled.
    """

    cls: type[torch.optim.Optimizer]
    lr: Rate
    groups: tuple[Group, ...]
    masters: bool
    compiled: bool | str
    settings: Mapping[str, Any]
    _by_group: Mapping[str, GroupSettings] = attrs.field(eq=False)

    def __init__(
        self,
        cls: type[torch.optim.Optimizer],
        lr: Rate,
        *,
        groups: Iterable[Group] = (),
        masters: bool = False,
        compiled: bool | str = False,
        **settings: Any,
    ) -> None:
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SettingError("Optimizer.cls", "a subclass of torch.optim.Optimizer", cls)
        check_rate("Optimizer.lr", lr)
        closure = inspect.signature(cls.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            cure = "It calls the loss several times an update; use an optimizer that takes the gradients as they are."
            raise SettingError("Optimizer.cls", "one whose step() needs no closure", cls.__name__, cure)
        if not isinstance(compiled, (bool, str)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SettingError("Optimizer.compiled", "True, False or the name of a backend of torch.compile", compiled)
        if compiled and settings.get("fused"):
            raise SettingError("Optimizer.fused", "left out where `compiled` is given, which fuses by itself", True)
        taken = inspect.signature(cls).parameters
        groups = tuple(groups)
        by_group = {_DEFAULT: GroupSettings.of("Optimizer", lr, settings)}
        for group in groups:
            if not isinstance(group, Group):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise SettingError("Optimizer.groups", "of `Group(...)`", group)
            if group.name in by_group:
                raise DuplicateNameError("group", group.name)
            own = {**settings, **group.settings}
            by_group[group.name] = GroupSettings.of(f"Group {group.name!r}", lr if group.lr is None else group.lr, own)
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values()):
            for name in (*settings, *(key for group in groups for key in group.settings)):
                if name not in taken or name in ("params", "lr"):
                    known = ", ".join(key for key in taken if key not in ("params", "lr"))
                    raise SettingError(
                        f"Optimizer setting {name!r}", f"one that {cls.__name__} takes", name, known + "."
                    )
        self.__attrs_init__(cls, lr, groups, masters, compiled, settings, by_group)  # pyright: ignore[reportAttributeAccessIssue]

    # -- the schedules ------------------------------------------------------------------------------------------

    def rates(self, count: int) -> dict[str, float]:
        """The learning rate of each group in update number `count`, from 0; "default" is the rest."""
        return {group: settings.rate(count) for group, settings in self._by_group.items()}

    def _scheduled(self, group: str, count: int, params: Tensors) -> dict[str, Any]:
        """What else is scheduled for a group in update number `count`, once the class has been asked about it."""
        settings = self._by_group[group]
        values = settings.scheduled(count)
        if values:
            self._torchs(settings.owner, count, values, _stand_in(params), {**settings.constant, **values})
        return values

    def _torchs(
        self, owner: str, count: int, told: Mapping[str, Any], params: list[Any], settings: Mapping[str, Any]
    ) -> torch.optim.Optimizer:
        """An object of the class; what the class has against the settings is told in an error."""
        try:
            return self.cls(params, lr=self._by_group[_DEFAULT].rate(0), **settings)  # type: ignore[call-arg]
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            reason = f"It says: {str(error) or type(error).__name__}"
            expected = f"what {self.cls.__name__} takes"
            raise SettingError(f"{owner}'s settings in update {count}", expected, dict(told), reason) from error

    # -- as a pure function -------------------------------------------------------------------------------------

    def init(self, state: TrainState) -> TrainState:
        """Check the settings against the class and the parameters; the state itself comes with the first update."""
        members = self._members(state.params)
        for group, names in zip(self.groups, members[1:], strict=True):
            if not names:
                known = ", ".join(list(state.params)[:8])
                raise SettingError(f"Group {group.name!r}", "one that some parameter matches", group.match, known + ".")
        if len(state.params):
            self.build(state.params)
            for group in self.groups:  # the class itself checks those of the default group only
                own = self._by_group[group.name]
                settings = {**own.constant, **own.scheduled(0)}
                self._torchs(own.owner, 0, settings, _stand_in(state.params), settings)
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
        moving = {group: {"lr": rate, **self._scheduled(group, count, params)} for group, rate in rates.items()}
        keep = params.is_owned
        params, grads = params.writable(count), grads.writable(count)
        mine = keep and state.is_owned
        before = state.live if isinstance(state.live, Running) else None
        live = before if mine and before is not None and before.serves(self, params) else None
        if live is not None:
            generation = live.lease.renew(state.generation, count)
        else:  # a new lineage: the state's own tensors where they are given, copies where they are lent
            given = state if mine else state.copy()
            numbers = given.numbers
            compiled = None if before is None or before.rule != self else before.compiled
            live, generation = Running(self, params, given.tensors.owned(count), numbers, compiled), 0
        live.step(params, grads, moving, factor, first=count == 0)
        return params, OptimizerState(live=live, generation=generation, is_owned=keep)

    def _members(self, params: Tensors) -> list[list[str]]:
        """Parameter names by group: the default first, then each of `groups`."""
        members: list[list[str]] = [[] for _ in range(len(self.groups) + 1)]
        for name, tensor in params.items():
            place = next((i for i, g in enumerate(self.groups, 1) if g.matches(name, tensor)), 0)
            members[place].append(name)
        return members

    def build(self, stepped: Tensors, params: Tensors | None = None) -> tuple[torch.optim.Optimizer, list[str]]:
        """The torch optimizer over the very tensors in `stepped`, as for update 0, and their names in its order.

        `params` are the parameters where others are stepped for them, float32 masters: these say who is in which group.
        """
        members = self._members(stepped if params is None else params)
        members = [[name for name in names if name in stepped] for names in members]
        rest = self._by_group[_DEFAULT]
        settings = {**rest.constant, **rest.scheduled(0)}
        taken = inspect.signature(self.cls).parameters
        # Where it helps and never fails: fused SGD refuses sparse gradients, and momentum that starts late.
        fusable = not self.compiled and issubclass(self.cls, (torch.optim.Adam, torch.optim.AdamW)) and "fused" in taken
        if fusable and not {"fused", "foreach", "differentiable", "capturable"} & settings.keys():
            dense = all(p.is_floating_point() and p.device.type in _FUSED_ON for p in stepped.flat)
            settings["fused"] = True if dense and len(stepped) else None
        groups: list[dict[str, Any]] = [{"params": [stepped[n] for n in members[0]], "name": _DEFAULT}]
        for group, names in zip(self.groups, members[1:], strict=True):
            own = {**group.settings, **self._by_group[group.name].scheduled(0)}
            groups.append({"params": [stepped[n] for n in names], "name": group.name, **own})
        for group in groups:
            group["lr"] = self._by_group[group["name"]].rate(0)
        given = [g for g in groups if g["params"]]
        optimizer = self._torchs(rest.owner, 0, {"lr": rest.rate(0), **settings}, given, settings)
        for own in self._by_group.values():
            for key in own.schedules.keys() - optimizer.defaults.keys():
                expected = f"a constant: {self.cls.__name__} reads it only once"
                raise SettingError(f"{own.owner}.{key}", expected, own.schedules[key])
        return optimizer, [name for names in members for name in names]

    def __repr__(self) -> str:
        parts = [self.cls.__name__, f"lr={self.lr!r}"]
        parts += [f"groups={list(self.groups)!r}"] if self.groups else []
        parts += ["masters=True"] if self.masters else []
        parts += [f"compiled={self.compiled!r}"] if self.compiled else []
        parts += [f"{key}={value!r}" for key, value in self.settings.items()]
        return f"Optimizer({', '.join(parts)})"


def _stand_in(params: Tensors) -> list[Tensor]:
    """A tensor for a class to be built over that is only asked about its settings."""
    return [params.flat[0].detach()]
