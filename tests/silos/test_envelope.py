"""What Flower puts around our bytes."""

import os

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'ekiden[flower]'")
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

from ekiden.silos.envelope import overhead, wrap


@pytest.mark.parametrize("length", [1, 1000, 5_242_880, 5_242_881, 12_000_000])
def test_overhead_is_what_flower_serialises(length: int) -> None:
    record = wrap(os.urandom(length))
    objects = get_all_nested_objects(record).values()
    total = sum(len(o.deflate()) for o in objects) + get_object_tree(record).ByteSize()
    assert abs(total - length - overhead(length)) < 32
    assert total > length
