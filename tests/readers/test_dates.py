"""Dates in any form that the user names, and cells that are not dates."""

import numpy as np
import pandas
import pytest
import torch

from ekiden.core.base.errors import DataWarning, UserError
from ekiden.data import federate
from ekiden.readers.kinds import Table
from tests.readers.one_column import column, read, refuses

pytestmark = pytest.mark.usefixtures("no_data")
DAYS = pandas.date_range("2024-01-05", periods=40, freq="3D")


def test_dates_are_days() -> None:
    wanted = column(DAYS.to_pydatetime().tolist())
    assert read(wanted)[0] == 19727
    found = column(DAYS.strftime("%Y-%m-%d").tolist())
    assert torch.equal(found.train.x, wanted.train.x)
    assert isinstance(found.inputs, Table)
    assert found.inputs.dates == ("v",)


@pytest.mark.parametrize(
    "form", ["%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d %b %Y", "%B %d, %Y", "%Y/%m/%d", "%d-%m-%y"]
)
def test_dates_in_another_form_are_read_if_it_is_named(form: str) -> None:
    cells = DAYS.strftime(form).tolist()
    refuses(
        "holds dates in another form .*say how they are written, as by dates=",
        lambda: column(cells),
    )
    assert torch.equal(
        column(cells, dates=form).train.x, column(DAYS.to_pydatetime().tolist()).train.x
    )
    refuses("dates is a pattern", lambda: column(cells, dates="day-first"))


def test_what_is_no_date_or_none_at_all_is_named() -> None:
    refuses(
        "dates, but also text .'31.02.2024' in row 0",
        lambda: column(["31.02.2024", "30.01.2024", "29.01.2024"] * 10, dates="%d.%m.%Y"),
    )
    far = [*DAYS.date, *[pandas.Timestamp("2999-12-31").date()] * 2]
    with pytest.warns(DataWarning, match=r"holds 2999-12-31 in 2 rows, .* missing='2999-12-31'"):
        column(far)
    for dates in (far, [str(day) for day in far]):
        assert np.isnan(read(column(dates, missing="2999-12-31"))).sum() >= 1
    refuses(
        "dates, but also text .'30.01.2024' in row 1",
        lambda: column(["2024-02-28", "30.01.2024"] * 10),
    )
    refuses(
        "holds dates, but also text .'unknown' in row 1",
        lambda: column(["2024-02-28", "unknown", "2024-03-01"] * 10),
    )


def test_a_date_in_another_form_is_named_with_its_silo() -> None:
    def part(form: str) -> pandas.DataFrame:
        return pandas.DataFrame(
            {"seen": DAYS.strftime(form), "label": ["ab"[k % 2] for k in range(40)]}
        )

    refuses(
        "column 'seen' of silo client-1 holds dates in another form",
        lambda: federate([part("%Y-%m-%d"), part("%d.%m.%Y"), part("%m/%d/%Y")]),
    )
    numbers = part("%Y-%m-%d").assign(seen=range(20240101, 20240141))
    refuses(
        "column 'seen' of silo client-1 holds numbers, but .* dates",
        lambda: federate([part("%Y-%m-%d"), numbers]),
    )
    data = federate(
        [part("%Y-%m-%d"), part("%Y-%m-%d").assign(seen=DAYS + pandas.Timedelta("1D"))]
    )  # shown alike
    with pytest.raises(
        UserError, match=r"column 'seen' .* holds numbers .* but dates are expected"
    ):
        data.dataset.inputs.encode({"seen": [20240101]})
