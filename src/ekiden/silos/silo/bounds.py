"""Sums that tell nothing about rows: each column has the scale of its bounds in the study's schema."""

from ekiden.core.base.errors import UserError, listed
from ekiden.core.tasks import Classification, ScaledTask
from ekiden.readers import schema as schemas
from ekiden.readers.kinds import Table
from ekiden.readers.moments import ColumnMoments, ColumnSums, target
from ekiden.readers.schema import Column
from ekiden.silos.silo.silo_file import SiloFile


def sums(file: SiloFile) -> ColumnSums:
    """Return what a silo reports in place of sums of its rows: the schema's categories, and a few
    numbers spread evenly between the schema's bounds.

    Raises:
        UserError: there is no schema that bounds every column.
    """
    if not file.schema:
        raise UserError(
            f"{file.path}: --bounds tells those of the study's schema: name it by data.schema"
        )
    schema = schemas.parse(file.schema)
    dataset, _ = file.unscaled()
    table = Table.of(dataset.inputs)
    least = dataset.least
    columns = schema.columns
    moments = {name: _spread(columns[name], least) for name in table.numeric}
    if isinstance(dataset.task, ScaledTask):
        moments |= {target(name): _spread(columns[name], least) for name in dataset.classes}
    # a row without a value is told apart from others, whether or not the silo has one
    missing = {name: 0 if columns[name].required else least for name in table.numeric}
    categories = dict[str, dict[str, int]]()
    for name in table.categorical:
        known = columns[name].categories
        gap = () if columns[name].required or not known else ("",)
        categories[name] = dict.fromkeys((*gap, *known), least)
    classes = dict.fromkeys(schema.classes or (), least)
    lacking = [name for name, found in moments.items() if not found.count]
    lacking += [name for name, found in categories.items() if not found]
    if isinstance(dataset.task, Classification) and not classes:
        lacking.append("label")
    if lacking:
        raise UserError(
            f"{file.path}: --bounds needs least and most, or categories, of {listed(lacking)} in "
            "the schema"
        )
    return ColumnSums(moments, missing, categories, table.dates, table.missing, file.name, classes)


def _spread(column: Column, count: int) -> ColumnMoments:
    """Return the moments of numbers that are spread evenly between bounds; empty without bounds."""
    if column.least is None or column.most is None:
        return ColumnMoments()
    low = column.number(column.least)
    high = column.number(column.most)
    return ColumnMoments(count, (low + high) / 2, count * (high - low) ** 2 / 12)
