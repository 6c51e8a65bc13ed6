"""What the laws run over: one list of models, and one of transforms that every public transform is on."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline import (
    Accumulate,
    AdaptiveClip,
    ClipByGlobalNorm,
    ClipByGroupNorm,
    ClipByValue,
    ClipPerParameter,
    EmitEvents,
    Forward,
    Frame,
    Group,
    LossScale,
    MaybeStep,
    MeasureGradients,
    MeasureNoise,
    MeasureUpdates,
    Optimizer,
    Progress,
    ScaledBackward,
    UpdateInBackward,
    Window,
    branch,
    chain,
    compiled,
    ensemble,
    every,
    fold,
    init,
    named,
    part,
    repeat,
    supervised,
    tap,
    when,
)
from pipeline.testing import frame
from pipeline.transform import Chain, Transform
from pipeline.transforms import AverageWeights, DropNonFinite, PenaliseL1, PenaliseL2, SharpnessAware, SkipSpikes

IN, OUT = 6, 3


class Tied(nn.Module):
    """Two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(IN, IN), nn.Linear(IN, IN), nn.Linear(IN, OUT)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(torch.tanh(self.first(x))))


class Scaled(nn.Module):
    """A 0-dim parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(IN, OUT), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.linear(x)


class Unused(nn.Module):
    """A parameter that no forward uses, and one that every second batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.never, self.sometimes = nn.Linear(IN, OUT), nn.Linear(IN, OUT), nn.Parameter(torch.ones(OUT))

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        return out * self.sometimes if float(x.detach()[0, 0]) > 0 else out


def _frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(IN, 8), nn.Tanh(), nn.Linear(8, OUT))
    model[0].weight.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(IN, 8), nn.ReLU(), nn.Linear(8, OUT)),
    "batchnorm": lambda: nn.Sequential(nn.Linear(IN, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, OUT)),
    "dropout": lambda: nn.Sequential(nn.Linear(IN, 8), nn.Dropout(0.5), nn.Linear(8, OUT)),
    "tied": Tied,
    "frozen": _frozen,
    "unused": Unused,
    "0-dim": Scaled,
}
ROW_WISE = [name for name in MODELS if name not in ("batchnorm", "dropout", "unused")]
"""The models that treat each row of a batch by itself: law 4 is about these."""
TRACEABLE = [name for name in MODELS if name != "unused"]
"""The models whose forward does not look at a value."""


def make_model(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MODELS[name]().to(dtype)


def make_batch(seed: int, size: int = 4, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, IN, generator=generator, dtype=dtype)
    return x, torch.randint(0, OUT, (size,), generator=generator)


def make_batches(n: int, seed: int = 0, size: int = 4) -> list[tuple[Tensor, Tensor]]:
    return [make_batch(100 * seed + i, size) for i in range(n)]


def make_step(
    model: nn.Module,
    window: int = 2,
    optimizer: Optimizer | None = None,
    max_norm: float | None = 0.5,
    *between: Transform,
) -> Chain:
    """The whole step; `between` stands between ScaledBackward and Accumulate, and keeps them from running as one."""
    optimizer = optimizer or Optimizer(
        torch.optim.AdamW, lr=0.01, groups=[Group(lambda _, p: p.ndim < 2, name="vectors", weight_decay=0.0)]
    )
    return chain(
        Forward(model, supervised(F.cross_entropy, measures={"accuracy": accuracy})),
        ScaledBackward(),
        *between,
        Accumulate(every=window),
        *([] if max_norm is None else [ClipByGlobalNorm(max_norm)]),
        MaybeStep(optimizer),
        EmitEvents(micro_batches=True),
    )


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(-1) == target).float().mean()


@attrs.frozen
class Case:
    """A transform and a frame for it, both made anew at each call; `covers` names the public parts in it."""

    name: str
    covers: frozenset[str]
    make: Callable[[int], tuple[Transform, Frame]]


def _values(seed: int, scale: float = 1.0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": scale * torch.randn(3, 2, generator=generator),
        "b": scale * torch.randn(2, generator=generator),
        "s": scale * torch.randn((), generator=generator),
    }


def _params(seed: int) -> dict[str, Any]:
    return {name: value.requires_grad_() for name, value in _values(seed).items()}


def _window_frame(seed: int, **more: Any) -> Frame:
    return frame(_params(seed), sums=_values(seed + 1, 3.0), ready=True, update_factor=0.25, **more)


def _backward(seed: int) -> tuple[Transform, Frame]:
    def make_loss(f: Frame) -> Frame:  # anew each time: a graph can be gone through once
        return f.having(loss=sum((p**2).sum() for p in f.state.params.values()))

    return chain(make_loss, ScaledBackward()), frame(_params(seed), weight=3.0, sums=_values(seed + 1))


def _accumulate(seed: int) -> tuple[Transform, Frame]:
    given = frame(
        _params(seed),
        grads=_values(seed + 2),
        sums=_values(seed + 1),
        loss=2.0,
        weight=2.0,
        measures={"accuracy": (torch.tensor(1.0), 2.0)},
        samples=2,
    )
    return Accumulate(every=2), given


def _clip(seed: int) -> tuple[Transform, Frame]:
    return ClipByGlobalNorm(0.5), _window_frame(seed)


CLIPS: list[Transform] = [
    ClipByGlobalNorm(0.5),
    ClipByGlobalNorm(0.5, p=1),
    ClipByGlobalNorm(0.5, p=math.inf),
    ClipByValue(0.1),
    ClipByGroupNorm({"w": 0.5, "[bs]": 0.1}),
    ClipPerParameter(0.3),
    AdaptiveClip(0.1, leave="b"),
]
PENALTIES: list[Transform] = [PenaliseL1(0.1), PenaliseL2(0.1), PenaliseL2(0.1, match="[bs]")]


def _clip_case(clip: Transform, kind: str) -> Case:
    """A clip or penalty on gradients that are all dense, or also sparse (with duplicates), complex and empty."""

    def make(seed: int) -> tuple[Transform, Frame]:
        if kind == "dense":
            return clip, _window_frame(seed)
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(3, 2, generator=generator)
        sums = {
            "w": torch.sparse_coo_tensor(torch.tensor([[2, 0, 2]]), values, (3, 2), check_invariants=True),
            "b": torch.randn(2, dtype=torch.complex64, generator=generator),
            "s": torch.randn((), generator=generator),
            "e": torch.zeros(0, 2),
        }
        params = {**_params(seed), "b": torch.randn(2, dtype=torch.complex64), "e": torch.zeros(0, 2)}
        return clip, frame(params, sums=sums, ready=True, update_factor=0.25)

    return Case(f"{clip!r} of {kind} gradients", frozenset({type(clip).__name__}), make)


def _step(seed: int, **settings: Any) -> tuple[Transform, Frame]:
    rule = Optimizer(torch.optim.AdamW, lr=0.1, **settings)
    return MaybeStep(rule), _window_frame(seed, loss_scale=LossScale(scale=4.0))


def _skipped_step(seed: int) -> tuple[Transform, Frame]:
    step, given = _step(seed)
    return step, given.having(skip=torch.tensor(True))


def _measured_step(seed: int) -> tuple[Transform, Frame]:
    step, given = _step(seed)
    return MeasureUpdates(step), given


def _spikes(seed: int) -> tuple[Transform, Frame]:
    spikes = SkipSpikes(over=4, least=1)
    given = _window_frame(seed)
    return spikes, given.having(state=spikes.init(given.state))


def _averaged(seed: int, **settings: Any) -> tuple[Transform, Frame]:
    average = AverageWeights(**settings)
    given = frame(_params(seed), applied=True, progress=Progress(updates=1))
    begun = average.init(given.state)
    moved = frame({name: 2 * value.detach() for name, value in _values(seed).items()}).state.params
    return average, given.having(state=attrs.evolve(begun, params=moved))


def _sharp(name: str) -> Callable[[int], tuple[Transform, Frame]]:
    def make(seed: int) -> tuple[Transform, Frame]:
        model = make_model(name, seed)
        sharp = SharpnessAware(Forward(model, supervised(F.cross_entropy)))
        return chain(sharp, Accumulate(2)), Frame(init(sharp, model), make_batch(seed))

    return make


def _in_backward(name: str, bound: bool) -> Callable[[int], tuple[Transform, Frame]]:
    """The second update, which finds an optimizer state."""

    def make(seed: int) -> tuple[Transform, Frame]:
        model = make_model(name, seed)
        update = UpdateInBackward(Optimizer(torch.optim.AdamW, lr=0.01))
        step = chain(Forward(model, supervised(F.cross_entropy)), update, EmitEvents())
        state = fold(step, init(step, model, seed=seed), make_batches(1)).state
        return step, Frame(state if bound else state.copy(), make_batch(seed))

    return make


def _emit(seed: int) -> tuple[Transform, Frame]:
    closed = Window(weight=2.0, reference=3.0, loss=torch.tensor(4.0), micro_batches=2)
    facts = {"grad_norm": torch.tensor(1.0 + seed)}
    return EmitEvents(), frame(_params(seed), applied=True, closed=closed, facts=facts, rates={"default": 0.1})


def _wrap(wrapper: Callable[[Transform], Transform]) -> Callable[[int], tuple[Transform, Frame]]:
    def make(seed: int) -> tuple[Transform, Frame]:
        transform, given = _clip(seed)
        return wrapper(transform), given

    return make


def _parts(bound: bool) -> Callable[[int], tuple[Transform, Frame]]:
    """Two parts in turn, the first of which steps every second time."""

    def make(seed: int) -> tuple[Transform, Frame]:
        model = make_model("batchnorm", seed)
        one = Optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
        step = chain(part("first", "0.*", make_step(model, 2, one)), part("rest", ["1.*", "3.*"], make_step(model, 1)))
        state = init(step, model, seed=seed)
        return step, Frame(state if bound else state.copy(), make_batch(seed))

    return make


def _ensemble(name: str) -> Callable[[int], tuple[Transform, Frame]]:
    """The second update of three members, one of which was skipped before: rows of their own."""

    def make(seed: int) -> tuple[Transform, Frame]:
        model = make_model(name, seed)
        several = ensemble(make_step(model, 1), rates=[0.01, 0.1, 0.02], batches="own")
        batches = [tuple(torch.stack([part] * 3) for part in make_batch(seed + i)) for i in range(2)]
        batches[0][0][1] = math.nan
        begun = init(several, model, seed=seed, loss_scale=LossScale(scale=4.0, interval=1))
        return several, Frame(fold(several, begun, batches[:1]).state, batches[1])

    return make


def _of_model(name: str, *, bound: bool, fused: bool) -> Callable[[int], tuple[Transform, Frame]]:
    def make(seed: int) -> tuple[Transform, Frame]:
        model = make_model(name, seed)
        between = () if fused else (lambda f: f,)
        step = make_step(model, 1, None, 0.5, *between)
        state = init(step, model, seed=seed)
        return step, Frame(state if bound else state.copy(), make_batch(seed))

    return make


@functools.cache
def _graphs(name: str) -> Transform:
    return compiled(make_step(make_model(name), 1), backend="eager")


def _compiled(name: str) -> Callable[[int], tuple[Transform, Frame]]:
    """The second update, which is the first that is a graph."""

    def make(seed: int) -> tuple[Transform, Frame]:
        step = _graphs(name)
        state = fold(step, init(step, make_model(name, seed), seed=seed), make_batches(1)).state
        return chain(step, lambda f: f.having(loss=f.loss.detach())), Frame(state, make_batch(seed))

    return make


def _forward(seed: int) -> tuple[Transform, Frame]:
    model = make_model("batchnorm", seed)
    step = Forward(model, supervised(F.cross_entropy))
    # The loss keeps its graph, which has no value to compare: detached, it has.
    return chain(step, lambda f: f.having(loss=f.loss.detach())), Frame(init(step, model), make_batch(seed))


CASES = [
    Case("Forward", frozenset({"Forward", "supervised"}), _forward),
    Case("ScaledBackward", frozenset({"ScaledBackward"}), _backward),
    Case("Accumulate", frozenset({"Accumulate"}), _accumulate),
    *(_clip_case(clip, kind) for clip in CLIPS + PENALTIES for kind in ("dense", "odd")),
    Case("MaybeStep fused", frozenset({"MaybeStep", "Optimizer"}), _step),
    Case("MaybeStep", frozenset({"MaybeStep", "Optimizer"}), lambda seed: _step(seed, fused=False)),
    Case("MaybeStep skipping", frozenset({"MaybeStep"}), _skipped_step),
    *(_clip_case(MeasureGradients(), kind) for kind in ("dense", "odd")),
    Case("MeasureUpdates", frozenset({"MeasureUpdates"}), _measured_step),
    Case("MeasureNoise", frozenset({"MeasureNoise"}), lambda seed: (MeasureNoise(), _accumulate(seed)[1])),
    Case("DropNonFinite", frozenset({"DropNonFinite"}), lambda seed: (DropNonFinite(), _accumulate(seed)[1])),
    Case("SkipSpikes", frozenset({"SkipSpikes"}), _spikes),
    Case("EmitEvents", frozenset({"EmitEvents"}), _emit),
    Case("when", frozenset({"when"}), _wrap(lambda t: when(lambda f: f.ready, t))),
    Case("branch", frozenset({"branch"}), _wrap(lambda t: branch(lambda f: not f.ready, chain(), t))),
    Case("every", frozenset({"every"}), _wrap(lambda t: every(1, t))),
    Case("repeat", frozenset({"repeat"}), _wrap(lambda t: repeat(2, t))),
    Case("tap", frozenset({"tap"}), _wrap(lambda t: chain(tap(repr), t))),
    Case("named", frozenset({"named"}), _wrap(lambda t: named("clip", t))),
    *(
        Case(f"part, {'bound' if bound else 'functional'}", frozenset({"part"}), _parts(bound))
        for bound in (True, False)
    ),
    Case("AverageWeights", frozenset({"AverageWeights"}), lambda seed: _averaged(seed, decay=0.9)),
    Case("AverageWeights, equal", frozenset({"AverageWeights"}), lambda seed: _averaged(seed, decay=None)),
    *(
        Case(f"SharpnessAware, {name}", frozenset({"SharpnessAware"}), _sharp(name))
        for name in ("mlp", "batchnorm", "dropout", "tied")
    ),
    *(
        Case(
            f"UpdateInBackward, {name}, {'bound' if bound else 'functional'}",
            frozenset({"UpdateInBackward"}),
            _in_backward(name, bound),
        )
        for name in MODELS
        for bound in (True, False)
    ),
    *(
        Case(f"ensemble, {name}", frozenset({"ensemble"}), _ensemble(name))
        for name in ("mlp", "batchnorm", "dropout", "frozen")
    ),
    *(Case(f"compiled, {name}", frozenset({"compiled"}), _compiled(name)) for name in ("batchnorm", "dropout", "tied")),
    Case("chain()", frozenset({"chain"}), lambda seed: (chain(), _window_frame(seed))),
    *(
        Case(
            f"step of {name}, {'bound' if bound else 'functional'}{'' if fused else ', unfused'}",
            frozenset({"chain"}),
            _of_model(name, bound=bound, fused=fused),
        )
        for name in MODELS
        for bound in (True, False)
        for fused in (True, False)
    ),
]
