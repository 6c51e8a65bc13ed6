"""`__all__` is what is there, each name has one public home, and the reference knows every name."""

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import pipeline

ROOT = Path(__file__).parent.parent


def below(package: ModuleType) -> Iterator[ModuleType]:
    """Yield each public module below `package`; what lies in a private package is private."""
    for info in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if not info.name.rpartition(".")[2].startswith("_"):
            module = importlib.import_module(info.name)
            yield module
            if info.ispkg:
                yield from below(module)


MODULES = {module.__name__: module for module in [pipeline, *below(pipeline)]}
each_module = pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)


def public_names(module: ModuleType) -> list[str]:
    return list(getattr(module, "__all__", ()))


def defined_in(module: ModuleType) -> set[str]:
    """Name each public class and function that `module` defines; imported ones carry another `__module__`."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(inspect.unwrap(value)))
        and value.__module__ == module.__name__
    }


@cache
def reference() -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in sorted(ROOT.glob("docs/reference/*.md")))


def in_reference(name: str) -> bool:
    """Tell whether the reference has `name`, `name(…)` or `pipeline.….name` in backticks."""
    return re.search(rf"`(?:[\w.]+\.)?{re.escape(name)}[`(\[]", reference()) is not None


def assigned_to_all(tree: ast.Module) -> Iterator[ast.expr | None]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
                yield node.value


@each_module
def test_all_is_a_literal(module: ModuleType) -> None:
    # A literal is what type checkers and readers can see; that it is sorted is ruff's rule RUF022, which also mends it.
    assert module.__file__ is not None
    values = list(assigned_to_all(ast.parse(Path(module.__file__).read_text(encoding="utf-8"))))
    assert len(values) == 1, f"{module.__name__} sets __all__ {len(values)} times, expected once"
    assert isinstance(values[0], ast.List | ast.Tuple)
    names = [ast.literal_eval(element) for element in values[0].elts]
    assert names == public_names(module)
    assert len(names) == len(set(names))


@each_module
def test_every_public_name_resolves(module: ModuleType) -> None:
    missing = [name for name in public_names(module) if not hasattr(module, name)]
    assert missing == []


@each_module
def test_what_a_module_defines_without_an_underscore_is_in_its_all(module: ModuleType) -> None:
    assert defined_in(module) - set(public_names(module)) == set()


@each_module
def test_every_public_name_stands_in_the_reference(module: ModuleType) -> None:
    missing = [name for name in public_names(module) if not in_reference(name)]
    assert missing == [], f"docs/reference/ does not have these names of {module.__name__}, in backticks"


def homes() -> dict[str, set[str]]:
    """Map each public name to the modules that own it.

    A package that hands out what its own submodule defines is the one home of both; `pipeline` itself hands out all.
    """
    found: dict[str, set[str]] = defaultdict(set)
    for module in MODULES.values():
        if module is not pipeline:
            for name in public_names(module):
                found[name].add(module.__name__)
    for name, modules in found.items():
        for inner in list(modules):
            handed_out = (
                getattr(MODULES[outer], name) is getattr(MODULES[inner], name)
                for outer in modules
                if inner.startswith(outer + ".")
            )
            if any(handed_out):
                modules.discard(inner)
    return found


# One idea on two kinds of thing: those of monitors and of streams are always written with their package before them.
TWO_HOMES = {
    "every": {"pipeline.combinators", "pipeline.monitors"},
    "filter": {"pipeline.monitors", "pipeline.stream"},
    "map": {"pipeline.monitors", "pipeline.stream"},
    "repeat": {"pipeline.combinators", "pipeline.stream"},
}


def test_each_name_has_one_public_home() -> None:
    assert {name: modules for name, modules in homes().items() if len(modules) > 1} == TWO_HOMES


def test_the_top_level_only_hands_out_what_has_its_home_below() -> None:
    owners = homes()
    strangers = [
        name
        for name in public_names(pipeline)
        if f"pipeline.{name}" not in MODULES
        and not any(getattr(MODULES[owner], name) is getattr(pipeline, name) for owner in owners.get(name, ()))
    ]
    assert strangers == []


@pytest.mark.parametrize("names", ["pipeline", "pipeline.monitors, pipeline.events"])
def test_these_imports_leave_torch_out(names: str) -> None:
    # In a fresh interpreter: this one has torch already.
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
