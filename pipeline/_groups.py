"""Parameter groups: which parameters belong together, and all that holds for them."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor

from pipeline._checks import share
from pipeline.errors import SettingError

Rate = float | Callable[[int], float]
"""A learning rate, or a schedule: a function of the update count, from 0."""


def check_rate(setting: str, lr: object) -> None:
    """Raise SettingError unless `lr` is a rate or a schedule of one."""
    if callable(lr):
        return
    if not isinstance(lr, (int, float)) or not 0 <= lr < math.inf:
        raise SettingError(setting, "a number, 0 or more and finite, or a schedule", lr)


@attrs.frozen(init=False)
class Group:
    """Parameters with settings of their own: `Group("*.bias", weight_decay=0.0)`.

    Args: match: a pattern on the parameter's name as in `fnmatch`, or `f(name, tensor) -> bool`, asked of copies of the
          parameter too: go by its name, shape or dtype, never by which tensor it is; lr: a rate or schedule in place of
          the optimizer's; name: what events call the group, the pattern by default; settings: as the optimizer's.
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
            check_rate("Group.lr", lr)
        label = name or (match if isinstance(match, str) else getattr(match, "__name__", "group"))
        self.__attrs_init__(match, label, lr, settings)  # pyright: ignore[reportAttributeAccessIssue]

    def matches(self, name: str, tensor: Tensor) -> bool:
        """Whether the parameter belongs to this group."""
        return fnmatch.fnmatchcase(name, self.match) if isinstance(self.match, str) else self.match(name, tensor)


@attrs.frozen
class GroupSettings:
    """All that holds for one group, the optimizer's settings and its own, with the schedules apart."""

    owner: str
    lr: Rate
    constant: Mapping[str, Any]
    schedules: Mapping[str, Callable[[int], Any]]

    @classmethod
    def of(cls, owner: str, lr: Rate, settings: Mapping[str, Any]) -> GroupSettings:
        schedules = {key: value for key, value in settings.items() if callable(value) and not isinstance(value, type)}
        return cls(owner, lr, {k: v for k, v in settings.items() if k not in schedules}, schedules)

    def rate(self, count: int) -> float:
        """The learning rate in update number `count`, from 0."""
        if not callable(self.lr):
            return self.lr
        rate = self.lr(count)
        if not hasattr(rate, "__float__") or not 0 <= rate < math.inf:
            raise SettingError(f"{self.owner}.lr in update {count}", "a number, 0 or more and finite", rate)
        return rate

    def scheduled(self, count: int) -> dict[str, Any]:
        """What the other schedules give for update number `count`, from 0."""
        if not self.schedules:
            return {}
        given = {key: schedule(count) for key, schedule in self.schedules.items()}
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
        for key, value in values.items():
            numbers = value if isinstance(value, tuple) else (value,)
            if not all(math.isfinite(n) for n in numbers if hasattr(n, "__float__")):
                raise SettingError(f"{self.owner}.{key} in update {count}", "finite", value)
        return values


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
        return (self.lr(count) if callable(self.lr) else self.lr) * self.factor


def layer_decay(layers: Sequence[str], lr: Rate, decay: float, **settings: Any) -> list[Group]:
    """Groups whose rate falls by `decay` with each layer away from the output.

    Args: layers: patterns on names, from the input to the output: `["embed.*", "blocks.0.*", "blocks.1.*", "head.*"]`;
          the last has the rate `lr` itself.
    Raises: SettingError unless 0 < decay <= 1.
    Source: Howard, Ruder 2018, arXiv:1801.06146, discriminative fine-tuning.
    """
    share("layer_decay(decay)", decay, up_to_one=True)
    last = len(layers) - 1
    return [Group(name, lr=_Scaled(lr, decay ** (last - i)), **settings) for i, name in enumerate(layers)]
