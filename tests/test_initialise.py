"""`initialise`: the variance that each scheme promises, for each activation; seeded, and without a trace elsewhere."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from pipeline import initialise
from pipeline.errors import SettingError
from pipeline.initialisation import gain

# What the table says, from elsewhere: calculate_gain, Klambauer et al. 2017, and for the others the closed forms or,
# where there is none, scipy.integrate.quad of f(z)² against the normal density.
GAINS: dict[str, tuple[nn.Module, float]] = {
    "linear": (nn.Identity(), 1.0),
    "sigmoid": (nn.Sigmoid(), nn.init.calculate_gain("sigmoid")),
    "tanh": (nn.Tanh(), nn.init.calculate_gain("tanh")),
    "relu": (nn.ReLU(), nn.init.calculate_gain("relu")),
    "leaky_relu": (nn.LeakyReLU(), nn.init.calculate_gain("leaky_relu", 0.01)),
    "leaky_relu 0.2": (nn.LeakyReLU(0.2), nn.init.calculate_gain("leaky_relu", 0.2)),
    "prelu": (nn.PReLU(init=0.2), nn.init.calculate_gain("leaky_relu", 0.2)),
    "selu": (nn.SELU(), 1.0),
    # E[(z Φ(z))²] = 1/3 + 1 / (2 √3 π)
    "gelu": (nn.GELU(), (1 / 3 + 1 / (2 * math.sqrt(3) * math.pi)) ** -0.5),
    "silu": (nn.SiLU(), 1.676532470331),
    "mish": (nn.Mish(), 1.486847581273),
    # E = 1/2 + e² Φ(-2) - 2 √e Φ(-1) + 1/2
    "elu": (
        nn.ELU(),
        (1 + math.e**2 * math.erfc(2 / math.sqrt(2)) / 2 - 2 * math.e**0.5 * math.erfc(1 / math.sqrt(2)) / 2) ** -0.5,
    ),
}
each_activation = pytest.mark.parametrize("name", GAINS)


def chain_of(activation: nn.Module, depth: int, width: int) -> nn.Sequential:
    return nn.Sequential(*[m for _ in range(depth) for m in (nn.Linear(width, width), copy.deepcopy(activation))])


def assert_std(weight: Tensor, std: float, kurtosis: float = 3.0) -> None:
    """Mean 0 and this standard deviation, within five standard errors."""
    n = weight.numel()
    assert abs(float(weight.mean())) <= 5 * std / math.sqrt(n)
    assert float(weight.square().mean()) == pytest.approx(std**2, rel=5 * math.sqrt((kurtosis - 1) / n))


class TestGains:
    @each_activation
    def test_they_are_what_the_sources_say(self, name: str) -> None:
        module, expected = GAINS[name]
        assert gain(module) == pytest.approx(expected, rel=1e-6)
        if " " not in name and name != "prelu":
            assert gain(name) == pytest.approx(expected, rel=1e-6)
        function = getattr(nn.functional, name, None)
        if name not in ("linear", "prelu") and function is not None:
            assert gain(function) == pytest.approx(expected, rel=1e-6)

    @pytest.mark.parametrize("name", sorted(GAINS.keys() - {"sigmoid", "tanh"}))
    def test_they_give_back_what_the_activation_takes(self, name: str) -> None:
        module, _ = GAINS[name]
        z = torch.randn(2_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        with torch.no_grad():
            out = module.double()(z) * gain(module)
        module.float()
        assert float(out.square().mean()) == pytest.approx(1.0, abs=0.01)

    def test_any_elementwise_function_has_one(self) -> None:
        assert gain(torch.sin) == pytest.approx((0.5 - math.exp(-2) / 2) ** -0.5, rel=1e-6)
        assert gain(nn.GELU("tanh")) == pytest.approx(gain("gelu"), rel=1e-3)

    @pytest.mark.parametrize("bad", ["softmax", "ReLU", torch.zeros_like, lambda z: z.sum(), lambda z: z / 0])
    def test_what_has_none_is_refused(self, bad: Any) -> None:
        with pytest.raises(SettingError, match=r"gain\(nonlinearity\) must be"):
            gain(bad)


class TestVariance:
    @each_activation
    @pytest.mark.parametrize("distribution", ["normal", "uniform"])
    @pytest.mark.parametrize("scheme", ["he", "xavier"])
    def test_it_is_what_the_scheme_promises(self, scheme: Any, distribution: Any, name: str) -> None:
        module, g = GAINS[name]
        model = initialise(nn.Sequential(nn.Linear(300, 500), module), scheme, seed=3, distribution=distribution)
        fan = 300 if scheme == "he" else 400
        weight = model[0].weight.detach()
        assert_std(weight, g / math.sqrt(fan), kurtosis=3.0 if distribution == "normal" else 1.8)
        if distribution == "uniform":
            assert float(weight.abs().max()) <= math.sqrt(3 / fan) * g * (1 + 1e-6)
        assert not model[0].bias.any()

    @pytest.mark.parametrize(
        ("layer", "fan_in", "fan_out"),
        [
            (nn.Conv1d(40, 80, 5), 200, 400),
            (nn.Conv2d(40, 80, (3, 5), stride=2, padding=1), 600, 1200),
            (nn.Conv2d(40, 80, 3, groups=4), 90, 180),
            (nn.Conv3d(20, 30, 3), 540, 810),
            (nn.ConvTranspose1d(40, 80, 6, stride=3), 80, 480),
            (nn.ConvTranspose2d(40, 80, 4, stride=2), 160, 1280),
            (nn.ConvTranspose2d(40, 80, 4, groups=2), 320, 640),
            (nn.Bilinear(20, 30, 50), 600, 50),
        ],
        ids=repr,
    )
    def test_fans_count_what_is_summed_over(self, layer: nn.Module, fan_in: int, fan_out: int) -> None:
        initialise(layer, "he", nonlinearity="linear")
        assert_std(layer.weight.detach(), fan_in**-0.5)
        initialise(layer, "xavier")
        assert_std(layer.weight.detach(), (2 / (fan_in + fan_out)) ** 0.5)

    @pytest.mark.parametrize(
        "layer",
        [
            nn.Conv2d(64, 96, 3, groups=2, padding=1),
            nn.Conv2d(64, 96, 3, stride=2, padding=1),
            nn.ConvTranspose2d(64, 96, 3, padding=1),
            nn.ConvTranspose2d(64, 96, 4, stride=2, padding=1),
            nn.ConvTranspose2d(64, 96, 2, stride=2, groups=2),
        ],
        ids=repr,
    )
    def test_a_convolution_keeps_the_signals_variance(self, layer: nn.Module) -> None:
        initialise(layer, "he", nonlinearity="linear")
        x = torch.randn(2, 64, 64, 64, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            inner = layer(x)[..., 2:-2, 2:-2]
        assert float(inner.square().mean()) == pytest.approx(1.0, rel=0.1)


class TestDepth:
    """The mean square of what comes out of each layer, through 50 of them."""

    @staticmethod
    def squares(model: nn.Sequential, width: int) -> list[float]:
        x = torch.randn(128, width, generator=torch.Generator().manual_seed(1))
        found = []
        with torch.no_grad():
            for module in model:
                x = module(x)
                if isinstance(module, nn.Linear):
                    found.append(float(x.square().mean()))
        return found

    @pytest.mark.parametrize("seed", range(2))
    @pytest.mark.parametrize("scheme", ["he", "xavier", "orthogonal"])
    @pytest.mark.parametrize("name", ["linear", "relu", "leaky_relu 0.2", "selu", "elu", "tanh", "sigmoid"])
    def test_the_signal_stays_within_a_factor_of_8(self, name: str, scheme: Any, seed: int) -> None:
        squares = self.squares(initialise(chain_of(GAINS[name][0], 50, 256), scheme, seed=seed), 256)
        assert len(squares) == 50
        assert max(squares) <= 8 * min(squares)
        assert 1 / 8 <= squares[-1] <= 8

    @pytest.mark.parametrize("name", ["gelu", "silu", "mish"])
    def test_where_no_gain_can_hold_it_one_layer_grows_by_half_the_squared_gain_at_most(self, name: str) -> None:
        module, g = GAINS[name]
        squares = self.squares(initialise(chain_of(module, 10, 512)), 512)
        growth = [b / a for a, b in itertools.pairwise(squares)]
        assert max(growth) <= g**2 / 2 * 1.15
        assert min(growth) >= 0.9

    def test_an_orthogonal_linear_chain_keeps_every_norm(self) -> None:
        model = initialise(chain_of(nn.Identity(), 50, 64), "orthogonal").double()
        x = torch.randn(5, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            assert torch.allclose(model(x).norm(dim=1), x.norm(dim=1), rtol=1e-4)


class TestOrthogonal:
    @pytest.mark.parametrize(
        "layer",
        [nn.Linear(60, 60), nn.Linear(40, 90), nn.Linear(90, 40), nn.Conv2d(8, 100, 3), nn.Conv2d(16, 20, 3)],
        ids=repr,
    )
    @pytest.mark.parametrize("nonlinearity", ["linear", "relu"])
    def test_the_rows_or_the_columns_are_orthogonal(self, layer: nn.Module, nonlinearity: str) -> None:
        matrix = initialise(layer, "orthogonal", nonlinearity=nonlinearity).weight.detach().flatten(1).double()
        small = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
        assert (small - gain(nonlinearity) ** 2 * torch.eye(len(small))).abs().max() <= 1e-5

    def test_gates_and_heads_are_matrices_of_their_own(self) -> None:
        model = nn.ModuleList([nn.LSTM(30, 20, proj_size=7), nn.GRUCell(30, 20), nn.MultiheadAttention(24, 4)])
        initialise(model, "orthogonal")
        for name, rows in (
            ("0.weight_ih_l0", 20),
            ("0.weight_hh_l0", 20),
            ("0.weight_hr_l0", 7),
            ("1.weight_hh", 20),
            ("2.in_proj_weight", 24),
            ("2.out_proj.weight", 24),
        ):
            for block in model.get_parameter(name).detach().double().split(rows):
                small = block @ block.T if block.shape[0] <= block.shape[1] else block.T @ block
                assert (small - torch.eye(len(small))).abs().max() <= 1e-5, name
        assert not any(p.any() for n, p in model.named_parameters() if "bias" in n)


def gain_of(layer: nn.Module) -> float:
    """As the weights tell."""
    return float((layer.weight.detach().double().square().mean() * layer.weight[0].numel()).sqrt())


def near(value: float) -> Any:
    return pytest.approx(value, rel=0.05)


class TestWhatFollows:
    def test_in_a_sequential_it_is_found_behind_norms_dropout_and_pooling_and_across_nesting(self) -> None:
        model = nn.Sequential(
            nn.Sequential(nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64), nn.Dropout(0.1)),
            nn.Sequential(nn.MaxPool2d(2), nn.LeakyReLU(0.5), nn.Conv2d(64, 64, 3)),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(100, 100),
            nn.Linear(100, 100),
            nn.GELU(),
            nn.Linear(100, 100),
            nn.Softmax(1),
        )
        initialise(model)
        found = [gain_of(m) for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
        assert found == [near(math.sqrt(2 / 1.25)), near(5 / 3), near(1.0), near(1.5335), near(1.0)]

    @pytest.mark.parametrize(("scheme", "expected"), [("he", math.sqrt(2)), ("orthogonal", 1.0), ("xavier", 1.0)])
    def test_where_it_cannot_be_told_the_scheme_decides(self, scheme: Any, expected: float) -> None:
        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.activation = nn.Linear(100, 100), nn.Tanh()

        class Own(nn.Module):
            """An activation for all that anyone knows."""

        model = nn.Sequential(nn.Linear(100, 100), Block(), nn.Linear(100, 100), Own(), nn.Tanh(), nn.Linear(100, 100))
        model.append(nn.GLU())
        layers = [model[0], model[1].layer, model[2], model[5]]
        initialise(model, scheme)
        assert [gain_of(layer) for layer in layers] == [near(expected)] * 4
        initialise(model, scheme, nonlinearity="silu")
        assert [gain_of(layer) for layer in layers] == [near(1.6765)] * 4

    def test_attention_and_recurrent_layers_have_gain_1_whatever_is_said(self) -> None:
        model = nn.ModuleList([nn.TransformerEncoderLayer(96, 4, 96), nn.RNN(96, 96), nn.Linear(96, 96)])
        initialise(model, nonlinearity="relu")
        ones = ("in_proj_weight", "out_proj.weight", "weight_ih_l0", "weight_hh_l0")
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                expected = 1.0 if name.endswith(ones) else math.sqrt(2)
                assert float((parameter.detach().square().mean() * 96).sqrt()) == near(expected), name


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(400, 100, padding_idx=0)
        self.head = nn.Linear(100, 400)
        self.head.weight = self.embedding.weight
        self.free = nn.Embedding(400, 100, padding_idx=3)
        self.token = nn.Parameter(torch.full((5,), 7.0))


def convnet() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8, 4), nn.PReLU())


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class TestWhatIsWritten:
    def test_norms_begin_at_1_and_0_with_fresh_statistics(self) -> None:
        model = nn.ModuleList([nn.BatchNorm1d(4), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.RMSNorm(4)])
        model.append(nn.InstanceNorm1d(4, affine=True, track_running_stats=True))
        fresh = values(model)
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data.fill_(3)
        initialise(model)
        assert equal(values(model), fresh)

    def test_a_tied_weight_is_drawn_once_as_the_layers_and_not_the_embeddings(self) -> None:
        model = initialise(Tied(), "xavier")
        assert model.head.weight is model.embedding.weight
        assert_std(model.head.weight.detach(), (2 / 500) ** 0.5)
        free = model.free.weight.detach()
        assert not free[3].any()
        assert_std(torch.cat([free[:3], free[4:]]), 1.0)

    def test_parameters_of_no_known_layer_keep_their_values(self) -> None:
        assert initialise(Tied()).token.tolist() == [7.0] * 5

    def test_frozen_parameters_keep_their_values_and_the_rest_is_drawn_as_ever(self) -> None:
        free, frozen = convnet(), convnet()
        for parameter in frozen[:2].parameters():
            parameter.requires_grad_(False)
        frozen[1].running_mean.fill_(2.0)
        before = values(frozen[:2])
        initialise(free, seed=1)
        initialise(frozen, seed=1)
        assert equal(values(frozen[:2]), before)
        assert torch.equal(frozen[4].weight, free[4].weight)

    def test_parametrized_weights_are_written_through(self) -> None:
        model = nn.Sequential(parametrizations.weight_norm(nn.Linear(100, 100)), nn.ReLU())
        plain = nn.Sequential(nn.Linear(100, 100), nn.ReLU())
        initialise(model)
        initialise(plain)
        assert torch.allclose(model[0].weight, plain[0].weight, atol=1e-6)
        assert model[0].parametrizations.weight.original0.requires_grad

    def test_it_returns_the_model_and_a_second_time_undoes_training(self) -> None:
        model = convnet()
        assert initialise(model) is model
        first = values(model)
        model(torch.randn(9, 3, 3, 3)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert not equal(values(model), first)
        assert equal(values(initialise(model)), first)


class TestRandomness:
    def test_the_seed_decides_and_torchs_generator_is_left_alone(self) -> None:
        torch.manual_seed(5)
        state = torch.get_rng_state()
        one = values(initialise(convnet(), seed=3))
        torch.manual_seed(77)
        other = values(initialise(convnet(), seed=3))
        assert equal(one, other)
        assert not torch.equal(one["4.weight"], values(initialise(convnet(), seed=4))["4.weight"])
        torch.set_rng_state(state)
        model = convnet()
        state = torch.get_rng_state()
        initialise(model)
        assert torch.equal(torch.get_rng_state(), state)

    def test_layers_differ_and_one_more_changes_none_of_the_others(self) -> None:
        short, long = nn.Sequential(*[nn.Linear(9, 9) for _ in range(2)]), [nn.Linear(9, 9) for _ in range(3)]
        initialise(short)
        assert not torch.equal(short[0].weight, short[1].weight)
        longer = initialise(nn.Sequential(*long))
        assert equal({k: v for k, v in values(longer).items() if k[0] in "01"}, values(short))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    @pytest.mark.parametrize("scheme", ["he", "orthogonal"])
    def test_the_precision_rounds_the_same_draws(self, dtype: torch.dtype, scheme: Any) -> None:
        one, other = initialise(nn.Linear(20, 30), scheme), initialise(nn.Linear(20, 30, dtype=dtype), scheme)
        assert torch.equal(other.weight, one.weight.to(dtype))

    def test_defaults_set_elsewhere_change_nothing(self) -> None:
        expected = values(initialise(convnet()))
        model = convnet()
        torch.set_default_dtype(torch.float64)
        try:
            with torch.device("meta"):
                initialise(model)
        finally:
            torch.set_default_dtype(torch.float32)
        assert equal(values(model), expected)


def old_weight_norm() -> nn.Module:
    layer = nn.Linear(3, 3)
    weight = layer.weight
    del layer.weight
    layer.register_parameter("weight_v", weight)
    layer.weight = weight * 2
    return layer


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: initialise([nn.Linear(2, 2)]), r"initialise\(model\) must be a torch.nn.Module"),
        (lambda: initialise(nn.Linear(2, 2), "kaiming"), r"initialise\(scheme\) must be 'he', 'xavier' or 'orth"),
        (lambda: initialise(nn.Linear(2, 2), distribution="trunc"), r"initialise\(distribution\) must be 'normal'"),
        (
            lambda: initialise(nn.Linear(2, 2), "orthogonal", distribution="uniform"),
            "left out with scheme 'orthogonal'",
        ),
        (lambda: initialise(nn.Linear(2, 2), nonlinearity="swoosh"), "must be one of elu, gelu"),
        (lambda: initialise(nn.Sequential(nn.LazyLinear(2))), "that have a shape.*0.weight.*Run one batch"),
        (lambda: initialise(nn.Linear(2, 2, device="meta")), r"off the meta device.*model\.to_empty"),
        (
            lambda: initialise(nn.Linear(2, 2, dtype=torch.complex64)),
            "of real floating parameters.*weight: torch.complex",
        ),
        (lambda: initialise(old_weight_norm()), "that can be written.*'weight'.*weight_norm"),
    ],
)
def test_what_cannot_be_is_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        build()
