"""The records that flow: immutable attrs classes, all of them pytrees.

`TrainState` is all that outlives a step; `Frame` is one micro-batch on its way through the transforms.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self

import attrs
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # torch.utils.pytree is public only from torch 2.8 on

from pipeline._binding import load
from pipeline.errors import LossError, SettingError
from pipeline.tensors import Lease, Tensors, clone_leaf

__all__ = [
    "Frame",
    "LiveOptimizer",
    "Loss",
    "LossScale",
    "OptimizerState",
    "Progress",
    "Rng",
    "Scalar",
    "Skipped",
    "TrainState",
    "Window",
]

Scalar = float | Tensor
"""A number on the host, or a 0-d tensor that stays on its device."""

_EMPTY = Tensors()
_NOTHING: Mapping[str, Any] = {}
_MASK = (1 << 64) - 1


def _mix(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): neighbouring inputs give unrelated outputs."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


@attrs.frozen
class Progress:
    """How far a run is. All counts are whole numbers from the start of training, on this rank.

    `micro_steps` micro-batches processed; `updates` applied; `skipped` windows that ended without an update;
    `epoch` finished passes over the stream; `samples` and `tokens` seen; `skips_in_row` windows skipped since the last
    update.
    """

    micro_steps: int = 0
    updates: int = 0
    skipped: int = 0
    epoch: int = 0
    samples: int = 0
    tokens: int = 0
    skips_in_row: int = 0

    @property
    def windows(self) -> int:
        """Windows that ended, with an update or without."""
        return self.updates + self.skipped


@attrs.frozen
class Rng:
    """The source of all randomness in a step: what micro-step n draws depends on (seed, n, rank) alone."""

    seed: int = 0
    rank: int = 0

    def key(self, n: int, purpose: int = 0) -> int:
        """A 64-bit seed for the generators in micro-step `n`; `purpose` tells other draws at the same n apart."""
        return _mix(_mix(_mix(self.seed * 4 + purpose) + self.rank) + n)


@attrs.frozen
class LossScale:
    """The factor on the loss that keeps small float16 gradients from rounding to zero, and the rule that moves it.

    After `interval` finite windows in a row the scale grows by `growth`; after a non-finite one it is multiplied by
    `backoff`. It stays within `floor` and `ceiling`. `finite_windows` counts towards the next growth.

    Source: Micikevicius et al. 2018, arXiv:1710.03740; the constants and the rule of `torch.amp.GradScaler`.
    """

    scale: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    floor: float = 2.0**-14
    ceiling: float = 2.0**24
    finite_windows: int = 0

    def __attrs_post_init__(self) -> None:
        if not 0 < self.floor <= self.scale <= self.ceiling < float("inf"):
            raise SettingError("LossScale.scale", f"within floor {self.floor} and ceiling {self.ceiling}", self.scale)
        if not self.growth > 1:
            raise SettingError("LossScale.growth", "above 1", self.growth)
        if not 0 < self.backoff < 1:
            raise SettingError("LossScale.backoff", "between 0 and 1", self.backoff)
        if self.interval < 1:
            raise SettingError("LossScale.interval", "at least 1", self.interval)

    def after(self, finite: bool) -> LossScale:
        """The scale for the window after one whose gradients were `finite` or not."""
        if not finite:
            return attrs.evolve(self, scale=max(_float32(self.scale * self.backoff), self.floor), finite_windows=0)
        if self.finite_windows + 1 < self.interval:
            return attrs.evolve(self, finite_windows=self.finite_windows + 1)
        return attrs.evolve(self, scale=min(_float32(self.scale * self.growth), self.ceiling), finite_windows=0)


def _float32(value: float) -> float:
    """Rounded as a float32 tensor would hold it."""
    return ctypes.c_float(value).value


@attrs.frozen(eq=False)
class Loss:
    """A mean over `weight` counted items (tokens, samples), with what else was measured on the way.

    Make one with `Loss.mean` or `Loss.sum`. `measures` maps a name to (sum, weight), so that means over a window, an
    epoch or an evaluation are exact. `samples` and `tokens` count into `Progress`; `output` is kept in the frame for
    transforms that want it.
    """

    value: Tensor
    weight: Scalar = 1.0
    measures: Mapping[str, tuple[Scalar, Scalar]] = _NOTHING
    samples: int | None = None
    tokens: int = 0
    output: Any = None

    @classmethod
    def mean(
        cls,
        value: Tensor,
        weight: Scalar = 1.0,
        *,
        measures: Mapping[str, Any] | None = None,
        samples: int | None = None,
        tokens: int = 0,
        output: Any = None,
    ) -> Loss:
        """A loss that is already a mean over `weight` items; `value` 0-d.

        A measure is a mean over the same items, or a pair (sum, weight).
        With `weight` 0 on the host the micro-batch counts for nothing, whatever `value` is. A weight on the device
        cannot be branched on: where it may be 0, use `Loss.sum`, since a mean over nothing is NaN, gradient included.

        Raises: LossError for a negative or non-finite host weight.
        """
        weight = _checked(weight, value)
        pairs = {k: v if isinstance(v, tuple) else (v * weight, weight) for k, v in (measures or _NOTHING).items()}
        return cls(value, weight, pairs, samples, tokens, output)

    @classmethod
    def sum(
        cls,
        value: Tensor,
        weight: Scalar,
        *,
        measures: Mapping[str, Any] | None = None,
        samples: int | None = None,
        tokens: int = 0,
        output: Any = None,
    ) -> Loss:
        """A loss that is a sum over `weight` items; `value` 0-d. A measure is a sum likewise, or a pair (sum, weight).

        Raises: LossError for a negative or non-finite host weight.
        """
        weight = _checked(weight, value)
        over = torch.where(weight > 0, weight, 1.0) if isinstance(weight, Tensor) else (weight or 1.0)
        pairs = {k: v if isinstance(v, tuple) else (v, weight) for k, v in (measures or _NOTHING).items()}
        return cls(value / over, weight, pairs, samples, tokens, output)


def _checked(weight: Scalar, value: Tensor) -> Scalar:
    """The weight, if it can be one; on the device in the loss's precision, so that counts divide as exactly as it."""
    if isinstance(weight, Tensor):
        return weight.detach().to(torch.promote_types(value.dtype, torch.float32))
    if not 0 <= weight < float("inf"):
        raise LossError("Loss weight", "a finite number of items, 0 or more", repr(weight), "give the count of items")
    return weight


@attrs.frozen(eq=False)
class Window:
    """The micro-batches of one update so far.

    Weights count relative to `reference`, that of the window's first micro-batch that has any: a loss scale then
    sees means, and not sums over 10^5 tokens.

    `grads` sums of relative weight × loss scale × gradient, in float32 or wider, for those parameters that got one;
    `weight` sum of weights; `loss` sum of relative weight × loss, 0-d; `measures` name -> (sum, weight);
    `losses` of the micro-batches one by one, 0-d; `buffers` as they were before the window, to go back to if it is
    skipped.
    """

    grads: Tensors = _EMPTY
    weight: Scalar = 0.0
    reference: Scalar | None = None
    loss: Scalar = 0.0
    measures: Mapping[str, tuple[Scalar, Scalar]] = _NOTHING
    micro_batches: int = 0
    losses: tuple[Tensor, ...] = ()
    buffers: Tensors | None = None

    @property
    def relative_weight(self) -> Scalar:
        """The window's weight relative to its first micro-batch: what the sums are to be divided by."""
        return 0.0 if self.reference is None else self.weight / self.reference

    def relative(self, weight: Scalar) -> Scalar:
        """`weight` relative to the window's first micro-batch."""
        if self.reference is None:
            if isinstance(weight, Tensor):
                return (weight > 0).to(weight.dtype)
            return 1.0 if weight else 0.0
        return weight / self.reference


class LiveOptimizer(Protocol):
    """What a running optimizer keeps of its own, read through `OptimizerState`."""

    lease: Lease

    def tensors(self) -> dict[str, Tensor]: ...
    def numbers(self) -> dict[str, Any]: ...


@attrs.frozen(eq=False, repr=False)
class OptimizerState:
    """The state of an optimizer, by name: `tensors["0.weight/exp_avg"]`, `numbers["group default/k"]`.

    Empty before the first update. A running optimizer (`live`) is read when asked for, not copied at every update;
    the generation says whether this record is still the newest one.
    """

    _tensors: Tensors = _EMPTY
    _numbers: Mapping[str, Any] = _NOTHING
    live: LiveOptimizer | None = None
    generation: int = 0
    is_owned: bool = False

    @property
    def tensors(self) -> Tensors:
        """Moments, step counts and whatever else the optimizer keeps in tensors, as `parameter/key`."""
        if self.live is None:
            return self._tensors
        self.live.lease.check(self.generation)
        return Tensors.bound(self.live.tensors(), self.live.lease)

    @property
    def numbers(self) -> Mapping[str, Any]:
        """What the optimizer keeps in plain numbers, as `parameter/key` or `group name/key`."""
        if self.live is None:
            return self._numbers
        self.live.lease.check(self.generation)
        return self.live.numbers()

    def of(self, name: str) -> dict[str, Any]:
        """The state of one parameter: `state.optimizer.of("0.weight")["exp_avg"]`."""
        entries: dict[str, Any] = {**self.tensors, **self.numbers}
        return {key.removeprefix(f"{name}/"): value for key, value in entries.items() if key.startswith(f"{name}/")}

    def copy(self) -> OptimizerState:
        """The same values in memory of their own."""
        return OptimizerState(self.tensors.copy(), _clone(dict(self.numbers)))

    def owned(self, update: int | None = None) -> OptimizerState:
        """Take it over: this record goes stale, the returned one may be written to in place."""
        if self.live is None:
            return OptimizerState(self._tensors.owned(update), self._numbers, is_owned=True)
        lease = self.live.lease
        return attrs.evolve(self, generation=lease.renew(self.generation, update), is_owned=True)

    def borrowed(self) -> OptimizerState:
        """The same in a record that transforms do not write to."""
        if self.live is None:
            return OptimizerState(self._tensors.borrowed(), self._numbers)
        self.live.lease.check(self.generation)
        return attrs.evolve(self, is_owned=False)

    def renewed(self) -> OptimizerState:
        """The newest record of these entries, whoever wrote to them since."""
        if self.live is None:
            return OptimizerState(self._tensors.renewed(), self._numbers, is_owned=self.is_owned)
        return attrs.evolve(self, generation=self.live.lease.generation)

    def __reduce__(self) -> tuple[Any, ...]:
        return OptimizerState, (self.tensors, dict(self.numbers))

    def __repr__(self) -> str:
        if self.live is not None and self.generation != self.live.lease.generation:
            return "OptimizerState(stale)"
        return f"OptimizerState({self.tensors!r}, {len(self.numbers)} numbers)"


@attrs.frozen(eq=False, repr=False)
class TrainState:
    """All that outlives a step, and so all that a checkpoint holds.

    Make one with `init(step, model, seed=0)`. `slots` holds, by name, the durable state of transforms that users
    write: any pytree of tensors and numbers. `rate_factor` multiplies the scheduled learning rates: what a monitor such
    as `Plateau` has asked for.
    """

    params: Tensors
    buffers: Tensors = _EMPTY
    optimizer: OptimizerState = attrs.field(factory=OptimizerState)
    window: Window = attrs.field(factory=Window)
    loss_scale: LossScale | None = None
    progress: Progress = attrs.field(factory=Progress)
    rng: Rng = attrs.field(factory=Rng)
    slots: Mapping[str, Any] = _NOTHING
    rate_factor: float = 1.0

    def copy(self) -> TrainState:
        """The same values in memory of their own: nothing that happens to this state or its module reaches the copy."""
        window = attrs.evolve(
            self.window,
            grads=self.window.grads.copy(),
            buffers=None if self.window.buffers is None else self.window.buffers.copy(),
            **{k: _clone(getattr(self.window, k)) for k in ("weight", "reference", "loss", "measures", "losses")},
        )
        return attrs.evolve(
            self,
            params=self.params.copy(),
            buffers=self.buffers.copy(),
            optimizer=self.optimizer.copy(),
            window=window,
            slots=_clone(self.slots),
        )

    def load_into(self, model: nn.Module) -> TrainState:
        """Write parameters and buffers into `model`; returns this state bound to it, so that a fold trains `model`.

        Names must match, whatever their order; a state that holds both names of a tied tensor must hold one value.

        Raises: StateMismatchError naming what is missing, unexpected or of another shape; nothing is written then.
        """
        params, buffers = load(self.params, self.buffers, model, self.progress.updates)
        return attrs.evolve(self, params=params, buffers=buffers)

    def owned(self) -> TrainState:
        """Take the buffers over: this state goes stale, the returned one is updated in place (as `fold` does)."""
        at = self.progress.updates
        return self._each(lambda t: t.owned(at), lambda o: o.owned(at))

    def borrowed(self) -> TrainState:
        """The same state in a record that transforms leave untouched (as `apply` does)."""
        return self._each(Tensors.borrowed, OptimizerState.borrowed)

    def _each(
        self, tensors: Callable[[Tensors], Tensors], optimizer: Callable[[OptimizerState], OptimizerState]
    ) -> TrainState:
        return attrs.evolve(
            self,
            params=tensors(self.params),
            buffers=tensors(self.buffers),
            optimizer=optimizer(self.optimizer),
            window=attrs.evolve(self.window, grads=tensors(self.window.grads)),
            slots={k: tensors(v) if isinstance(v, Tensors) else v for k, v in self.slots.items()},
        )

    def __repr__(self) -> str:
        p = self.progress
        return f"TrainState(update {p.updates}, micro-step {p.micro_steps}, epoch {p.epoch}, params={self.params!r})"


def _clone(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, clone_leaf, tree)


@attrs.frozen
class Skipped:
    """Why a window ended without an update, and what brought it, where that is known."""

    reason: str
    micro_batch: int | None = None
    parameter: str | None = None


@attrs.frozen(eq=False, slots=False)
class Frame:
    """One micro-batch on its way through the transforms: the state, the batch, and what has been added so far.

    `began` is the progress when the pass began, `time` the clock's reading then (seconds; an input, never read here).
    From Forward: `loss` (0-d mean), `weight`, `measures`, `samples`, `tokens`, `output`.
    From ScaledBackward: `grads`, this micro-batch's gradients × relative weight × loss scale.
    From Accumulate: `ready`, the window is full, and `update_factor`, what the gradients are to be multiplied by.
    From a clip: `sum_norm`, the window's gradient sums and their global norm, so that one pass over them serves all.
    From what finds an update unwanted: `skip`, 0-d and true where it is to be skipped, and `skipped`, why.
    From MaybeStep: `applied`, whether an update was made, None when none was due; `closed`, the window that it closed;
    `rates`, group -> learning rate used; `scaled_by`, the loss scale that the window had; `skipped`, if it was.
    From any of them: `facts`, measured scalars by name, and `events`, what happened.
    """

    state: TrainState
    batch: Any = None
    time: float = 0.0
    began: Progress = attrs.field(default=attrs.Factory(lambda frame: frame.state.progress, takes_self=True))
    output: Any = None
    loss: Tensor | None = None
    weight: Scalar = 1.0
    measures: Mapping[str, tuple[Scalar, Scalar]] = _NOTHING
    samples: int = 0
    tokens: int = 0
    grads: Tensors | None = None
    ready: bool = False
    update_factor: Scalar = 1.0
    sum_norm: tuple[Tensors, Tensor] | None = None
    applied: bool | None = None
    closed: Window | None = None
    rates: Mapping[str, float] = _NOTHING
    scaled_by: float | None = None
    skip: Tensor | None = None
    skipped: Skipped | None = None
    facts: Mapping[str, Scalar] = _NOTHING
    events: tuple[Any, ...] = ()

    @classmethod
    def begin(cls, state: TrainState, batch: Any = None, time: float = 0.0) -> Frame:
        """`Frame(state, batch, time)`, at a third of its cost."""
        new = object.__new__(cls)
        fields = {**_FRAME_DEFAULTS, "state": state, "batch": batch, "time": time, "began": state.progress}
        object.__setattr__(new, "__dict__", fields)
        return new

    def having(self, **changes: Any) -> Self:
        """The same frame with other values in some fields: `attrs.evolve`, at a third of its cost.

        Raises: TypeError for a field that a Frame does not have.
        """
        fields = self.__dict__ | changes
        if len(fields) != len(_FRAME_FIELDS):
            unknown = ", ".join(sorted(fields.keys() - _FRAME_FIELDS))
            raise TypeError(f"a Frame has no field {unknown}; durable state of your own belongs in state.slots")
        new = object.__new__(type(self))
        object.__setattr__(new, "__dict__", fields)
        return new

    def __repr__(self) -> str:
        shown = [f"micro-step {self.began.micro_steps}"]
        shown += [f"{k}={v!r}" for k in ("loss", "weight", "grads") if (v := getattr(self, k)) is not None]
        shown += [k for k in ("ready", "applied") if getattr(self, k)]
        shown += [f"{len(self.events)} events"] if self.events else []
        return f"Frame({', '.join(shown)})"


_FRAME_FIELDS = frozenset(field.name for field in attrs.fields(Frame))
_FRAME_DEFAULTS = {field.name: field.default for field in attrs.fields(Frame)}


def _register(cls: type[Any]) -> None:
    names = [field.name.lstrip("_") for field in attrs.fields(cls)]

    def flatten(record: Any) -> tuple[list[Any], None]:
        return [getattr(record, name) for name in names], None

    def unflatten(children: Any, _: None) -> Any:
        return cls(*children)

    pytree.register_pytree_node(cls, flatten, unflatten, serialized_type_name=f"pipeline.{cls.__name__}")


def _register_all() -> None:
    for cls in (Progress, LossScale, Loss, Window, TrainState, Frame):
        _register(cls)
    pytree.register_pytree_node(Rng, lambda r: ([], (r.seed, r.rank)), lambda _, context: Rng(*context))
    pytree.register_pytree_node(
        Tensors,
        lambda t: (list(t.flat), tuple(t)),
        lambda values, names: Tensors.over(names, values),
    )
    pytree.register_pytree_node(
        OptimizerState,
        lambda o: ([o.tensors, dict(o.numbers)], None),
        lambda children, _: OptimizerState(*children),
    )


_register_all()
