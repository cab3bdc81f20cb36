"""What messages and reports call things."""

import pytest

from weightsync.words import a_kind, by_reason, size


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.00 kB"), (4_200_000, "4.20 MB"),
     (13_476_000_000, "13.48 GB"), (2_000_000_000_000, "2000.00 GB")],
)  # fmt: skip
def test_small_sizes_are_not_zero_of_a_large_unit(nbytes, words):
    assert size(nbytes) == words


@pytest.mark.parametrize(("value", "words"), [(5, "an int"), ("x", "a str"), (None, "a NoneType")])
def test_a_kind_has_the_article_that_it_is_spoken_with(value, words):
    assert a_kind(value) == words


def test_things_of_one_reason_are_named_together_the_first_of_them():
    reasons = {f"layer{n}": "packed" for n in range(6)} | {"head": "tied", "a": "x", "b": "y"}
    assert by_reason(reasons) == (
        "layer0, layer1, layer2, layer3 and 2 more (packed); head (tied); a (x); "
        "1 more for other reasons"
    )
    assert by_reason({}) == ""
