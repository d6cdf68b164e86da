"""Names that clients may have."""

import unicodedata

import pytest

from ekiden import UserError
from ekiden.core.engine.setup import check_clients
from ekiden.methods import FedAvg
from ekiden.runs.tracking import check_names


@pytest.mark.parametrize(
    ("names", "refused"),
    [
        (["h" * 201], "has 201 bytes: use 200 at most"),
        (["病" * 67], "has 201 bytes: use 200 at most"),
        (["病" * 66], ""),
        (["North", "north"], "'North' and 'north' have one file"),
        (["a", "a "], "have one file"),
        ([unicodedata.normalize(form, "Köln") for form in ("NFC", "NFD")], "have one file"),
        (["north", "south", "مستشفى"], ""),
    ],
)
def test_names_that_are_no_files_of_their_own_are_refused(names: list[str], refused: str) -> None:
    sizes = dict.fromkeys(names, (9, 0, 0))
    if not refused:
        return check_clients(sizes, FedAvg())
    with pytest.raises(UserError, match=refused) as refusal:
        check_clients(sizes, FedAvg())
    assert "\n" not in str(refusal.value)
    return None


def test_names_that_a_tracker_makes_one_are_refused() -> None:
    check_names(["tensorboard"], ["a#b", "a:b"])
    check_names(["mlflow"], ["a-b", "a b"])
    with pytest.raises(UserError, match="mlflow writes 'a#b' and 'a:b' as one name"):
        check_names(["mlflow"], ["a#b", "a:b"])
