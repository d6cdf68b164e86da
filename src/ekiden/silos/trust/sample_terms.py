"""What the samples of all silos of a run have in common."""

from dataclasses import dataclass

from ekiden.core.base.checks import Count, Positive
from ekiden.core.data.augment import Augment
from ekiden.readers.kinds import Images, terms

_NOT_AUGMENTED = Augment()
_IMAGES = terms(Images())


@dataclass(frozen=True, kw_only=True)
class SampleTerms:
    """What the samples of all silos have in common; empty before silos have said what they hold."""

    # name of the data set, for the record
    dataset: str = ""
    # shape of one sample
    shape: tuple[Count, ...] = (1,)
    # names of the classes
    classes: tuple[str, ...] = ()
    # per channel, subtracted after scaling bytes to [0, 1]
    mean: tuple[float, ...] = ()
    # per channel, divided by
    std: tuple[Positive, ...] = ()
    # how training batches are augmented
    augment: Augment = _NOT_AUGMENTED
    # what the samples are, see `ekiden.readers.kinds.terms`
    inputs: str = _IMAGES
    # what the labels mean, see `ekiden.core.tasks.terms`
    task: str = ""
    # the study's schema, which the data of all silos meet, as `Schema.text` gives it; empty if there
    # is none
    schema: str = ""

    def difference(self, other: "SampleTerms", *but: str) -> str:
        """Return what has to be equal and differs, and what to do; empty if all is equal. The names
        in `but` are not compared.
        """
        for what, do in _ALIKE.items():
            here = getattr(self, what)
            there = getattr(other, what)
            if here == there or what in but:
                continue
            if isinstance(here, str):
                return f"{what}; {do}"
            return f"{what}: {str(here)[:300]} and {str(there)[:300]}; {do}"
        return ""


_ALIKE = {
    "shape": 'make them equal; of images, set size, and colour = "rgb" or "grey", in [data] of all silos',
    **dict.fromkeys(("classes", "mean", "std", "augment"), "make them equal"),
    "schema": "name one schema in [data] of all silos, or agree by `ekiden federation agree --schema`",
    "task": "name one task in [data] of all silos, and agree on the scale of targets by `ekiden silo sums`",
    "inputs": "use the same columns and options in [data] of all silos, and the same data.agreed",
}
"""in what silos have to agree, and what to do if they do not"""
