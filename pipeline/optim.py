"""`Optimizer`: any `torch.optim.Optimizer` class as a pure function of parameters, gradients, state and rate."""

from __future__ import annotations

import fnmatch
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,  # pyright: ignore[reportPrivateUsage]
    _global_optimizer_pre_hooks,  # pyright: ignore[reportPrivateUsage]
)

from pipeline.errors import DuplicateNameError, OptimizerMismatchError, SettingError
from pipeline.records import OptimizerState, Scalar, TrainState
from pipeline.tensors import Lease, Tensors

__all__ = ["Group", "Optimizer", "Rate", "layer_decay", "no_decay"]

Rate = float | Callable[[int], float]
"""A learning rate, or a schedule: a function of the update count, from 0."""

_FUSED_ON = frozenset({"cpu", "cuda", "xpu", "mps"})
_DEFAULT = "default"
_MASTER = "master"


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
        live = state.live if mine and isinstance(state.live, _Running) and state.live.serves(self, params) else None
        if live is not None:
            generation = live.lease.renew(state.generation, count)
        else:  # a new lineage: the state's own tensors where they are given, copies where they are lent
            given = state if mine else state.copy()
            numbers = given.numbers
            live, generation = _Running(self, params, given.tensors.owned(count), numbers), 0
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


_TORCHS_WRAPPER = "Optimizer.profile_hook_step.<locals>.wrapper"


def _bare_step(optimizer: torch.optim.Optimizer) -> Callable[[], object] | None:
    """`optimizer.step` without the profiler's range around it, which costs as much as a small step itself.

    None where there is more around it than that: hooks of the class, or a `step` that wraps another.
    """
    step = type(optimizer).step
    hooks: Any = optimizer
    wrapped = getattr(getattr(step, "__code__", None), "co_qualname", "") == _TORCHS_WRAPPER
    if not wrapped or hooks._optimizer_step_pre_hooks or hooks._optimizer_step_post_hooks:
        return None
    return functools.partial(step.__wrapped__, optimizer)  # type: ignore[attr-defined]


def _global_hooks() -> bool:
    """Whether anyone registered hooks on the steps of all optimizers."""
    return bool(_global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def _masters(params: Tensors, kept: Tensors) -> dict[str, Tensor]:
    """A float32 leaf for each narrower parameter: the one in the state, or the parameter as it is now."""
    masters: dict[str, Tensor] = {}
    for name, param in params.items():
        if param.is_floating_point() and torch.finfo(param.dtype).bits < 32:
            master = kept[f"{name}/{_MASTER}"] if f"{name}/{_MASTER}" in kept else param.detach().float()
            masters[name] = master.requires_grad_(param.requires_grad)
    return masters


class _Running:
    """A torch optimizer over the parameters of one lineage of states; the newest of them alone may step it."""

    def __init__(self, rule: Optimizer, params: Tensors, tensors: Tensors, numbers: Mapping[str, Any]) -> None:
        self.lease = Lease()
        self.rule = rule
        self.params = params.flat
        self.masters = _masters(params, tensors) if rule.masters else {}
        self.stepped = Tensors.over(params, [self.masters.get(name, p) for name, p in params.items()])
        self.optimizer, self.names = rule.build(self.stepped)
        self._order: list[Tensor] = [self.stepped[name] for name in self.names]
        self._can_scale = bool(getattr(self.optimizer, "_step_supports_amp_scaling", False)) and all(
            group.get("fused") for group in self.optimizer.param_groups
        )
        # The kernel takes the factor in float32: too coarse for float64 parameters.
        self._can_scale = self._can_scale and all(p.dtype is not torch.float64 for p in self.params)
        self._bare = _bare_step(self.optimizer)
        self._built = [dict(group) for group in self.optimizer.param_groups]
        self._foreign = bool(tensors)  # entries that another run of some optimizer made
        self._put({**tensors, **numbers})

    def serves(self, rule: Optimizer, params: Tensors) -> bool:
        """Whether this optimizer steps these very tensors by this rule."""
        if self.rule is not rule and self.rule != rule:
            return False
        return len(params) == len(self.params) and all(a is b for a, b in zip(params.flat, self.params, strict=True))

    def _put(self, entries: Mapping[str, Any]) -> None:
        by_name = dict(zip(self.names, self._order, strict=True))
        groups = {f"group {g['name']}": g for g in self.optimizer.param_groups}
        for key, value in entries.items():
            owner, _, entry = key.rpartition("/")
            if entry == _MASTER:
                continue
            if owner in by_name:
                self.optimizer.state[by_name[owner]][entry] = value
            elif owner in groups:
                groups[owner][entry] = value

    def step(self, params: Tensors, grads: Tensors, rates: Mapping[str, float], factor: Scalar) -> None:
        """One update of the very tensors in `params`, from gradients that may be written to."""
        for group in self.optimizer.param_groups:
            group["lr"] = rates[group["name"]]
        index, flat = grads.index, grads.flat
        narrow: list[tuple[Tensor, Tensor]] = []
        for name, param in zip(self.stepped.index, self.stepped.flat, strict=True):
            place = index.get(name)
            param.grad = None
            if place is not None and flat[place].dtype == param.dtype:
                param.grad = flat[place]
            elif place is not None:
                narrow.append((param, flat[place]))
        self._scale(flat, factor, bool(narrow))
        for param, grad in narrow:  # sums are wider than the parameter: normalised first, rounded once
            param.grad = grad.to(param.dtype)
        step = self.optimizer.step if self._bare is None or _global_hooks() else self._bare
        try:
            step()
        except KeyError as error:
            if not self._foreign:
                raise
            raise OptimizerMismatchError(self.rule.cls.__name__, str(error.args[0])) from error
        self._foreign = False
        for param in self.stepped.flat:
            param.grad = None
        if self.masters:
            self._round_back(params)

    def _round_back(self, params: Tensors) -> None:
        """The parameters from their masters."""
        with torch.no_grad():
            for name, master in self.masters.items():
                params[name].copy_(master)
                params[name].grad = None

    def _scale(self, grads: Sequence[Tensor], factor: Scalar, now: bool) -> None:
        """Multiply the gradients by `factor`: inside the optimizer's kernel where it can, else in place."""
        exact = isinstance(factor, float) and factor == 1.0
        if self._can_scale:
            inside: Any = self.optimizer
            rides = not exact and not now
            device = grads[0].device
            scale = factor.reciprocal() if isinstance(factor, Tensor) else 1.0 / factor if rides else 1.0
            inside.grad_scale = torch.as_tensor(scale, dtype=torch.float32, device=device) if rides else None
            if rides or exact:
                return
        if not exact:
            torch._foreach_mul_(list(grads), factor)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage, reportArgumentType]

    def _entries(self) -> Iterable[tuple[str, Any]]:
        for name, param in zip(self.names, self._order, strict=True):
            for key, value in self.optimizer.state.get(param, {}).items():
                yield f"{name}/{key}", value
        for name, master in self.masters.items():
            yield f"{name}/{_MASTER}", master

    def tensors(self) -> dict[str, Tensor]:
        """The optimizer's state that is tensors, by `parameter/key`, and the groups' by `group name/key`."""
        groups = ((f"group {g['name']}/{k}", v) for g in self.optimizer.param_groups for k, v in g.items())
        return {k: v for k, v in (*self._entries(), *groups) if isinstance(v, Tensor)}

    def numbers(self) -> dict[str, Any]:
        """The rest of the optimizer's state, and the counters that some optimizers keep in their groups."""
        kept = {key: value for key, value in self._entries() if value is not None and not isinstance(value, Tensor)}
        for group, built in zip(self.optimizer.param_groups, self._built, strict=True):
            for key, value in group.items():
                moved = key not in ("params", "lr", "name") and (key not in built or value != built[key])
                if moved and isinstance(value, (int, float, bool)):
                    kept[f"group {group['name']}/{key}"] = value
        return kept
