"""`Forward`: the batch through the model to a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pipeline._binding import tied_names
from pipeline._patterns import as_patterns
from pipeline.errors import DeviceError, LossError, SettingError, StateMismatchError
from pipeline.records import Frame, Loss, TrainState
from pipeline.tensors import Tensors
from pipeline.transforms._batches import samples_in, tensors_in
from pipeline.transforms._recompute import chosen, recomputed

__all__ = ["Forward"]

LossFunction = Callable[[Any, Any], Any]


class _LossOfModel(nn.Module):
    """`loss(model, batch)` as a module, so that `functional_call` can put other parameters under the whole of it."""

    def __init__(self, model: nn.Module, loss: LossFunction) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch: Any) -> Any:
        return self.loss(self.model, batch)


def _buffer_places(model: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Where each of `model.named_buffers()` hangs: a module may put another tensor there in its forward."""
    places: list[tuple[dict[str, Any], str]] = []
    for name, _ in model.named_buffers():
        owner, _, key = name.rpartition(".")
        places.append((model.get_submodule(owner)._buffers, key))  # pyright: ignore[reportPrivateUsage]
    return places


@attrs.frozen(repr=False)
class Forward:
    """Run the loss function on the batch with the state's parameters.

    Reads:    `params`, `buffers`, `batch`.
    Writes:   `loss`, 0-d mean; `weight`, the count of items in it; `measures`, name -> (sum, weight); `samples`,
              `tokens`, counts; `output`, if the loss function gave one; `buffers`, as the forward leaves them
              (BatchNorm statistics); `window.buffers`, as they were before the window.
    Edges:    `samples`, where the loss gives none, is the first dimension of the first tensor in the batch that
              has one. The module's mode (train, eval) is the caller's and is left alone. BatchNorm statistics are
              those of the micro-batches. What a module keeps in plain Python attributes is no state: copies share it.
              Hooks on the module run either way, hooks on a parameter only while the parameter itself is trained, and
              not on its copies.
    Args:     model: the module; loss: `loss(model, batch)` that returns a 0-d mean, `Loss.mean(…)` or `Loss.sum(…)`.
              While it runs, `model` holds the frame's parameters, whether they are its own or not. `batch` may be any
              container. autocast: `torch.bfloat16` or `torch.float16`, in which the forward then runs as under
              `torch.autocast`; parameters keep their dtype. recompute: patterns on the names of submodules ("blocks.*")
              whose activations are computed again in the backward pass instead of kept; the same numbers, less memory.
    Raises:   SettingError, when built; LossError for another shape; DeviceError; StateMismatchError for the state of
              another model.
    """

    model: nn.Module
    loss: LossFunction
    autocast: torch.dtype | None = None
    recompute: tuple[str, ...] = attrs.field(
        default=(), converter=partial(as_patterns, "Forward.recompute", of="module")
    )
    _whole: _LossOfModel = attrs.field(init=False, eq=False)
    _buffers: list[tuple[dict[str, Any], str]] = attrs.field(init=False, eq=False)
    _recomputed: list[nn.Module] = attrs.field(init=False, eq=False)
    _special: bool = attrs.field(init=False, eq=False)

    reads = frozenset({"params", "buffers", "batch"})
    writes = frozenset({"loss", "weight", "measures", "samples", "tokens", "output", "buffers"})

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SettingError("Forward.model", "a torch.nn.Module", self.model)
        if not callable(self.loss):
            raise SettingError("Forward.loss", "a function loss(model, batch)", self.loss)
        if self.autocast not in (None, torch.bfloat16, torch.float16):
            raise SettingError("Forward.autocast", "torch.bfloat16, torch.float16 or None", self.autocast)
        object.__setattr__(self, "_recomputed", chosen(self.model, self.recompute))
        object.__setattr__(self, "_whole", _LossOfModel(self.model, self.loss))
        object.__setattr__(self, "_buffers", _buffer_places(self.model))
        object.__setattr__(self, "_special", bool(self._buffers or self._recomputed))

    def init(self, state: TrainState) -> TrainState:
        """Check that the model is still the one that this was built for, and has its parameters.

        Raises: SettingError, with the cure.
        """
        if any(is_lazy(t) for t in (*state.params.flat, *state.buffers.flat)):
            cure = "Run one batch through it before `init`."
            raise SettingError("Forward.model", "initialised (it has lazy modules)", type(self.model).__name__, cure)
        now = _buffer_places(self.model)
        if len(now) != len(self._buffers) or any(a[0] is not b[0] for a, b in zip(now, self._buffers, strict=True)):
            cure = "Build Forward after the last change to the model's modules."
            raise SettingError("Forward.model", "as it was when Forward was built", type(self.model).__name__, cure)
        return state

    def __call__(self, frame: Frame) -> Frame:
        state = frame.state
        if self._buffers and state.window.buffers is None:
            before = state.buffers.copy() if state.buffers.is_owned else state.buffers
            state = attrs.evolve(state, window=attrs.evolve(state.window, buffers=before))
        try:
            if self.autocast is None:
                result, buffers = self._run(frame)
            else:
                with torch.autocast(state.params.flat[0].device.type, self.autocast):
                    result, buffers = self._run(frame)
            loss = result if isinstance(result, Loss) else self._plain(result)
            self._check(loss.value, state.params.flat, frame)
        except RuntimeError as error:
            self._diagnose(frame, error)
            raise
        if buffers is not state.buffers:
            state = attrs.evolve(state, buffers=buffers)
        return frame.having(
            state=state,
            loss=loss.value,
            weight=loss.weight,
            measures=loss.measures,
            samples=samples_in(frame.batch) if loss.samples is None else loss.samples,
            tokens=loss.tokens,
            output=loss.output,
        )

    def _run(self, frame: Frame) -> tuple[Any, Tensors]:
        """What the loss function gave, and the buffers after it."""
        params = frame.state.params
        if not self._special and params.is_owned and params.lease.holds(self.model):  # most models, most of the time
            return self.loss(self.model, frame.batch), frame.state.buffers
        if not self._is_bound(frame):
            return self._functional(frame)
        if not self._recomputed:
            return self._direct(frame)
        with recomputed(self._recomputed):
            return self._direct(frame)

    def _direct(self, frame: Frame) -> tuple[Any, Tensors]:
        """The module itself, which holds the state's very tensors."""
        buffers = frame.state.buffers
        if not self._buffers:
            return self.loss(self.model, frame.batch), buffers
        if buffers.is_owned:
            buffers = buffers.owned(frame.began.updates)
        result = self.loss(self.model, frame.batch)
        now = tuple(owner[key] for owner, key in self._buffers)
        if any(a is not b for a, b in zip(now, buffers.flat, strict=True)):
            buffers = buffers.rebound(now)
        return result, buffers

    def _functional(self, frame: Frame) -> tuple[Any, Tensors]:
        """The module with the state's tensors put under it for the length of the call.

        Nothing is recomputed here: by the time of the backward pass the module has its own tensors back.
        """
        state = frame.state
        self._check_names(state.params, state.buffers)
        buffers = state.buffers.writable(frame.began.updates) if self._buffers else state.buffers
        under = {f"model.{name}": t for name, t in (*state.params.items(), *buffers.items())}
        result = torch.func.functional_call(self._whole, under, (frame.batch,))
        if self._buffers:
            now = tuple(under[f"model.{name}"] for name in buffers)
            if any(a is not b for a, b in zip(now, buffers.flat, strict=True)):
                buffers = buffers.replace(now)
        return result, buffers

    def _is_bound(self, frame: Frame) -> bool:
        """Whether the module itself may be called: it holds these very tensors, and may write to its buffers."""
        params, buffers = frame.state.params, frame.state.buffers
        if not params.lease.holds(self.model) or (buffers and not buffers.lease.holds(self.model)):
            return False
        if params.is_owned and (buffers.is_owned or not buffers):
            return True
        return not self._buffers or not any(m.training for m in self.model.modules())

    def __repr__(self) -> str:
        parts = [
            f"model={type(self.model).__name__}",
            f"loss={getattr(self.loss, '__qualname__', None) or self.loss!r}",
        ]
        parts += [] if self.autocast is None else [f"autocast={self.autocast}"]
        parts += [f"recompute={self.recompute!r}"] if self.recompute else []
        return f"Forward({', '.join(parts)})"

    def _plain(self, value: object) -> Loss:
        if not isinstance(value, Tensor):
            raise LossError(
                "The loss", "a 0-d tensor, Loss.mean(…) or Loss.sum(…)", repr(value), "return one of these from loss()"
            )
        return Loss(value)

    def _check(self, value: Tensor, params: Sequence[Tensor], frame: Frame) -> None:
        if value.ndim:
            got = f"a tensor of shape {tuple(value.shape)}"
            raise LossError(
                "The loss", "0-d", got, "reduce it with `.mean()`, or `Loss.sum(x.sum(), weight=x.numel())`"
            )
        if params and value.device != params[0].device:
            self._diagnose(frame, None)

    def _check_names(self, params: Tensors, buffers: Tensors) -> None:
        own = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        given = {**params, **buffers}
        if given.keys() == own.keys() and all(given[n].shape == own[n].shape for n in own):
            return
        tied = tied_names(self.model)
        raise StateMismatchError(
            type(self.model).__name__,
            missing=[n for n in own if n not in given],
            unexpected=[n for n in given if n not in own and n not in tied],
            differing=[
                *(n for n in own if n in given and given[n].shape != own[n].shape),
                *(f"{n} (tied to {tied[n]} there: one entry, under that name)" for n in given if n in tied),
            ],
        )

    def _diagnose(self, frame: Frame, error: RuntimeError | None) -> None:
        """Say so plainly when a failure comes of a batch on another device; looked for on failure alone."""
        params = frame.state.params.flat
        if not params or isinstance(error, DeviceError):
            return
        found = {str(t.device) for t in tensors_in(frame.batch) if t.device != params[0].device}
        if found:
            raise DeviceError(sorted(found), str(params[0].device)) from error
