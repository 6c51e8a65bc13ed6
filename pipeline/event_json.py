"""The JSON form of an event: an object with the event's class under "event" and its fields beside it.

What is written reads back equal. NaN and the infinities are `NaN`, `Infinity` and `-Infinity`, as in Python's `json`,
jq, pandas and DuckDB; strict JSON has no form for them. This module knows no torch. Nothing is imported or called
because of what a text says: only classes that the reader was given are made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, SupportsFloat, Union, get_args, get_origin, get_type_hints

import attrs
from cattrs.fns import identity
from cattrs.gen import make_dict_structure_fn_from_attrs, make_dict_unstructure_fn_from_attrs
from cattrs.preconf.json import JsonConverter, make_converter

from pipeline import events
from pipeline.errors import DamagedLogError, EventFormError, LogFormatError, SettingError, UnknownEventError
from pipeline.events import Event

__all__ = ["EventJson"]

FORMAT = 1
"""The version of the form: another one wherever a line would read back as another event than before."""

Entry = dict[str, Any]

_OWN: Mapping[str, type[Event]] = {name: getattr(events, name) for name in events.__all__}


@attrs.frozen
class EventJson:
    """Events to JSON and back.

    The library's own events leave out the fields that are at their default; those of others are written whole.
    A field's annotation says what it comes back as: tuples as tuples, mappings as dicts, enums, times, records in
    records. Where it says `Any`, the value comes back as JSON has it: a tuple as a list.

    Args:   types: event classes, besides those of `pipeline.events`, that may be read. Any may be written.
    Raises: SettingError for what is no event class and for two of one name, EventFormError for one that JSON has no
            form for, both when built.
    """

    types: tuple[type[Event], ...] = attrs.field(default=(), converter=tuple)
    _forms: Mapping[str, _Form] = attrs.field(
        init=False, eq=False, repr=False, default=attrs.Factory(lambda self: _by_name(self.types), takes_self=True)
    )

    def encode(self, event: Event, *, first: bool = False) -> str:
        """The event in one line; the `first` of a log says the version of the form too.

        Raises: EventFormError for an event that holds what JSON has no form for.
        """
        name, form = type(event).__name__, _form(type(event))
        head: Entry = {"event": name, "format": FORMAT} if first else {"event": name}
        try:
            return _ENCODER.encode(head | form.to_entry(event))
        except (TypeError, ValueError) as error:
            cure = "Give events numbers, strings, and lists or mappings of them."
            raise EventFormError(name, str(error), cure) from error

    def decode(self, text: str | bytes) -> Event:
        """The event that was written as `text`.

        Raises: DamagedLogError, UnknownEventError, LogFormatError.
        """
        try:
            entry = json.loads(text if isinstance(text, str) else text.decode())
        except ValueError as error:
            raise DamagedLogError(f"it is not JSON: {error}") from None
        return self.event(entry)

    def event(self, entry: Any) -> Event:
        """The event of an object that was read from JSON, and that is used up by this."""
        name = entry.pop("event", None) if isinstance(entry, dict) else None
        if not isinstance(name, str):
            raise DamagedLogError('it has no "event"')
        if "format" in entry:
            _check_format(entry.pop("format"))
        form = self._forms.get(name)
        if form is None:
            raise UnknownEventError(name)
        try:
            return form.to_event(entry)
        except Exception as error:  # whatever a hook, or a validator of the user's, makes of a value
            raise DamagedLogError(form.misfit(entry, error)) from error


def _check_format(version: object) -> None:
    if not isinstance(version, int) or version > FORMAT:
        raise LogFormatError(version, FORMAT)


def _by_name(types: tuple[type[Event], ...]) -> Mapping[str, _Form]:
    """How to read the library's events and these."""
    known = dict(_OWN)
    for cls in types:
        if not (isinstance(cls, type) and issubclass(cls, Event)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SettingError("EventJson.types", "subclasses of Event", cls)
        if known.setdefault(cls.__name__, cls) is not cls:
            raise SettingError("EventJson.types", f"of other names than {known[cls.__name__]!r}", cls)
    return {name: _form(cls) for name, cls in known.items()}


@attrs.frozen
class _Form:
    """How one class of events is written and read."""

    name: str
    keys: Mapping[str, bool]  # and whether it must be there
    to_entry: Callable[[Event], Entry]
    to_event: Callable[[Entry], Event]

    def misfit(self, entry: Entry, error: Exception) -> str:
        """Why no event of this class can be made of that."""
        missing = [key for key, required in self.keys.items() if required and key not in entry]
        strange = [key for key in entry if key not in self.keys]
        if missing:
            return f"{self.name} lacks {', '.join(missing)}"
        return f"{self.name} has no {', '.join(strange)}" if strange else f"{self.name} gave {error!r}"


@lru_cache
def _form(cls: type[Event]) -> _Form:
    name, own = cls.__name__, _OWN.get(cls.__name__) is cls
    if name in _OWN and not own:
        raise EventFormError(repr(cls), "the library has an event of this name", "Give the class another one.")
    fields = _fields(cls)
    keys = {field.alias or field.name: field.default is attrs.NOTHING for field in fields}
    for key in ("event", "format"):
        if key in keys:
            raise EventFormError(name, f"{key!r} has a meaning of its own there", "Give the field another name.")
    write = make_dict_unstructure_fn_from_attrs(
        fields, cls, _CONVERTER, _cattrs_omit_if_default=own, _cattrs_use_alias=True
    )
    read = make_dict_structure_fn_from_attrs(
        fields, cls, _CONVERTER, _cattrs_forbid_extra_keys=True, _cattrs_use_alias=True
    )
    return _Form(name, keys, write, lambda entry: read(entry, cls))


def _fields(cls: type[Event]) -> list[attrs.Attribute[Any]]:
    """The fields, with annotations that are strings resolved; in copies, so that the class stays as it is."""
    try:
        hints = get_type_hints(cls, include_extras=True)
    except (NameError, AttributeError, TypeError) as error:
        cure = "What its annotations name must be there when it is defined, not for the type checker alone."
        raise EventFormError(cls.__name__, f"its annotations cannot be read ({error})", cure) from error
    return [field.evolve(type=hints.get(field.name, Any)) for field in attrs.fields(cls) if field.init]


_SCALARS: tuple[object, ...] = (int, float, str, bool, NoneType, Any, object, SupportsFloat)


def _is_json(kind: Any) -> bool:
    """Tell whether JSON has values of this annotation as they are."""
    origin, args = get_origin(kind) or kind, get_args(kind)
    if origin in (dict, Mapping):
        return not args or (args[0] is str and _is_json(args[1]))
    if origin in (list, Union, UnionType):
        return all(map(_is_json, args))
    return any(kind is scalar for scalar in _SCALARS)


def _is_tuple_of_json(kind: Any) -> bool:
    return (get_origin(kind) or kind) is tuple and all(arg is ... or _is_json(arg) for arg in get_args(kind))


def _write_as_it_is(_: object) -> Callable[[Any], Any]:
    return identity


def _read_as_it_is(_: object) -> Callable[[Any, object], Any]:
    return lambda value, _: value


def _read_whole(value: Any, _: type[int]) -> int:
    if isinstance(value, (bool, float)):
        raise TypeError(f"{value!r} is no whole number")
    return int(value)  # the keys of an object are strings


def _converter() -> JsonConverter:
    """What cattrs knows of JSON, and beyond it: values of other types are written as numbers, and come back as such."""
    converter = make_converter(detailed_validation=False, structure_fallback_factory=_read_as_it_is)
    converter.register_unstructure_hook_factory(lambda kind: _is_json(kind) or _is_tuple_of_json(kind), _write_as_it_is)
    converter.register_structure_hook_factory(_is_json, _read_as_it_is)
    converter.register_structure_hook(int, _read_whole)
    return converter


_CONVERTER = _converter()


def _plain(value: Any) -> Any:
    """What `json` does not know, as what it does."""
    if attrs.has(type(value)):
        return attrs.asdict(value, recurse=False)
    if isinstance(value, Mapping):
        return dict(value)  # pyright: ignore[reportUnknownVariableType]
    if hasattr(value, "tolist"):  # tensors and arrays, those of one number too
        return value.tolist()
    if hasattr(value, "__float__"):
        return float(value)
    written = _CONVERTER.unstructure(value)  # enums, times, paths, sets
    if written is value:
        raise TypeError(f"it holds {value!r}")
    return written


_ENCODER = json.JSONEncoder(default=_plain, separators=(",", ":"))
