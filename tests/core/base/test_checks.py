"""What fields of dataclasses may be, for all methods and settings at once."""

import copy
import pickle
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ekiden import Augment, Hardware, Training, UserError
from ekiden.core.base.checks import (
    BelowOne,
    Checked,
    Count,
    CountOrZero,
    Fraction,
    NonNegative,
    Positive,
    Range,
    allows,
    checked,
)
from ekiden.core.engine.method import Method
from ekiden.data import Dirichlet, Pathological, Reading
from ekiden.methods import METHODS, FedELMY, FedGram, FedSeq, FedTasuki, MAEcho
from ekiden.runs.plan import Plan
from ekiden.runs.recipe import Recipe
from ekiden.silos.coordinator.remote_plan import RemotePlan
from tests.lab.conformance.ridge import Ridge

KINDS: tuple[type[Any], ...] = (*METHODS, Ridge, Training, Hardware)
SETTINGS: list[Checked] = [kind() for kind in KINDS]
SETTINGS += [Recipe(FedSeq()), Plan(Recipe(FedSeq())), RemotePlan(Recipe(FedSeq())), Reading()]
WRONG: dict[object, list[object]] = {
    int: ["3", 3.5, True, None, [1], float("nan")],
    float: ["x", "0.1", True, None, float("nan"), float("inf"), -float("inf"), 10**400],
    bool: [1, 0, "yes", None, 1.0],
    str: [3, None, True, ["a"], b"a"],
    Literal: ["no such choice", None, 1, True],
    tuple: ["0.5", 0.5, None, [float("nan")], ["x"], {"a": 1}],
    tuple[str, ...]: [3, None, [3], {"a": 1}],
    get_type_hints(Training)["loop"]: [3, None, True, ["a"]],
}


def base(hint: object) -> object:
    """Which check a hint asks for."""
    if get_origin(hint) is Annotated:
        return base(get_args(hint)[0])
    return hint if hint in WRONG else get_origin(hint) or hint


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: type(settings).__name__)
def test_every_field_refuses_values_that_it_cannot_have(settings: Any) -> None:
    hints = get_type_hints(type(settings), include_extras=True)
    for f in fields(settings):
        for value in WRONG.get(base(hints[f.name]), []):
            with pytest.raises(UserError) as raised:
                replace(settings, **{f.name: value})
            text = str(raised.value)
            assert f.name in text
            assert ": it must be " in text
            assert len(text.splitlines()) == 1


def test_every_field_of_a_method_can_be_checked() -> None:
    for settings in SETTINGS:
        for f in fields(settings):  # type: ignore[arg-type]
            hint = get_type_hints(type(settings), include_extras=True)[f.name]
            known = (
                base(hint) in WRONG
                or hint in (Training, Hardware, Reading)
                or None.__class__ in get_args(hint)
            )
            assert known or f.name in ("method", "recipe"), (
                f"{type(settings).__name__}.{f.name}: {hint}"
            )


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.title())
def test_counts_of_methods_are_not_negative(kind: type[Method]) -> None:
    for f in fields(kind):
        if isinstance(f.default, int) and not isinstance(f.default, bool):
            with pytest.raises(UserError, match=f"{f.name} -1 is out of range"):
                kind(**{f.name: -1})
    for name in {"epochs", "rounds"} & {f.name for f in fields(kind)}:
        with pytest.raises(UserError, match=f"{name} 0 is out of range: it must be 1 or more"):
            kind(**{name: 0})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedELMY(form="papr"), "form 'papr' is unknown: it must be one of paper, released"),  # type: ignore[arg-type]
        (
            lambda: Training(select="lastt"),  # type: ignore[arg-type]
            "select 'lastt' is unknown: it must be one of best, last, tail",
        ),
        (
            lambda: Hardware(precision="fp16"),  # type: ignore[arg-type]
            "precision 'fp16' is unknown: it must be one of float32, bf16",
        ),
        (
            lambda: FedSeq(epochs="3"),  # type: ignore[arg-type]
            "epochs '3' is of the wrong type: it must be a whole number, 1 or more",
        ),
        (lambda: Training(lr=-1), "lr -1 is out of range: it must be greater than 0"),
        (
            lambda: Training(momentum=1),
            "momentum 1 is out of range: it must be 0 or more and below 1",
        ),
        (
            lambda: Training(std=(1.0, 0.0)),
            "std (1.0, 0.0) is out of range: it must be greater than 0",
        ),
        (
            lambda: FedSeq(epochs=-(10**30)),
            f"epochs -{'1' + 30 * '0'} is out of range: it must be 1 or more",
        ),
        (
            lambda: FedTasuki(recall=0.5, widen=0.5),
            "recall 0.5 is out of range: it must be with widen below 1",
        ),
        (lambda: MAEcho(step=2), "step 2 is out of range: it must be greater than 0 and below 2"),
        (
            lambda: Plan(Recipe("fedseq")),  # type: ignore[type-var]
            "method 'fedseq' is of the wrong type: it must be of type Method",
        ),
        (
            lambda: Recipe(FedSeq(), training={"lr": 1}),  # type: ignore[arg-type]
            "training {'lr': 1} is of the wrong type: it must be of type",
        ),
        (lambda: Dirichlet("0.5"), "beta '0.5' is of the wrong type: it must be a number"),  # type: ignore[arg-type]
        (
            lambda: Pathological(2.5),  # type: ignore[arg-type]
            "classes-per-client 2.5 is of the wrong type: it must be a whole number",
        ),
        (lambda: Augment(flip=1), "flip 1 is of the wrong type: it must be True or False"),  # type: ignore[arg-type]
        (
            lambda: Plan(Recipe(FedSeq()), clients=0),
            "clients 0 is out of range: it must be 1 or more",
        ),
        (
            lambda: Plan(Recipe(FedSeq()), clients="4"),  # type: ignore[arg-type]
            "clients '4' is of the wrong type: it must be a whole number, 1 or",
        ),
        (lambda: FedSeq(epochs=[1] * 99), "epochs [1, 1, 1, 1, 1, 1, ...] is of the wrong type"),  # type: ignore[arg-type]
    ],
)
def test_says_in_one_line_what_is_allowed(make: Any, message: str) -> None:
    with pytest.raises(UserError) as raised:
        make()
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


@dataclass(frozen=True)
class Strangers(Ridge):
    """A user's method with its own rules: fields are checked before these rules."""

    shares: tuple[Fraction, ...] = (0.5, 0.5)
    kind: Literal["a", "b"] = "a"
    anything: Any = None
    seen: list[str] = field(default_factory=list, compare=False)

    def __post_init__(self) -> None:
        if sum(self.shares) > 1:
            raise UserError("shares are more than 1")


def test_a_strangers_method_is_checked_without_calling_anything() -> None:
    assert Strangers(shares=[1], anything=object()).shares == (1.0,)  # type: ignore[arg-type]
    for wrong, message in (
        ({"shares": ["x"]}, "shares .* of the wrong type"),
        ({"shares": (0.5, 0.9)}, "more than 1"),
        ({"kind": "c"}, "kind 'c' is unknown"),
        ({"ridge": 0}, "ridge 0 is out of range: it must be greater than 0"),
    ):
        with pytest.raises(UserError, match=message):
            Strangers(**wrong)


@given(
    st.floats(allow_nan=False),
    st.sampled_from([Positive, NonNegative, Fraction, BelowOne, Count, CountOrZero]),
)
def test_a_range_holds_what_its_words_say(value: float, kind: Any) -> None:
    said = str(get_args(kind)[1])
    words = (
        said.replace("greater than", ">")
        .replace("above", ">")
        .replace("at least", ">=")
        .replace("at most", "<=")
    )
    parts = words.replace("below", "<").split(" and ")
    holds = [
        f"value >= {part.removesuffix(' or more')}" if "or more" in part else f"value {part}"
        for part in parts
    ]
    assert all(eval(part, {"value": value}) for part in holds) == (value in get_args(kind)[1])


def test_ranges_with_one_upper_bound() -> None:
    assert str(Range(most=3)) == "at most 3"
    assert 3 in Range(most=3)
    assert 4 not in Range(most=3)


def test_a_field_says_what_it_allows() -> None:
    assert [allows(FedELMY, "epochs", value) for value in (2, 0, 2.5, "2")] == [
        True,
        False,
        False,
        False,
    ]
    assert [allows(FedGram, "bits", value) for value in (2, 12, 32, 33)] == [
        False,
        True,
        True,
        False,
    ]


def test_arguments_of_functions_are_checked_likewise() -> None:
    @checked("free")
    def area(
        width: Positive, free: int = 0, *, unit: Literal["m", "km"] = "m"
    ) -> tuple[float, str, int]:
        return width, unit, free

    assert area(2, unit="km") == (2.0, "km", 0)
    assert area(2, "free")[2] == "free"  # type: ignore[arg-type, comparison-overlap]
    with pytest.raises(UserError, match=r"^width 0 is out of range: it must be greater than 0$"):
        area(0)
    with pytest.raises(UserError, match=r"^unit 'mile' is unknown: it must be one of m, km$"):
        area(1, unit="mile")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_name_that_no_field_has_is_one_line(kind: type[Any]) -> None:
    """With the nearest name, as on the command line."""
    first = fields(kind)[0].name if fields(kind) else "epochs"
    with pytest.raises(
        UserError, match=f"unknown setting of {kind.__name__} '{first}x': "
    ) as caught:
        kind(**{f"{first}x": 1})
    assert "\n" not in str(caught.value)
    assert (f"did you mean '{first}'" in str(caught.value)) == bool(fields(kind))
    default = kind()
    assert replace(default) == default
    assert (
        copy.deepcopy(default) == pickle.loads(pickle.dumps(default)) == default
    )  # as worker processes get it
