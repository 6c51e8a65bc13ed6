"""`Checkpoint`: all that a run needs to go on, as a record."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

import attrs
import torch
from cattrs.preconf.json import make_converter
from torch import Tensor

from pipeline import events
from pipeline.checkpoint._folder import Written
from pipeline.checkpoint._manifest import Head
from pipeline.checkpoint._pieces import put_together, taken_apart
from pipeline.errors import CheckpointError
from pipeline.event_json import EventJson
from pipeline.events import Event
from pipeline.place import Place
from pipeline.records import TrainState

__all__ = ["Checkpoint"]

_NOTHING: Mapping[str, Any] = {}
_CONVERTER = make_converter()


@attrs.frozen(eq=False)
class Checkpoint:
    """All that a run needs to go on from between two micro-batches as if it had not stopped.

    `state`, the open window's sums included; `place`, where the loop stands; `stream`, where the stream does, if it
    keeps a place; `accumulators` of the monitors, by name; `told`, how many events monitors and sinks have been given;
    `pending`, those that they were not given yet, the first `under_way` of which come before the others; `is_told_of`,
    whether an event tells of this; `reasons`, why it was saved; `time`, when; `measures`, what evaluations gave for
    these very weights; `run`, which tells one run from another that begins anew.
    """

    state: TrainState
    place: Place = attrs.field(factory=Place)
    stream: Any = None
    accumulators: Mapping[str, Any] = _NOTHING
    told: int = 0
    pending: tuple[Event, ...] = ()
    under_way: int = 0
    is_told_of: bool = True
    reasons: tuple[str, ...] = ()
    time: float = 0.0
    measures: Mapping[str, float] = _NOTHING
    run: str = ""

    def taken_apart(self) -> Written:
        """Tensors and plain JSON: the tensors are the state's very own.

        Raises: CheckpointError for what has no form there.
        """
        shelf: dict[str, Tensor] = {}
        try:
            form = self._form(shelf)
        except RecursionError as error:
            raise CheckpointError("what a monitor or a slot keeps is nested too deeply, or holds itself") from error
        progress = self.state.progress
        head = Head(
            progress.micro_steps,
            progress.updates,
            progress.epoch,
            self.time,
            self.reasons,
            self.measures,
            self.run,
            _versions(),
        )
        return Written(shelf, form, head)

    def _form(self, shelf: dict[str, Tensor]) -> dict[str, Any]:
        """All but the head as plain JSON, its tensors on the shelf."""
        encode = EventJson().encode
        return {
            "state": taken_apart(self.state, "", shelf),
            "place": _CONVERTER.unstructure(self.place),
            "stream": taken_apart(self.stream, "stream", shelf),
            "accumulators": {
                name: taken_apart(value, f"monitor {name!r}", shelf) for name, value in self.accumulators.items()
            },
            "told": self.told,
            "pending": [encode(event) for event in self.pending],
            "under_way": self.under_way,
            "is_told_of": self.is_told_of,
        }

    @classmethod
    def put_together(cls, written: Written) -> Checkpoint:
        """The checkpoint that was taken apart. Events in it are made of the classes that are defined by now.

        Raises: CheckpointError for what is none.
        """
        form, head, shelf = written.state, written.head, written.tensors
        try:
            state = put_together(form["state"], shelf)
            if not isinstance(state, TrainState):
                raise TypeError(f"the state is a {type(state).__name__}")
            return cls(
                state=state,
                place=_CONVERTER.structure(form["place"], Place),
                stream=put_together(form["stream"], shelf),
                accumulators={name: put_together(value, shelf) for name, value in form["accumulators"].items()},
                told=int(form["told"]),
                pending=tuple(_events(form["pending"])),
                under_way=int(form["under_way"]),
                is_told_of=bool(form["is_told_of"]),
                reasons=head.reasons,
                time=head.time,
                measures=head.measures,
                run=head.run,
            )
        except Exception as error:  # whatever comes of a file that somebody else has written
            raise CheckpointError(f"the checkpoint holds what cannot be read: {error!r}") from error


def _events(texts: Iterable[str]) -> Iterator[Event]:
    names = {json.loads(text)["event"] for text in texts}
    own = [cls for name, cls in _defined(Event).items() if name in names and name not in events.__all__]
    return map(EventJson(tuple(own)).decode, texts)


def _defined(base: type[Event]) -> dict[str, type[Event]]:
    """The event classes that are defined by now, the newest of each name: a file imports none."""
    found: dict[str, type[Event]] = {}
    for cls in base.__subclasses__():
        found |= {cls.__name__: cls, **_defined(cls)}
    return found


def _versions() -> dict[str, str]:
    return {"foldtrain": version("foldtrain"), "torch": torch.__version__, "python": platform.python_version()}
