"""The JSON form of events: what is written reads back equal, and what cannot be is refused with a cure."""

from __future__ import annotations

import enum
import json
import math
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, SupportsFloat, get_args, get_origin, get_type_hints

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeline import errors, events
from pipeline._quick_events import quick_reader
from pipeline.event_json import FORMAT, EventJson
from pipeline.events import EpochEnded, EpochStarted, Event, RunEnded, UpdateDone

AT: Mapping[str, Any] = {"micro_step": 4, "update": 1, "epoch": 0, "time": 12.5}
OWN = [getattr(events, name) for name in events.__all__]

FLOATS, COUNTS, TEXTS = st.floats(), st.integers(-(2**70), 2**70), st.text(max_size=8)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Anything that a field of this annotation may hold."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Mapping:
        return st.dictionaries(TEXTS, values(args[1]), max_size=3)
    if origin is tuple:
        return st.lists(TEXTS, max_size=3).map(tuple) if ... in args else st.tuples(*map(values, args))
    if args:
        return st.one_of(*map(values, args))
    return {
        int: COUNTS, float: FLOATS, SupportsFloat: FLOATS | COUNTS, str: TEXTS, type(None): st.none(),
    }[hint]  # fmt: skip


@st.composite
def own_events(draw: st.DrawFn) -> Event:
    """One of the library's own, with some of its fields at their default."""
    cls = draw(st.sampled_from(OWN))
    hints = get_type_hints(cls)
    given_ = [f for f in attrs.fields(cls) if f.default is attrs.NOTHING or draw(st.booleans())]
    return cls(**{f.name: draw(values(hints[f.name])) for f in given_})


def same(a: object, b: object) -> bool:
    """Equal to the bit, NaN to NaN."""
    return type(a) is type(b) and repr(a) == repr(b)


def update(**more: Any) -> UpdateDone:
    given_ = {"loss": 1.0, "weight": 4, "micro_batches": 2, "rates": {"default": 0.1}, "grad_norm": 2.0}
    return UpdateDone(**{**AT, **given_, **more})


class TestOwnEvents:
    @given(event=own_events(), first=st.booleans())
    def test_what_is_written_reads_back_equal_to_the_bit(self, event: Event, first: bool) -> None:
        line = EventJson().encode(event, first=first)
        assert "\n" not in line
        assert line.isascii()
        assert same(EventJson().decode(line), event)

    @given(some=st.lists(own_events(), min_size=1, max_size=5))
    def test_the_quick_reader_reads_the_same_or_declines(self, some: list[Event]) -> None:
        lines = "".join(EventJson().encode(event) + "\n" for event in some).encode()
        found = quick_reader()(lines)
        assert found is None or same(list(found), some)

    @pytest.mark.parametrize("cls", OWN, ids=lambda cls: cls.__name__)
    def test_the_quick_reader_declines_no_event_of_plain_numbers(self, cls: type[Event]) -> None:
        plain = {int: 3, float: 0.5, SupportsFloat: 2, str: "a", Mapping: {}, tuple: ()}
        hints = get_type_hints(cls)
        required = [f.name for f in attrs.fields(cls) if f.default is attrs.NOTHING]
        event = cls(**{name: plain[get_origin(hints[name]) or hints[name]] for name in required})
        found = quick_reader()(EventJson().encode(event).encode() + b"\n")
        assert found is not None
        assert list(found) == [event] == [EventJson().decode(EventJson().encode(event))]

    def test_a_line_names_the_class_first_and_leaves_out_what_is_at_its_default(self) -> None:
        event = update(measures={"accuracy": (3.0, 4)})
        assert json.loads(EventJson().encode(event)) == {
            "event": "UpdateDone", **AT, "loss": 1.0, "weight": 4, "micro_batches": 2, "rates": {"default": 0.1},
            "grad_norm": 2.0, "measures": {"accuracy": [3.0, 4]},
        }  # fmt: skip
        assert EventJson().encode(event).startswith('{"event":"UpdateDone","micro_step":4,')

    def test_the_first_line_says_the_format_too(self) -> None:
        line = EventJson().encode(EpochStarted(**AT), first=True)
        assert line == '{"event":"EpochStarted","format":1,"micro_step":4,"update":1,"epoch":0,"time":12.5}'

    def test_what_a_missing_field_means_stays_as_it_is_in_this_format(self) -> None:
        # Who changes a default changes what old logs say: then FORMAT goes up, and reading the old one is a case apart.
        defaults = {
            cls.__name__: {f.name: f.default for f in attrs.fields(cls) if f.default is not attrs.NOTHING}
            for cls in OWN
        }
        assert (FORMAT, {name: fields for name, fields in defaults.items() if fields}) == (
            1,
            {
                "LossScaleChanged": {"part": None},
                "Diagnosis": {"subject": None},
                "MemoryMeasured": dict.fromkeys(
                    ("allocated_peak", "reserved_peak", "resident", "resident_peak")
                ),
                "MicroBatchDone": {"part": None},
                "RunStarted": {"total_updates": None},
                "UpdateDone": {
                    "clip_factor": 1.0, "samples": 0, "tokens": 0, "measures": {}, "facts": {}, "loss_scale": None,
                    "waited": 0.0, "part": None,
                },
                "UpdateSkipped": {"micro_batch": None, "parameter": None, "loss_scale": None, "part": None},
            },
        )  # fmt: skip

    def test_the_event_classes_are_left_as_they_were(self) -> None:
        EventJson().decode(EventJson().encode(update()))
        assert attrs.fields(UpdateDone).loss.type == "SupportsFloat"

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_what_is_not_finite_is_written_as_python_writes_it(self, value: float) -> None:
        line = EventJson().encode(update(grad_norm=value, facts={"x": value}, measures={"y": (value, 1.0)}))
        assert line == json.dumps(json.loads(line), separators=(",", ":"))
        event = EventJson().decode(line)
        assert isinstance(event, UpdateDone)
        assert repr([event.grad_norm, event.facts["x"], event.measures["y"][0]]) == repr([value] * 3)


@attrs.frozen(kw_only=True)
class Measured(Event):
    """Anything at all."""

    value: Any


class Colour(enum.Enum):
    RED = "red"


@attrs.frozen
class Spot:
    at: tuple[int, int]
    colour: Colour = Colour.RED


@attrs.frozen(kw_only=True)
class Rich(Event):
    """What people put into events."""

    names: tuple[str, ...] = ()
    by_layer: Mapping[int, float] = attrs.field(factory=dict)
    nested: Mapping[str, tuple[Spot, ...]] = attrs.field(factory=dict)
    colours: frozenset[Colour] = frozenset()
    when: datetime | None = None
    where: Path | None = None
    raw: bytes = b""
    kind: Literal["a", "b"] = "a"
    spots: list[Spot] = attrs.field(factory=list)
    _hidden: int = 0
    positive: float = attrs.field(default=1.0, validator=attrs.validators.gt(0))
    derived: int = attrs.field(init=False, default=7)


@attrs.frozen(kw_only=True, slots=False)
class LouderUpdate(UpdateDone):
    volume: float


RICH = [
    Rich(**AT),
    Rich(
        **AT,
        names=("a", "b"),
        by_layer={0: 0.5, 12: math.inf},
        nested={"x": (Spot((1, 2)), Spot((3, 4)))},
        colours=frozenset({Colour.RED}),
        when=datetime(2026, 1, 2, 3, 4, 5, 6),
        where=Path("runs/a"),
        raw=b"\x00\xff",
        kind="b",
        spots=[Spot((5, 6))],
        hidden=3,
        positive=0.25,
    ),
    LouderUpdate(**attrs.asdict(update(measures={"a": (1.0, 2.0)})), volume=11.0),
]


class TestUsersEvents:
    @pytest.mark.parametrize("event", RICH, ids=lambda event: type(event).__name__)
    def test_they_come_back_as_their_annotations_say(self, event: Event) -> None:
        form = EventJson([Rich, LouderUpdate])
        assert form.decode(form.encode(event)) == event

    def test_they_are_written_whole_so_that_another_default_changes_no_old_log(self) -> None:
        entry = json.loads(EventJson().encode(Rich(**AT)))
        assert entry.keys() - {"event", *AT} == {
            "names", "by_layer", "nested", "colours", "when", "where", "raw", "kind", "spots", "hidden", "positive",
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("value", "read"),
        [
            (torch.tensor(0.5), 0.5),
            (torch.tensor(0.5, requires_grad=True), 0.5),
            (torch.tensor([1, 2]), [1, 2]),
            (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
            (np.float32(0.5), 0.5),
            (np.int64(3), 3),
            (np.True_, True),
            (MappingProxyType({"a": torch.tensor(1.5)}), {"a": 1.5}),
            (EpochEnded(**AT, batches=3), {**AT, "batches": 3}),
            (Spot((1, 2)), {"at": [1, 2], "colour": "red"}),
            (Colour.RED, "red"),
            ({3}, [3]),
            (("a", 1), ["a", 1]),
            (2**80, 2**80),
            (None, None),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_under_any_a_value_comes_back_as_json_has_it(self, value: Any, read: Any) -> None:
        form = EventJson([Measured])
        event = form.decode(form.encode(Measured(**AT, value=value)))
        assert same(event, Measured(**AT, value=read))

    def test_a_measured_value_comes_back_as_the_number_that_a_fold_publishes(self) -> None:
        @attrs.frozen(kw_only=True)
        class Spread(Event):
            of: Tensor
            either: Tensor | float

        form = EventJson([Spread])
        written = form.encode(Spread(**AT, of=torch.tensor(0.5), either=torch.tensor(2.0)))
        assert form.decode(written) == Spread(**AT, of=0.5, either=2.0)
        assert attrs.fields(Spread).of.type == "Tensor"

    def test_a_validator_is_heard(self) -> None:
        form = EventJson([Rich])
        line = form.encode(Rich(**AT)).replace('"positive":1.0', '"positive":-1.0')
        with pytest.raises(errors.DamagedLogError, match=r"Rich gave ValueError.*'positive' must be > 0"):
            form.decode(line)


class TestRefused:
    @pytest.mark.parametrize(
        ("value", "says"),
        [
            (object(), "it holds <object object"),
            ({(1, 2): 3}, "keys must be str"),
            ({"deep": [{"x": 1j}]}, "it holds 1j"),
        ],
        ids=["object", "key", "deep"],
    )
    def test_an_event_that_json_has_no_form_for(self, value: Any, says: str) -> None:
        with pytest.raises(
            errors.EventFormError, match=rf"^Measured has no form in JSON: {says}.*Give events"
        ) as caught:
            EventJson().encode(Measured(**AT, value=value))
        assert isinstance(caught.value, TypeError)

    def test_a_class_of_a_name_that_is_taken(self) -> None:
        impostor = attrs.make_class("EpochEnded", {}, bases=(Event,), frozen=True, kw_only=True)
        with pytest.raises(errors.EventFormError, match=r"an event of this name.*Give the class another"):
            EventJson().encode(impostor(**AT))
        with pytest.raises(errors.SettingError, match="of other names than"):
            EventJson([impostor])
        twins = [attrs.make_class("Twin", {}, bases=(Event,)) for _ in range(2)]
        with pytest.raises(errors.SettingError, match="of other names than"):
            EventJson(twins)
        assert EventJson([Rich, Rich, UpdateDone]) == EventJson([Rich, Rich, UpdateDone])

    @pytest.mark.parametrize("not_a_class", [int, Rich(**AT), "Rich"])
    def test_what_is_no_event_class(self, not_a_class: Any) -> None:
        with pytest.raises(errors.SettingError, match="must be subclasses of Event"):
            EventJson([not_a_class])

    @pytest.mark.parametrize("name", ["event", "format"])
    def test_a_field_of_a_name_that_means_something_else(self, name: str) -> None:
        cls = attrs.make_class("Own", {name: attrs.field(default=0)}, bases=(Event,), kw_only=True)
        with pytest.raises(errors.EventFormError, match=f"{name!r} has a meaning of its own.*Give the field another"):
            EventJson([cls])

    def test_annotations_that_name_what_is_not_there(self) -> None:
        @attrs.frozen(kw_only=True)
        class Lost(Event):
            value: Nowhere  # type: ignore[name-defined]  # noqa: F821

        with pytest.raises(errors.EventFormError, match=r"annotations cannot be read \(name 'Nowhere' is not defined"):
            EventJson([Lost])

    @pytest.mark.parametrize(
        ("line", "says"),
        [
            ("", "it is not JSON"),
            ("{", "it is not JSON"),
            (b"\xff", "it is not JSON"),
            (b"\x00\x00\x00\x00", "it is not JSON: Expecting value"),
            ("3", 'it has no "event"'),
            ("[]", 'it has no "event"'),
            ("{}", 'it has no "event"'),
            ('{"event":["EpochStarted"]}', 'it has no "event"'),
            ('{"event":"EpochStarted"}', "EpochStarted lacks micro_step, update, epoch, time"),
            ('{"event":"EpochStarted","micro_step":1,"update":1,"epoch":0,"time":0,"x":1}', "EpochStarted has no x"),
            (
                '{"event":"EpochStarted","micro_step":1,"update":1.5,"epoch":0,"time":0}',
                r"EpochStarted gave TypeError\('1\.5 is no whole number'\)",
            ),
            (
                '{"event":"RunEnded","micro_step":1,"update":1,"epoch":0,"time":0,"reasons":3}',
                "RunEnded gave TypeError",
            ),
        ],
    )
    def test_a_line_that_is_no_event(self, line: str | bytes, says: str) -> None:
        with pytest.raises(errors.DamagedLogError, match=f"^this line is no event: {says}"):
            EventJson().decode(line)
        assert quick_reader()((line if isinstance(line, bytes) else line.encode()) + b"\n") is None

    def test_a_later_format_asks_for_a_later_version(self) -> None:
        line = EventJson().encode(EpochStarted(**AT), first=True)
        for later in ("2", '"1.1"'):
            with pytest.raises(errors.LogFormatError, match=r"knows up to 1\. Read it with a newer"):
                EventJson().decode(line.replace('"format":1', f'"format":{later}'))

    @pytest.mark.parametrize("name", ["Rich", "os", "torch.nn.Linear", "tests.test_event_json:Rich", "__class__", "x"])
    def test_a_class_that_was_not_handed_over_is_not_looked_for(self, name: str) -> None:
        before = set(sys.modules)
        with pytest.raises(errors.UnknownEventError, match=rf"types=\[{name}\].*skip_unknown=True") as caught:
            EventJson().decode(json.dumps({"event": name, **AT}))
        assert caught.value.event == name
        assert set(sys.modules) == before


@given(texts=st.lists(st.text(), max_size=3))
def test_any_text_stays_on_one_line(texts: list[str]) -> None:
    event = RunEnded(**AT, reasons=tuple(texts))
    line = EventJson().encode(event)
    assert len(line.splitlines()) == 1
    assert EventJson().decode(line) == event


def test_a_mapping_that_is_read_only_comes_back_as_a_dict() -> None:
    event = EventJson().decode(EventJson().encode(update(rates=MappingProxyType({"a": 0.5}))))
    assert event == update(rates={"a": 0.5})


def test_it_prints_as_it_was_written() -> None:
    assert repr(EventJson([Rich])) == f"EventJson(types=({Rich!r},))"
