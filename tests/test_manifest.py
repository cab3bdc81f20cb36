"""Layout, fingerprint and validation of manifests."""

import contextlib
import json
import pickle

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.errors import ManifestError
from weightsync.manifest import ALIGNMENT, DTYPES, Manifest, ParamSpec, describe

ENTRIES = [
    ("a", torch.float32, (3, 5)),
    ("scalar", torch.int64, ()),
    ("empty", torch.bfloat16, (0, 7)),
    ("b", torch.uint8, (65,)),
]

shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
entries = st.lists(
    st.tuples(st.text(min_size=1, max_size=8), st.sampled_from(sorted(DTYPES)), shapes),
    max_size=12,
    unique_by=lambda entry: entry[0],
)


def document(**changes):
    """A valid manifest's JSON, with fields of its first tensor changed."""
    document = json.loads(Manifest.build(ENTRIES, {"tied": "a"}).to_json())
    document["tensors"][0].update(changes)
    return document


def read(document):
    return Manifest.from_json(json.dumps(document).encode())


def sealed(document):
    """With the fingerprint that belongs to it, so that only the content can be refused."""
    tensors = [
        [t["name"], t["dtype"], t["shape"], t["offset"], t["nbytes"]] for t in document["tensors"]
    ]
    body = json.dumps([tensors, document["aliases"], document["nbytes"]]).encode()
    return {**document, "fingerprint": xxhash.xxh3_128_hexdigest(body)}


def test_layout():
    manifest = Manifest.build(ENTRIES, {"tied": "a"})
    assert [spec.offset for spec in manifest.tensors] == [0, 64, 128, 128]
    assert [spec.nbytes for spec in manifest.tensors] == [60, 8, 0, 65]
    assert manifest.nbytes == 128 + 65
    assert manifest.names() == ["a", "scalar", "empty", "b", "tied"]
    assert manifest.spec("tied") is manifest.spec("a")
    with pytest.raises(KeyError):
        manifest.spec("nobody")


@settings(deadline=None, max_examples=100)
@given(entries)
def test_layout_never_overlaps_and_round_trips(entries):
    manifest = Manifest.build((name, DTYPES[dtype], shape) for name, dtype, shape in entries)
    end = 0
    for spec, (name, dtype, shape) in zip(manifest.tensors, entries, strict=True):
        assert (spec.name, spec.dtype, spec.shape) == (name, DTYPES[dtype], shape)
        assert spec.nbytes == torch.empty(shape, dtype=DTYPES[dtype]).nbytes
        assert spec.offset >= end
        assert spec.offset % ALIGNMENT == 0
        end = spec.offset + spec.nbytes
    assert manifest.nbytes == end
    again = Manifest.from_json(manifest.to_json())
    assert again == manifest
    assert again.fingerprint == manifest.fingerprint


def test_no_tensors():
    manifest = Manifest.build([])
    assert manifest.nbytes == 0
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_every_dtype_but_the_quantised_ones():
    every = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    left = {str(dtype).removeprefix("torch.") for dtype in every - set(DTYPES.values())}
    assert left == {"qint8", "qint32", "quint8", "quint2x4", "quint4x2"}


def test_a_pickled_manifest_is_equal():
    manifest = Manifest.build(ENTRIES, {"tied": "a"})
    manifest.fingerprint, manifest.by_name  # noqa: B018 - cached values travel too
    assert pickle.loads(pickle.dumps(manifest)) == manifest


@pytest.mark.parametrize(
    "other",
    [
        [("A", torch.float32, (3, 5)), *ENTRIES[1:]],
        [("a", torch.int32, (3, 5)), *ENTRIES[1:]],
        [("a", torch.float32, (5, 3)), *ENTRIES[1:]],
        ENTRIES[:-1],
        ENTRIES[::-1],
    ],
)
def test_the_fingerprint_sees_every_difference(other):
    assert Manifest.build(other).fingerprint != Manifest.build(ENTRIES).fingerprint
    assert Manifest.build(other) != Manifest.build(ENTRIES)


def test_the_fingerprint_sees_aliases():
    one, other, none = ({"t": "a"}, {"t": "b"}, {})
    prints = {Manifest.build(ENTRIES, aliases).fingerprint for aliases in (one, other, none)}
    assert len(prints) == 3


@pytest.mark.parametrize(
    ("entries", "aliases", "words"),
    [
        ([("a", torch.float32, (1,)), ("a", torch.int8, (2,))], {}, "two tensors are called 'a'"),
        ([("", torch.float32, (1,))], {}, "without a name"),
        ([(5, torch.float32, (1,))], {}, "5"),
        ([(None, torch.float32, (1,))], {}, "None"),
        ([("a", torch.quint8, (1,))], {}, "'a'.*quint8"),
        ([("a", torch.float32, (-1,))], {}, "'a'.*negative"),
        ([("a", torch.float32, (-1, -1))], {}, "'a'.*negative"),
        ([("a", torch.float32, (1 << 50,))], {}, "bytes"),
        ([("a", torch.float32, (1,))], {"b": "c"}, "'b'"),
        ([("a", torch.float32, (1,))], {"a": "a"}, "'a'"),
        ([("a", torch.float32, (1,))], {"": "a"}, "empty"),
        ([("a", torch.float32, (1,))], {"b": "a", "c": "b"}, "'c'"),
        ([("a", torch.float32, (1,))], {5: "a"}, "5"),
    ],
)
def test_build_refuses(entries, aliases, words):
    with pytest.raises(ManifestError, match=words):
        Manifest.build(entries, aliases)


@pytest.mark.parametrize(
    "name", ["a/b", "../x", "/etc/x", "n" * 300, "a\0b", "CON", "größe", "\ud800", " ", "\n"]
)
def test_any_text_is_a_name(name):
    """X4: names are data, never paths."""
    manifest = Manifest.build([(name, torch.int8, (1,))], {name + "'": name})
    assert Manifest.from_json(manifest.to_json()) == manifest


@pytest.mark.parametrize(
    "changes",
    [
        {"name": None},
        {"name": 1},
        {"name": ""},
        {"name": ["a"]},
        {"name": "b"},
        {"dtype": "quint8"},
        {"dtype": "Float32"},
        {"dtype": "__class__"},
        {"dtype": 5},
        {"dtype": []},
        {"shape": None},
        {"shape": "35"},
        {"shape": {"3": 5}},
        {"shape": [3.0, 5]},
        {"shape": [True, 15]},
        {"shape": [-3, -5]},
        {"shape": [3, 5, 2]},
        {"shape": [15] + [1] * 64},
        {"shape": [1 << 60, 0]},
        {"offset": 1},
        {"offset": -64},
        {"offset": 64},
        {"offset": "0"},
        {"offset": False},
        {"offset": None},
        {"offset": 1 << 60},
        {"nbytes": 61},
        {"nbytes": 0},
        {"nbytes": 60.0},
        {"nbytes": float("nan")},
    ],
    ids=str,
)
def test_foreign_tensors_are_refused(changes):
    """Also with a fingerprint that fits: the content alone must not be believed."""
    with pytest.raises(ManifestError):
        read(sealed(document(**changes)))


@pytest.mark.parametrize("field", ["tensors", "aliases", "nbytes", "fingerprint"])
@pytest.mark.parametrize("value", [None, 7, "x", [], {}, [[]], [None], {"a": 1}, True, 1e9])
def test_foreign_fields_are_refused(field, value):
    changed = document()
    changed[field] = value
    with pytest.raises(ManifestError):
        read(changed)
    del changed[field]
    with pytest.raises(ManifestError, match=field):
        read(changed)


@pytest.mark.parametrize("field", ["name", "dtype", "shape", "offset", "nbytes"])
def test_a_missing_field_is_refused(field):
    changed = document()
    del changed["tensors"][1][field]
    with pytest.raises(ManifestError, match=field):
        read(changed)


@pytest.mark.parametrize(
    "aliases", [{"b": "a"}, {"x": "y"}, {"": "a"}, {"x": None}, {"x": "tied", "tied": "a"}]
)
def test_foreign_aliases_are_refused(aliases):
    with pytest.raises(ManifestError):
        read(sealed({**document(), "aliases": aliases}))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 100,
        b"null",
        b"5",
        b'"text"',
        b"[]",
        b"{}",
        b"NaN",
        b"\xff\xfe\xfd",
        b"[" * 200_000,
        b'{"tensors": ' + b"9" * 10_000 + b"}",
        pickle.dumps({"tensors": []}),
    ],
    ids=lambda data: repr(data[:12]),
)
def test_what_is_no_manifest_is_refused(data):
    with pytest.raises(ManifestError):
        Manifest.from_json(data)


def test_another_fingerprint_is_refused():
    with pytest.raises(ManifestError, match="fingerprint"):
        read({**document(), "fingerprint": "0" * 32})


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_truncated_and_flipped_manifests_are_refused(data):
    """X1: a damaged manifest raises ManifestError and nothing else, or says the same."""
    original = Manifest.build(ENTRIES, {"tied": "a"})
    damaged = bytearray(original.to_json())
    at = data.draw(st.integers(0, len(damaged) - 1))
    if data.draw(st.booleans()):
        del damaged[at:]
    else:
        damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(ManifestError):
        assert Manifest.from_json(bytes(damaged)) == original


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@settings(deadline=None, max_examples=200)
@given(st.data(), json_values)
def test_type_confusion_is_refused(data, value):
    """X1: any field of any tensor replaced by any JSON value."""
    changed = document()
    place = data.draw(st.sampled_from([changed, *changed["tensors"], changed["aliases"]]))
    place[data.draw(st.sampled_from(sorted(place)))] = value
    with contextlib.suppress(ManifestError):
        assert json.loads(read(changed).to_json()) == document()


def test_messages():
    assert describe(torch.bfloat16, torch.Size([4, 8])) == "bfloat16[4, 8]"
    assert str(ParamSpec("a", torch.int8, (), 0, 1)) == "int8[]"
    with pytest.raises(ManifestError) as caught:
        Manifest.build([("n" * 100_000, torch.quint8, ())])
    assert len(str(caught.value)) < 400
