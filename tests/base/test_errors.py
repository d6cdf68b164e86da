"""Messages about unknown names."""

from ekiden.base.errors import unknown


def test_the_nearest_name_comes_first() -> None:
    assert str(unknown("fruit", "aple", ["pear", "apple"])) == (
        "unknown fruit 'aple': did you mean 'apple'? Known: apple, pear."
    )


def test_where_nothing_is_known_the_name_is_to_be_left_out() -> None:
    assert str(unknown("entry", "more", [])) == "unknown entry 'more': leave it out"
