"""Every public transform and combinator is on the list that the laws run over."""

import inspect

from pipeline import combinators, compilation, optim, transform, transforms
from tests.laws.cases import CASES

NOT_TRANSFORMS = {
    "UpdateRule",
    "global_norm",
    "normalised_norm",
    "Chain",
    "Transform",
    "Group",
    "Rate",
    "layer_decay",
    "averaged",
    "no_decay",
    "Compiled",
    "EagerPartWarning",
    "Graph",
}


def test_every_public_transform_is_on_the_list() -> None:
    homes = (transforms, combinators, transform, optim, compilation)
    public = {name for home in homes for name in home.__all__} - NOT_TRANSFORMS
    covered = frozenset().union(*(case.covers for case in CASES))
    assert public <= covered, f"not on the list of tests/laws/cases.py: {sorted(public - covered)}"


def test_every_transform_class_says_what_it_reads_and_writes_in_its_docstring() -> None:
    for name in transforms.__all__:
        cls = getattr(transforms, name)
        if inspect.isclass(cls) and name not in NOT_TRANSFORMS:
            assert cls.reads, name
            assert cls.writes, name
            assert "Reads:" in (cls.__doc__ or ""), name
            assert "Writes:" in (cls.__doc__ or ""), name
