"""The trained weights alone: into other models, other programs, and the start of other runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from pipeline import AverageWeights, TrainState, averaged, chain, fold, init
from pipeline.checkpoint import Checkpoint, CheckpointStore, export, load_checkpoint, load_weights, weights
from pipeline.errors import CheckpointError, MissingFieldError, SettingError, StaleStateError, StateMismatchError
from tests.checkpoint.cases import a_model, batches, started, training
from tests.checkpoint.test_faults import no_file_beyond
from tests.laws.cases import IN, MODELS, OUT, Tied, make_batches, make_model, make_step


def trained(name: str) -> tuple[nn.Module, TrainState]:
    model = make_model(name)
    step = chain(make_step(model), AverageWeights(decay=0.5))
    return model, fold(step, init(step, model), make_batches(4)).state


def assert_same(model: nn.Module, other: nn.Module) -> None:
    there = other.state_dict()
    assert list(model.state_dict()) == list(there)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, there[name]), name


class Rotary(nn.Module):
    """A buffer that is not in the `state_dict()`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(IN, OUT)
        self.register_buffer("angles", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.angles


@pytest.mark.parametrize("name", MODELS)
def test_with_the_model_weights_are_its_state_dict(name: str) -> None:
    model, state = trained(name)
    given = weights(state, model)
    assert list(given) == list(model.state_dict())
    other = make_model(name, seed=1)
    other.load_state_dict(given)
    assert_same(model, other)


def test_without_the_model_each_tensor_has_one_name() -> None:
    _, state = trained("tied")
    assert list(weights(state)) == ["first.weight", "first.bias", "second.bias", "head.weight", "head.bias"]
    model, state = trained("batchnorm")
    assert weights(state).keys() == model.state_dict().keys()


def test_weights_are_copies(tmp_path: Path) -> None:
    run = training(tmp_path)
    given = weights(run.state)
    then = {name: tensor.clone() for name, tensor in given.items()}
    with torch.no_grad():
        for param in run.state.params.flat:
            param.zero_()
    assert all(torch.equal(given[name], tensor) for name, tensor in then.items())
    assert not any(tensor.requires_grad for tensor in given.values())


def test_of_a_checkpoint_and_of_an_average_they_are_those(tmp_path: Path) -> None:
    run = training(tmp_path)
    found = CheckpointStore(tmp_path).load()
    assert torch.equal(weights(found)["0.weight"], run.state.params["0.weight"])
    smooth = weights(found, average="average")
    assert torch.equal(smooth["0.weight"], run.state.slots["average"]["0.weight"])
    assert torch.equal(smooth["1.running_mean"], run.state.buffers["1.running_mean"])
    with pytest.raises(MissingFieldError, match="ema"):
        weights(found, average="ema")


def test_a_buffer_that_the_model_does_not_save_is_left_out_with_the_model(tmp_path: Path) -> None:
    model = Rotary()
    step = make_step(model)
    state = fold(step, init(step, model), make_batches(2)).state
    assert "angles" in weights(state)
    Rotary().load_state_dict(weights(state, model))
    export(state, tmp_path / "model.safetensors", model)
    safetensors.torch.load_model(Rotary(), tmp_path / "model.safetensors")


def test_weights_for_another_model_are_refused_with_the_names() -> None:
    _, state = trained("mlp")
    with pytest.raises(StateMismatchError) as failure:
        weights(state, Tied())
    assert failure.value.missing[:2] == ["first.weight", "first.bias"]
    assert failure.value.unexpected == ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("of", ["state", "checkpoint"])
def test_an_exported_file_is_what_safetensors_loads_into_a_model(name: str, of: str, tmp_path: Path) -> None:
    model, state = trained(name)
    path = tmp_path / "new" / "model.safetensors"
    export(state if of == "state" else Checkpoint(state), path)
    other = make_model(name, seed=1)
    missing, unexpected = safetensors.torch.load_model(other, path)
    assert not missing
    assert not unexpected
    assert_same(model, other)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    with safetensors.safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}  # without it some libraries read no file


def test_an_exported_average_is_that_of_the_state(tmp_path: Path) -> None:
    _, state = trained("mlp")
    export(state, tmp_path / "ema.safetensors", average="average")
    there = safetensors.torch.load_file(tmp_path / "ema.safetensors")
    assert torch.equal(there["0.weight"], state.slots["average"]["0.weight"])
    assert not torch.equal(there["0.weight"], state.params["0.weight"])


def test_an_exported_average_has_the_dtype_of_the_parameters(tmp_path: Path) -> None:
    model = make_model("mlp").bfloat16()
    step = AverageWeights()
    export(init(step, model), tmp_path / "ema.safetensors", average="average")
    there = safetensors.torch.load_file(tmp_path / "ema.safetensors")
    assert {tensor.dtype for tensor in there.values()} == {torch.bfloat16}


def test_an_export_replaces_a_file_once_it_is_whole(tmp_path: Path) -> None:
    _, state = trained("mlp")
    path = tmp_path / "model.safetensors"
    path.write_text("before")
    with no_file_beyond(100), pytest.raises(CheckpointError, match="could not be written"):
        export(state, path)
    assert path.read_text() == "before"
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    export(state, path)
    assert len(safetensors.torch.load_file(path)) == 4


def test_an_export_to_where_a_folder_is_leaves_it_there(tmp_path: Path) -> None:
    _, state = trained("mlp")
    (tmp_path / "a").mkdir()
    with pytest.raises(CheckpointError):
        export(state, tmp_path / "a")
    assert (tmp_path / "a").is_dir()
    assert len(list(tmp_path.iterdir())) == 1


class Encoder(nn.Module):
    """An encoder, and a head of some width."""

    def __init__(self, out: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(IN, 5), nn.BatchNorm1d(5), nn.Tanh())
        self.head = nn.Linear(5, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


@pytest.fixture(params=["a checkpoint", "a file"])
def pretrained(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, TrainState]:
    """Where the weights of a trained encoder lie, and the state that they are of."""
    model = Encoder(OUT)
    step = chain(make_step(model), AverageWeights(decay=0.5))
    state = fold(step, init(step, model), make_batches(4), store=tmp_path).state
    if request.param == "a checkpoint":
        path = CheckpointStore(tmp_path).latest()
        assert path is not None
        return path, state
    export(state, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors", state


def fresh(out: int) -> tuple[Any, Encoder, TrainState]:
    torch.manual_seed(9)
    model = Encoder(out)
    step = chain(make_step(model), AverageWeights(decay=0.5))
    return step, model, init(step, model)


def test_weights_by_a_pattern_go_into_the_module_and_leave_the_rest(pretrained: tuple[Path, TrainState]) -> None:
    path, before = pretrained
    step, model, state = fresh(7)
    head = model.head.weight.detach().clone()
    state = load_weights(path, state, match="encoder.*")
    assert torch.equal(model.encoder[0].weight, before.params["encoder.0.weight"])
    assert torch.equal(model.encoder[1].running_var, before.buffers["encoder.1.running_var"])
    assert torch.equal(model.head.weight, head)
    assert state.params["encoder.0.weight"] is model.encoder[0].weight
    assert not state.params.is_owned
    assert len(state.optimizer.tensors) == 0
    run = fold(step, state, make_batches(2))
    assert run.state.progress.updates == 1
    assert not torch.equal(model.encoder[0].weight, before.params["encoder.0.weight"])


def test_an_average_that_nothing_was_taken_into_begins_with_them(pretrained: tuple[Path, TrainState]) -> None:
    path, _ = pretrained
    _, model, state = fresh(7)
    state = load_weights(path, state, match="encoder.*")
    for name, param in model.named_parameters():
        assert torch.equal(state.slots["average"][name], param)


def test_an_average_that_is_one_stays_as_it_is(pretrained: tuple[Path, TrainState]) -> None:
    path, _ = pretrained
    step, _, state = fresh(OUT)
    state = fold(step, state, make_batches(4)).state
    then = state.slots["average"]["encoder.0.weight"].clone()
    assert torch.equal(load_weights(path, state).slots["average"]["encoder.0.weight"], then)


def test_all_of_them_are_asked_for_by_default_and_the_given_state_is_taken_over(
    pretrained: tuple[Path, TrainState],
) -> None:
    path, before = pretrained
    _, model, state = fresh(OUT)
    loaded = load_weights(path, state)
    for name, tensor in {**before.params, **before.buffers}.items():
        assert torch.equal(model.state_dict()[name], tensor)
    with pytest.raises(StaleStateError):
        _ = state.params["head.weight"]
    assert loaded.params["head.weight"] is model.head.weight


def test_several_patterns_are_one_choice(pretrained: tuple[Path, TrainState]) -> None:
    path, before = pretrained
    _, model, state = fresh(7)
    load_weights(path, state, match=["encoder.0.*", "encoder.1.weight"])
    assert torch.equal(model.encoder[0].bias, before.params["encoder.0.bias"])
    assert not torch.equal(model.encoder[1].running_mean, before.buffers["encoder.1.running_mean"])


@pytest.mark.parametrize(
    ("match", "missing", "unexpected", "differing"),
    [
        ("*", ["extra.weight"], [], ["head.bias (float32 (3,), here float32 (7,))"]),
        ("head.*", [], [], ["head.weight (float32 (3, 5), here float32 (7, 5))"]),
        ("extra.*", ["extra.weight"], [], []),
    ],
)
def test_what_does_not_fit_is_listed_and_nothing_is_loaded(
    match: str,
    missing: list[str],
    unexpected: list[str],
    differing: list[str],
    pretrained: tuple[Path, TrainState],
) -> None:
    path, _ = pretrained
    model = Encoder(7)
    model.extra = nn.Linear(2, 2, bias=False)
    state = init(make_step(model), model)
    then = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(StateMismatchError, match="Name those that both have") as failure:
        load_weights(path, state, match=match)
    assert (failure.value.missing, failure.value.unexpected) == (missing, unexpected)
    assert set(differing) <= set(failure.value.differing)
    assert all(torch.equal(then[name], tensor) for name, tensor in model.state_dict().items())
    assert not state.params.is_stale


def test_another_dtype_does_not_fit(pretrained: tuple[Path, TrainState]) -> None:
    path, _ = pretrained
    model = Encoder(OUT).double()
    with pytest.raises(StateMismatchError, match="here float64"):
        load_weights(path, init(make_step(model), model), match="encoder.0.*")


@pytest.mark.parametrize("match", ["encodre.*", [], ["a", "b"]])
def test_a_pattern_that_nothing_matches_is_refused(match: Any, pretrained: tuple[Path, TrainState]) -> None:
    path, _ = pretrained
    _, _, state = fresh(OUT)
    with pytest.raises(SettingError, match=r"load_weights\(match\).*There is encoder\.0\.weight"):
        load_weights(path, state, match=match)
    assert not state.params.is_stale


@pytest.mark.parametrize("match", [5, None, ["a", 1], {"a": 1}], ids=repr)
def test_what_is_no_pattern_is_refused(match: Any, pretrained: tuple[Path, TrainState]) -> None:
    path, _ = pretrained
    with pytest.raises(SettingError, match=r"load_weights\(match\) must be a pattern on tensor names"):
        load_weights(path, started()[2], match=match)


def test_the_average_of_a_checkpoint_can_be_loaded_and_that_of_a_file_is_the_file(
    pretrained: tuple[Path, TrainState],
) -> None:
    path, before = pretrained
    _, model, state = fresh(OUT)
    if path.is_file():
        with pytest.raises(SettingError, match="left out for a file"):
            load_weights(path, state, average="average")
        return
    load_weights(path, state, average="average")
    assert torch.equal(model.head.weight, averaged(before).params["head.weight"])
    assert not torch.equal(model.head.weight, before.params["head.weight"])


def test_a_state_that_was_made_by_hand_can_be_loaded_into(tmp_path: Path) -> None:
    run = training(tmp_path)
    _, _, state = started(seed=4)
    by_hand = attrs.evolve(state.copy(), slots={})
    path = CheckpointStore(tmp_path).latest()
    assert path is not None
    loaded = load_weights(path, by_hand)
    assert torch.equal(loaded.params["4.weight"], run.state.params["4.weight"])


def test_where_there_is_no_file_that_is_said(tmp_path: Path) -> None:
    _, _, state = started()
    with pytest.raises(CheckpointError, match="no checkpoint and no file"):
        load_weights(tmp_path / "nowhere", state)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_weights(tmp_path, state)


def test_an_export_of_a_checkpoint_gives_the_model_that_was_evaluated(tmp_path: Path) -> None:
    model = a_model()
    run = training(tmp_path)
    path = CheckpointStore(tmp_path).latest()
    assert path is not None
    export(load_checkpoint(path), tmp_path / "model.safetensors")
    safetensors.torch.load_model(model, tmp_path / "model.safetensors")
    trained_model = a_model(1)
    run.state.load_into(trained_model)
    x = batches(1)[0][0]
    assert torch.equal(model.eval()(x), trained_model.eval()(x))
