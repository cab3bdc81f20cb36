"""What messages and reports call things."""

import pytest
import torch

import weightsync as ws
from weightsync.words import (
    a_kind,
    address_of,
    by_reason,
    one_line,
    size,
    without_secrets,
)


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


def test_a_token_is_no_part_of_what_is_said_of_a_run():
    one = ws.NCCLScheme(token="hidden words", backend="gloo")
    several = ws.FallbackScheme([one, ws.DiskScheme("/tmp/run42", keep=7)])
    for scheme in (one, several):
        said = without_secrets(scheme.to_url())
        assert "hidden" not in said
        assert "words" not in said
        assert "token=***" in said
        assert f":{one.master_port}" in said
    assert "keep=7" in said
    for url in (
        "shm:///dev/shm/run42?slots=3",
        "disk:///mnt/a@b?cache=/mnt/c@d",
        "nccl://h:1?x=a@b",
    ):
        assert without_secrets(url) == url


def test_urls_of_stores_without_user_and_password():
    store = ws.DiskScheme("s3://user:hidden@host:9000/bucket/run")
    for scheme in (store, ws.FallbackScheme([ws.DoubleBufferScheme("/dev/shm/run42"), store])):
        said = without_secrets(scheme.to_url())
        assert "user" not in said
        assert "hidden" not in said
        assert "//***@host" in said
    for user in ("user:hidden", "user:#hidden", "user:,hidden", "user%3Ahid%2Fden", "u@x:hidden"):
        assert without_secrets(f"s3://{user}@host/bucket") == "s3://***@host/bucket"


def test_errors_that_name_a_run_do_not_tell_its_token(ends):
    other = ws.NCCLScheme(backend="gloo", token="hidden")
    sender, receiver = ends.pair({"a": torch.ones(1)}, {"a": torch.ones(1)})
    with pytest.raises(ws.WeightSyncError, match="publishes to shm://") as attached:
        sender.attach(other.create_receiver({"a": torch.ones(1)}))
    with pytest.raises(ws.WeightSyncError) as switched:
        receiver.switch(other, timeout=0.1)
    with pytest.raises(ws.SchemeError, match="begins nothing") as parsed:
        ws.scheme_from_url(f"{other.to_url()}#x")
    for error in (attached, switched, parsed):
        assert "hidden" not in str(error.value)


@pytest.mark.parametrize(
    "url", ["disk://s3://me:{}@host/run#x", "s3//me:{}@host", "nccl:h?token={}#x"]
)
@pytest.mark.parametrize("secret", ["hush" * 100, "#hush"])
def test_an_error_has_no_secret_of_its_url(url, secret):
    with pytest.raises(ws.SchemeError) as error:
        ws.scheme_from_url(url.format(secret))
    assert "hush" not in str(error.value)


def test_an_address_has_no_secret_of_its_url():
    assert address_of("nccl://10.0.0.5:29500?token=hush&verify=1") == "nccl://10.0.0.5:29500"
    assert address_of("disk://s3://me:hush@bucket/run") == "disk://s3://bucket/run"
    assert address_of("disk://s3%3A//me%3Ahush%40bucket/run") == "disk://s3%3A//bucket/run"
    assert address_of("shm:///dev/shm/a@b") == "shm:///dev/shm/a@b"


def test_one_line_of_an_error_has_its_kind():
    assert one_line(ValueError("no\n  room")) == "ValueError: no room"
    assert one_line("a\nb") == "a b"
