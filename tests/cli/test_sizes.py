"""Sizes as people write them."""

import pytest

from weightsync.cli.output import seconds_words
from weightsync.cli.sizes import parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4096", 4096),
        ("13.5GB", 13_500_000_000),
        ("5GiB", 5 << 30),
        (" 800 mb ", 800_000_000),
        ("1k", 1000),
        ("2Ti", 2 << 40),
        (".5G", 500_000_000),
    ],
)
def test_sizes(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "1XB", "-1", "1iB", "1.2.3G", "\u0661GB"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="is no size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-1, "0.0 s"), (0.42, "0.4 s"), (42, "42 s"), (300, "5 min"), (9000, "2 h"), (1e6, "12 days")],
)
def test_times(seconds, words):
    assert seconds_words(seconds) == words
