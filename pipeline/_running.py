"""A torch optimizer at work on the parameters of one lineage of states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,  # pyright: ignore[reportPrivateUsage]
    _global_optimizer_pre_hooks,  # pyright: ignore[reportPrivateUsage]
)
from torch.utils import _pytree as pytree

from pipeline._compiled_step import CompiledStep, Step
from pipeline._fused_adam import FusedAdam
from pipeline._twins import missing_entry
from pipeline.errors import OptimizerMismatchError, SettingError
from pipeline.records import Scalar
from pipeline.tensors import Lease, Tensors

_MASTER = "master"
_COUNT = "step"

_grad = attrgetter("grad")

Moving = Mapping[str, Mapping[str, Any]]
"""By group, the entries that are set anew for each update."""


class Rule(Protocol):
    """What `Running` asks of the settings that it runs by."""

    @property
    def cls(self) -> type[torch.optim.Optimizer]: ...

    @property
    def masters(self) -> bool: ...

    @property
    def compiled(self) -> bool | str: ...

    def build(self, stepped: Tensors, params: Tensors) -> tuple[torch.optim.Optimizer, list[str]]:
        """The torch optimizer over the very tensors in `stepped`, in the groups of `params`, and the names in order."""
        ...


_TORCHS_WRAPPER = "Optimizer.profile_hook_step.<locals>.wrapper"
_TORCHS_GRAD_MODE = "_use_grad_for_differentiable.<locals>._use_grad"


def _bare_step(optimizer: torch.optim.Optimizer) -> Step | None:
    """Its `step` without the profiler's range and the tracer's marks, which cost as much as a small step itself.

    None where there is more around it than that: hooks of the class, or a `step` that wraps another.
    """
    step = type(optimizer).step
    hooks: Any = optimizer
    wrapped = getattr(getattr(step, "__code__", None), "co_qualname", "") == _TORCHS_WRAPPER
    if not wrapped or hooks._optimizer_step_pre_hooks or hooks._optimizer_step_post_hooks:
        return None
    inner: Any = step.__wrapped__  # type: ignore[attr-defined]
    if inner.__code__.co_qualname == _TORCHS_GRAD_MODE and not optimizer.defaults.get("differentiable"):
        inner = torch.no_grad()(inner.__wrapped__)
    return inner


def _global_hooks() -> bool:
    """Whether anyone registered hooks on the steps of all optimizers."""
    return bool(_global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def _masters(params: Tensors, kept: Tensors) -> dict[str, Tensor]:
    """A float32 leaf for each narrower parameter: the one in the state, or the parameter as it is now."""
    masters: dict[str, Tensor] = {}
    for name, param in params.items():
        if param.is_floating_point() and torch.finfo(param.dtype).bits < 32:
            key = f"{name}/{_MASTER}"
            master = kept[key].to(param.device) if key in kept else param.detach().float()
            masters[name] = master.requires_grad_(param.requires_grad)
    return masters


def _by_owner(entries: Iterable[str]) -> dict[str, set[str]]:
    """The keys of each parameter's entries, without the master, which is not the optimizer's."""
    found: dict[str, set[str]] = {}
    for name in entries:
        owner, _, key = name.rpartition("/")
        if key != _MASTER:
            found.setdefault(owner, set()).add(key)
    return found


def _placed(entry: str, value: Any, param: Tensor, group: Mapping[str, Any]) -> Any:
    """An entry of a parameter's state on the parameter's device; by torch's rule a step count only if need be."""
    if entry == _COUNT and not (group.get("fused") or group.get("capturable")):
        return value
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(param.device), value)


class Running:
    """A torch optimizer over the parameters of one lineage of states; the newest of them alone may step it."""

    def __init__(
        self,
        rule: Rule,
        params: Tensors,
        tensors: Tensors,
        numbers: Mapping[str, Any],
        compiled: CompiledStep | None = None,
    ) -> None:
        self.lease = Lease()
        self.rule = rule
        self.params = params.flat
        self.masters = _masters(params, tensors) if rule.masters else {}
        self.stepped = Tensors.over(params, [self.masters.get(name, p) for name, p in params.items()])
        self.optimizer, self.names = rule.build(self.stepped, params)
        self._order: list[Tensor] = [self.stepped[name] for name in self.names]
        self._can_scale = bool(getattr(self.optimizer, "_step_supports_amp_scaling", False)) and all(
            group.get("fused") for group in self.optimizer.param_groups
        )
        # The kernel takes the factor in float32: too coarse for float64 parameters.
        self._can_scale = self._can_scale and all(p.dtype is not torch.float64 for p in self.params)
        self._moving: Moving = {}
        self._bare = _bare_step(self.optimizer)
        self.compiled = (compiled or self._compile(rule.compiled)) if rule.compiled else None
        self._is_new = True
        self._fused: FusedAdam | None = None
        self._built = [dict(group) for group in self.optimizer.param_groups]
        self._foreign = _by_owner([*tensors, *numbers])  # what another run of some optimizer kept
        self._put({**tensors, **numbers})

    def serves(self, rule: Rule, params: Tensors) -> bool:
        """Whether this optimizer steps these very tensors by this rule."""
        if self.rule is not rule and self.rule != rule:
            return False
        return len(params) == len(self.params) and all(map(is_, params.flat, self.params))

    def _compile(self, backend: bool | str) -> CompiledStep:
        if self._bare is None:
            expected = f"left out: there are hooks on the step of {self.rule.cls.__name__}, or it wraps another"
            raise SettingError("Optimizer.compiled", expected, backend)
        return CompiledStep(self.rule.cls, self._bare, backend if isinstance(backend, str) else "inductor")

    def _put(self, entries: Mapping[str, Any]) -> None:
        by_name = dict(zip(self.names, self._order, strict=True))
        groups = {f"group {g['name']}": g for g in self.optimizer.param_groups}
        group_of = {id(param): group for group in self.optimizer.param_groups for param in group["params"]}
        for key, value in entries.items():
            owner, _, entry = key.rpartition("/")
            if entry == _MASTER:
                continue
            if owner in by_name:
                param = by_name[owner]
                self.optimizer.state[param][entry] = _placed(entry, value, param, group_of[id(param)])
            elif owner in groups:
                groups[owner][entry] = value

    def step(self, params: Tensors, grads: Tensors, moving: Moving, factor: Scalar, first: bool) -> None:
        """One update of the very tensors in `params`, from gradients that may be written to.

        `moving` is by group what is set anew for each update: the rate, and what else is scheduled. The `first` one,
        which makes the optimizer's state, is never compiled.
        """
        self._moving = moving
        for group in self.optimizer.param_groups:
            group.update(moving[group["name"]])
        index, flat = grads.index, grads.flat
        # As a rule autograd has added them up in their place: looking costs a fifth of putting them there.
        there = index is params.index and not self.masters and all(map(is_, map(_grad, self.params), flat))
        narrow = [] if there else self._put_gradients(index, flat)
        mastered = [name for name in self.masters if name in index]
        for name in mastered:
            self._follow(name, params[name])
        self._scale(flat, factor, bool(narrow))
        for param, grad in narrow:  # sums are wider than the parameter: normalised first, rounded once
            param.grad = grad.to(param.dtype)
        if self._foreign:
            self._check_entries()
            self._foreign = {}
        self._step(first)
        for param in self.stepped.flat:
            param.grad = None
        for name in mastered:
            self._round_back(name, params[name])

    def _check_entries(self) -> None:
        """Raise OptimizerMismatchError, before anything is changed, where another class made the entries."""

        def step(twins: torch.optim.Optimizer) -> None:
            bare = _bare_step(twins)
            if bare is None:
                twins.step()
            else:
                bare(twins)

        params = Tensors.over(self.stepped.index, self.params)
        missing = missing_entry(self._foreign, self.stepped, lambda twins: self.rule.build(twins, params), step)
        if missing is not None:
            raise OptimizerMismatchError(self.rule.cls.__name__, missing)

    def _put_gradients(self, index: Mapping[str, int], flat: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Each parameter's gradient in its `.grad`, or none; those of another precision are returned instead."""
        narrow: list[tuple[Tensor, Tensor]] = []
        for name, param in zip(self.stepped.index, self.stepped.flat, strict=True):
            place = index.get(name)
            param.grad = None
            if place is not None and flat[place].dtype == param.dtype:
                param.grad = flat[place]
            elif place is not None:
                narrow.append((param, flat[place]))
        return narrow

    def _step(self, first: bool) -> None:
        hooked = _global_hooks()
        if self.compiled is not None and not first:
            if hooked:
                raise SettingError("Optimizer.compiled", "left out: there are hooks on all optimizers", True)
            self.compiled(self.optimizer, self._moving)
        elif self._bare is None or hooked:
            self.optimizer.step()
        elif self._fused is None or not self._fused.step(getattr(self.optimizer, "grad_scale", None)):
            self._bare(self.optimizer)
            if self._is_new:  # now there is a state to make lists of
                self._is_new, self._fused = False, FusedAdam.of(self.optimizer)

    def _follow(self, name: str, param: Tensor) -> None:
        """Let the master follow where the parameter is not what it rounds to: there somebody else has set it."""
        with torch.no_grad():
            master = self.masters[name]
            master.copy_(torch.where(master.to(param.dtype) == param, master, param))

    def _round_back(self, name: str, param: Tensor) -> None:
        """The parameter from its master."""
        with torch.no_grad():
            param.copy_(self.masters[name])
        param.grad = None

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
                own = key in ("params", "name") or key in self._moving[group["name"]]
                moved = not own and (key not in built or value != built[key])
                if moved and isinstance(value, (int, float, bool)):
                    kept[f"group {group['name']}/{key}"] = value
        return kept
