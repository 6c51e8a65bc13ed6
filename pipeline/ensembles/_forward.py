"""The forward of all members at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import attrs
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipeline import _randomness as randomness
from pipeline.ensembles._draws import MemberDraws, draws
from pipeline.ensembles._members import LOSS, SCALES, SPOILT, Member, members_of, name_of_member
from pipeline.ensembles._spoilt import with_spoilt
from pipeline.errors import LossError, MissingFieldError, SettingError
from pipeline.records import Frame, Part, Rng, TrainState, Window
from pipeline.tensors import Tensors
from pipeline.transforms import Forward
from pipeline.transforms._gradients import counts_for_nothing

__all__ = ["Batches", "ForwardMembers", "Initialiser"]

Batches = Literal["shared", "own"]
Initialiser = Callable[[nn.Module, int], object]
"""`f(model, seed)`, which sets the parameters that a member begins with."""

_HELD = Window(buffers=Tensors())
"""A window that has buffers put by already: those of all members are put by together."""


@attrs.frozen(repr=False)
class ForwardMembers:
    """`Forward` over every member's row of the parameters and buffers, in one pass through `torch.func.vmap`.

    Reads:  `params`, `buffers`, `batch`; `slots`, for who the members are and for their loss scales.
    Writes: as Forward; `loss` is the sum over members, each times its loss scale; the measure "member loss" has each
            member's own, and measures have a row for each; `slots`: whose loss is not finite.
    Edges:  members share the weight of a micro-batch. Each draws random numbers as the run with its seed would: on the
            CPU to the bit.
    Args:   inner: what runs; members: what each has of its own; initialiser: sets what one with a seed begins with;
            batches: "shared", or "own" where each tensor of a batch has a row for each member; draws: whether random
            numbers are drawn; None: where the model's modules do.
    Raises: SettingError for a random operator where none was expected, and where one is to be compiled; LossError for a
            weight that hangs on the member; MissingFieldError for the state of one model; what `vmap` raises for code
            that branches on the value of a tensor.
    """

    inner: Forward
    members: tuple[Member, ...]
    initialiser: Initialiser
    batches: Batches
    draws: bool | None

    name = "Forward"
    reads = Forward.reads | {"slots"}
    writes = Forward.writes | {"slots"}

    def init(self, state: TrainState) -> TrainState:
        """The state of all members before the first batch, bound to no module."""
        state = self.inner.init(state)
        begun = [self._begun(state, member) for member in self.members]
        part = Part(loss_scale=state.loss_scale)
        slots: dict[str, Any] = {name_of_member(number): part for number in range(len(self.members))}
        slots[SPOILT] = torch.full((len(begun),), -1, device=state.params.flat[0].device)
        if state.loss_scale is not None:
            slots[SCALES] = torch.full((len(begun),), state.loss_scale.scale, device=state.params.flat[0].device)
        return attrs.evolve(
            state,
            params=_stacked([params for params, _ in begun]),
            buffers=_stacked([buffers for _, buffers in begun]),
            loss_scale=None,
            slots={**state.slots, **slots},
        )

    def _begun(self, state: TrainState, member: Member) -> tuple[Tensors, Tensors]:
        """The parameters and buffers that a member begins with."""
        if member.seed is None:
            return state.params, state.buffers
        model = copy.deepcopy(self.inner.model)
        self.initialiser(model, state.rng.seed + member.seed)
        return Tensors(model.named_parameters()), Tensors(model.named_buffers())

    def __call__(self, frame: Frame) -> Frame:
        state, buffers = frame.state, frame.state.buffers
        if SPOILT not in state.slots:
            cure = "make the state with `init(ensemble, model)`"
            raise MissingFieldError("ensemble", f"state.slots[{name_of_member(0)!r}]", cure)
        if buffers:
            if state.window.buffers is None:
                before = buffers.copy() if buffers.is_owned else buffers
                state = attrs.evolve(state, window=attrs.evolve(state.window, buffers=before))
            buffers = buffers.writable(frame.began.updates)
        seen, replaced = self._mapped(frame, buffers)
        if replaced:
            buffers = buffers.replace([replaced.get(i, now.detach()) for i, now in enumerate(buffers.flat)])
        if buffers is not state.buffers:
            state = attrs.evolve(state, buffers=buffers)
        losses, weight = self._weighted(seen.pop("losses"), state), seen["weight"]
        spoilt = ~losses.detach().isfinite()
        if counts_for_nothing(weight):
            spoilt = torch.zeros_like(spoilt)
        else:
            seen["measures"] = {**seen["measures"], LOSS: (losses.detach() * weight, weight)}
        state = with_spoilt(state, spoilt, state.window.micro_batches)
        scales = state.slots.get(SCALES)
        return frame.having(state=state, loss=(losses if scales is None else losses * scales).sum(), **seen)

    def _weighted(self, losses: Tensor, state: TrainState) -> Tensor:
        weights = [self.members[number].loss_weight for number in members_of(state)]
        if all(weight == 1.0 for weight in weights):
            return losses
        return losses * torch.tensor(weights, dtype=losses.dtype, device=losses.device)

    def _mapped(self, frame: Frame, buffers: Tensors) -> tuple[dict[str, Any], dict[int, Tensor]]:
        """What Forward writes, for all members; and what the model put in the place of buffers, by their place."""
        params = frame.state.params
        leaves, form = pytree.tree_flatten(frame.batch) if self.batches == "own" else ([], None)
        self._check_rows(leaves, params.flat[0].shape[0])
        around: dict[str, Any] = {}

        def one(own: Sequence[Tensor], held: Sequence[Tensor], batch: Sequence[Any]) -> list[Tensor]:
            records = Tensors.over(params, own), Tensors.over(buffers, held).owned()
            given = frame.batch if form is None else pytree.tree_unflatten(batch, form)
            seen = self.inner(Frame.begin(TrainState(*records, window=_HELD, progress=frame.began), given))
            after = seen.state.buffers.flat if held else ()
            replaced = {i: now for i, (now, then) in enumerate(zip(after, held, strict=True)) if now is not then}
            found = {"losses": seen.loss, "measures": seen.measures, "output": seen.output}
            around["values"], around["form"] = pytree.tree_flatten((found, replaced))
            around["shared"] = {"weight": _shared(seen.weight), "samples": seen.samples, "tokens": seen.tokens}
            return [value for value in around["values"] if isinstance(value, Tensor)]

        in_dims = (0, 0, [0 if isinstance(leaf, Tensor) else None for leaf in leaves])
        tensors = iter(self._through(one, in_dims, frame, (params.flat, buffers.flat, leaves)))
        values = [next(tensors) if isinstance(value, Tensor) else value for value in around["values"]]
        found, replaced = pytree.tree_unflatten(values, around["form"])
        return {**found, **around["shared"]}, replaced

    def _through(self, one: Callable[..., Any], in_dims: Any, frame: Frame, given: tuple[Any, ...]) -> list[Tensor]:
        """`one` through vmap, where it draws random numbers with those of each member."""
        random = draws(self.inner.model) if self.draws is None else self.draws
        if random and torch.compiler.is_compiling():  # the generators are read on the host
            expected = "one that draws no random numbers, to be compiled"
            raise SettingError("ensemble(step)'s Forward", expected, type(self.inner.model).__name__)
        mapped: Any = torch.func.vmap(one, in_dims=in_dims, randomness="different" if random else "error")
        with ExitStack() as drawing:
            if random:
                generators = randomness.default_generators(frame.state)
                drawing.enter_context(randomness.isolated(generators))
                drawing.enter_context(MemberDraws(generators, self._keys(frame)))
            try:
                return mapped(*given)
            except RuntimeError as error:
                if "randomness error mode" not in str(error):
                    raise
                cure = "None of its modules is known to draw random numbers, and something does."
                raise SettingError("ensemble(draws)", "True for this model and loss", self.draws, cure) from error

    def _keys(self, frame: Frame) -> list[int]:
        rng = frame.state.rng
        seeds = [rng.seed + (self.members[number].seed or 0) for number in members_of(frame.state)]
        return [Rng(seed, rng.rank).key(frame.began.micro_steps) for seed in seeds]

    def _check_rows(self, leaves: Sequence[Any], count: int) -> None:
        """Raise LossError unless each tensor of a batch that is each member's own has a row for each."""
        shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
        if self.batches == "own" and (not shapes or any(shape[:1] != (count,) for shape in shapes)):
            cure = "stack the members' batches, or leave out `batches` if all see the same"
            raise LossError("The batch", f"of tensors with {count} rows, one for each member", f"{shapes}", cure)

    def __repr__(self) -> str:
        return repr(self.inner)


def _shared(weight: Any) -> Any:
    """The weight, if it is the same for all members."""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    if isinstance(weight, Tensor) and functorch.is_batchedtensor(weight):
        cure = "let it count items of the batch, and not of the model's output"
        raise LossError("Loss weight", "the same for all members", "one that hangs on the member", cure)
    return weight


def _stacked(each: Sequence[Tensors]) -> Tensors:
    """One record of tensors with a row for each of these."""
    return Tensors(
        (name, torch.stack([own[name].detach() for own in each]).requires_grad_(tensor.requires_grad))
        for name, tensor in each[0].items()
    )
