"""The manifest of a checkpoint's folder: what files it holds, and what a list shows of it.

`format` and `sha256` stay in the manifests of all versions, so that each version can tell a later one from a damaged
one. Nothing that a manifest says leads out of its folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from cattrs.preconf.json import make_converter

from pipeline.checkpoint._disk import check_regular
from pipeline.errors import CheckpointError, CheckpointFormatError, DamagedCheckpointError

__all__ = ["FORMAT", "MANIFEST", "STATE", "Head", "Manifest", "Sealed", "is_tensors", "read_manifest", "tensors_name"]

FORMAT = 1
MANIFEST, STATE = "manifest.json", "state.json"
_TENSORS = re.compile(r"tensors-[0-9]{5,}\.safetensors")


def tensors_name(number: int) -> str:
    """The name of a file of tensors."""
    return f"tensors-{number:05d}.safetensors"


def is_tensors(name: str) -> bool:
    """Whether a file of this name holds tensors."""
    return _TENSORS.fullmatch(name) is not None


@attrs.frozen
class Head:
    """What a list shows of a checkpoint: the counts, when and why it was saved, what was measured, by which run."""

    micro_step: int
    update: int
    epoch: int
    time: float
    reasons: tuple[str, ...]
    measures: Mapping[str, float]
    run: str
    versions: Mapping[str, str]


@attrs.frozen
class Sealed:
    """A file as it was written."""

    size: int
    sha256: str


@attrs.frozen
class Manifest:
    """What a folder holds."""

    files: Mapping[str, Sealed]
    head: Head

    @property
    def size(self) -> int:
        """Bytes of all the files."""
        return sum(sealed.size for sealed in self.files.values())

    def to_json(self) -> str:
        """The text of it, with its own digest."""
        form: dict[str, Any] = {"format": FORMAT, **_CONVERTER.unstructure(self)}
        return json.dumps({**form, "sha256": _digest(form)}, indent=1, allow_nan=False)


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else repr(value)  # JSON has no NaN; `float` reads it back


_CONVERTER = make_converter(detailed_validation=False)
_CONVERTER.register_unstructure_hook(float, _number)


def _digest(form: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in form.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest, with its own digest checked.

    Raises: CheckpointError where there is no such folder, DamagedCheckpointError, CheckpointFormatError.
    """
    if not os.path.isdir(folder):
        raise CheckpointError(f"there is no checkpoint {folder} that can be read")
    try:
        check_regular(folder / MANIFEST)
        form: Any = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        whole, version = form["sha256"] == _digest(form), form["format"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(str(folder), f"{MANIFEST} cannot be read ({error!r})") from error
    if not whole:
        raise DamagedCheckpointError(str(folder), f"{MANIFEST} is not as it was written")
    if version != FORMAT:
        raise CheckpointFormatError(str(folder), version, FORMAT)
    try:
        manifest = _CONVERTER.structure(form, Manifest)
    except Exception as error:  # whatever the converter makes of what no version has written
        raise DamagedCheckpointError(str(folder), f"{MANIFEST} is none ({error!r})") from error
    strange = [name for name in manifest.files if name != STATE and not is_tensors(name)]
    if strange or STATE not in manifest.files:
        raise DamagedCheckpointError(str(folder), f"{MANIFEST} lists {strange or 'no ' + STATE}")
    return manifest
