"""Show who holds what as a picture."""

from pathlib import Path

from ekiden.core.base.files import disk_error
from ekiden.core.base.outside import require_extra
from ekiden.core.data.samples import FederatedData


def draw(fed: FederatedData, path: Path | str) -> None:
    """Write a picture of who holds what to a PNG file: brighter cells hold more samples.

    Raises:
        UserError: it cannot be written.
    """
    require_extra("report", "the picture", "matplotlib", "jinja2")
    # it needs the extra
    from ekiden.lab.reporting.figures import holders

    try:
        holders(fed).savefig(path, format="png", dpi=120)
    except OSError as error:
        raise disk_error(error, Path(path)) from None
