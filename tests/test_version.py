import pytest

from weightsync.version import Version


def test_ordered_as_a_pair():
    """A restarted trainer is newer, whatever step it resumes from."""
    assert Version(2, 0) > Version(1, 1_000_000) > Version(1, 999_999)
    assert max([Version(1, 3), Version(2, 1), Version(1, 9)]) == (2, 1)


@pytest.mark.parametrize("version", [Version(0, 0), Version(1_700_000_000, 12)])
def test_round_trip(version):
    assert Version.parse(str(version)) == version
    assert Version.parse(list(version)) == version
    assert Version.parse(version) == version


@pytest.mark.parametrize(
    "value",
    [
        None, 5, 1.5, True, b"1:2", {}, {1, 2},
        "", ":", "1", "1:", ":2", "1:2:3", "-1:2", "1:-2", "+1:2", "1 :2", "1:2\n", "1_0:2",
        "1.0:2", "0x1:2", "\u00b2:1", "\u0661:\u0662", "9" * 5000 + ":1",
        [], [1], [1, 2, 3], [1, "2"], [1.0, 2], [True, 2], [1, False], [-1, 2], [1, None],
    ],
)  # fmt: skip
def test_refused(value):
    with pytest.raises(ValueError):  # noqa: PT011 - the type is all that is promised
        Version.parse(value)
