"""Which bytes of a layout are needed, and where they are kept: compared byte by byte."""

import numpy as np
import pytest

from weightsync.selection import Selection, cut

NBYTES = 100_000


def rows(*pairs):
    begin, length = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return begin, length


def random_rows(seed):
    """Whole tensors, blocks of rows, blocks of columns and tiny pieces, some of them twice."""
    generator = np.random.default_rng(seed)
    pairs = []
    for _ in range(generator.integers(1, 12)):
        begin = int(generator.integers(0, NBYTES - 9_000))
        kind = generator.integers(4)
        if kind == 0:
            pairs.append((begin, int(generator.integers(1, 5_000))))
        elif kind == 1:
            width, count = int(generator.integers(1, 60)), int(generator.integers(2, 40))
            pitch = width + int(generator.integers(1, 100))
            pairs += [(begin + number * pitch, width) for number in range(count)]
        else:
            pairs.append((begin, int(generator.integers(0, 40))))
        if generator.random() < 0.2:
            pairs.append(pairs[-1])
    generator.shuffle(pairs)
    return rows(*pairs)


def kept(selection, layout, size):
    """What copying window by window leaves in the memory that keeps the selection."""
    memory = np.zeros(selection.nbytes, dtype=np.uint8)
    for blocks in selection.windows(size):
        number = blocks[0].place // size
        for block in blocks:
            for row in range(block.count):
                begin = block.begin + row * block.pitch
                place = block.place + row * block.place_pitch
                assert number * size <= place
                assert place + block.width <= (number + 1) * size
                assert not memory[place : place + block.width].any()
                memory[place : place + block.width] = layout[begin : begin + block.width]
            assert block.end == begin + block.width
    return memory


@pytest.mark.parametrize("size", [64, 1024, 1 << 20])
@pytest.mark.parametrize("seed", range(20))
def test_every_byte_that_is_needed_is_where_it_is_said_to_be(seed, size):
    begin, length = random_rows(seed)
    selection = Selection.of(begin, length, NBYTES)
    layout = np.random.default_rng(seed).integers(1, 256, NBYTES, dtype=np.uint8)
    memory = kept(selection, layout, size)
    place = selection.places(begin[length > 0])
    assert (place % 16 == begin[length > 0] % 16).all()
    for at, offset, count in zip(place, begin[length > 0], length[length > 0], strict=True):
        assert (memory[at : at + count] == layout[offset : offset + count]).all()
    needed = np.zeros(NBYTES, dtype=bool)
    for offset, count in zip(begin, length, strict=True):
        needed[offset : offset + count] = True
    assert np.count_nonzero(memory) == (NBYTES if selection.whole else needed.sum())


def test_runs_are_sorted_apart_and_joined():
    selection = Selection.of(*rows((500, 10), (0, 100), (50, 60), (110, 5), (700, 0)), NBYTES)
    assert selection.begin.tolist() == [0, 500]
    assert selection.length.tolist() == [115, 10]
    assert not selection.whole
    assert selection.nbytes == 128 + 16


def test_nearly_everything_is_kept_as_it_is():
    selection = Selection.of(*rows((0, NBYTES // 2), (NBYTES * 6 // 10, NBYTES // 2)), NBYTES)
    assert selection.whole
    assert selection.nbytes == NBYTES
    assert selection.places(np.array([5, 77_777])).tolist() == [5, 77_777]


def test_who_needs_nothing_keeps_nothing():
    selection = Selection.of(*rows((5, 0)), NBYTES)
    assert selection.nbytes == 0
    assert not selection.windows(1024)
    assert len(selection.places(np.zeros(0, dtype=np.int64))) == 0


def test_nothing_of_nothing():
    assert not Selection.everything(0).windows(1024)
    assert not Selection.of(*rows(), 0).windows(1024)


def test_a_block_of_columns_is_one_copy():
    """A rank's half of every row: two dimensions, whatever the number of rows."""
    begin = np.arange(1000, dtype=np.int64) * 64
    selection = Selection.of(begin, np.full(1000, 32), NBYTES)
    (blocks,) = selection.windows(1 << 20)
    (block,) = blocks
    assert (block.begin, block.width, block.count) == (0, 32, 1000)
    assert (block.pitch, block.place_pitch) == (64, 32)


def test_runs_are_cut_at_the_borders_of_windows():
    begin, length, place = cut(np.array([1000, 9]), np.array([20, 0]), np.array([5, 40]), 10)
    assert begin.tolist() == [1000, 1005, 1015]
    assert length.tolist() == [5, 10, 5]
    assert place.tolist() == [5, 10, 20]


def test_bytes_that_were_not_selected_have_no_place():
    selection = Selection.of(np.array([64, 1000]), np.array([10, 100]), 4000)
    for offset in (0, 63, 74, 999, 1100, 3999):
        with pytest.raises(IndexError):
            selection.places(np.array([64, offset]))
    assert len(selection.places(np.array([64, 73, 1000, 1099]))) == 4
