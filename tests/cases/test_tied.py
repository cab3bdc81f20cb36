"""Tied weights and shared storage: cases T."""

import warnings

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.conftest import assert_all_same, assert_same, copy_of, read, send


def qwen(**config):
    transformers = pytest.importorskip("transformers")
    return transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            **config,
        )
    )


EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("iterator", ["module", "state_dict", "named_parameters"])
def test_t1_a_tied_model(ends, iterator):
    """T1: the embedding's bytes go once; the receiver's head still shares them; no warning."""
    model, target = qwen(tie_word_embeddings=True), qwen(tie_word_embeddings=True)
    weights = {
        "module": model,
        "state_dict": model.state_dict(),
        "named_parameters": dict(model.named_parameters()),
    }[iterator]
    addresses = {name: tensor.data_ptr() for name, tensor in target.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sender, receiver = ends.pair(weights, target)
        report = sender.update_weights(version=1)
        applied = receiver.poll_and_apply()
    manifest, _ = read(ends, report.version)
    assert report.tensors == len(dict(model.named_parameters()))
    assert report.nbytes == sum(parameter.nbytes for parameter in model.parameters())
    assert HEAD not in manifest.by_name
    assert applied.missing == applied.unexpected == ()
    assert target.lm_head.weight is target.model.embed_tokens.weight
    assert {n: t.data_ptr() for n, t in target.state_dict().items()} == addresses
    assert_all_same(target.state_dict(), model.state_dict())


def test_t1_tied_by_configuration_alone(ends):
    """Promise 2: what the configuration calls tied, and is not, is sent as it is."""
    model, target = qwen(tie_word_embeddings=True), qwen(tie_word_embeddings=False)
    model.lm_head.weight = nn.Parameter(torch.rand(32, 16))
    sender, receiver = ends.pair(model, target)
    report = sender.update_weights(version=1)
    assert report.tensors == len(model.state_dict())
    receiver.poll_and_apply()
    assert_same(target.lm_head.weight, model.lm_head.weight)
    assert_same(target.model.embed_tokens.weight, model.model.embed_tokens.weight)


def test_t1_tied_here_and_not_there(ends):
    """A tied trainer, an engine with two tensors: both get the values."""
    model, target = qwen(tie_word_embeddings=True), qwen(tie_word_embeddings=False)
    sender, receiver = ends.pair(model, target)
    sender.update_weights(version=1)
    receiver.poll_and_apply()
    assert_same(target.lm_head.weight, model.model.embed_tokens.weight)
    assert target.lm_head.weight.data_ptr() != target.model.embed_tokens.weight.data_ptr()
    assert receiver.verify_weights().ok


def test_t1_untied_while_it_runs(ends):
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    target = {"embed.weight": torch.zeros(5, 3), "head.weight": torch.zeros(5, 3)}
    sender, receiver = ends.pair(model, target)
    assert sender.update_weights(version=1).tensors == 1
    receiver.poll_and_apply()
    model["head"].weight = nn.Parameter(torch.full((5, 3), 9.0))
    assert sender.update_weights(version=2).tensors == 2
    receiver.poll_and_apply()
    assert_all_same(target, dict(model.state_dict()))


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1d = nn.Conv1d(4, 6, 1, bias=False)
        self.register_buffer("conv_weights", self.conv1d.weight.detach().view(6, 4))
        self.register_buffer("first_row", self.conv1d.weight.detach()[0], persistent=False)


def test_t4_a_view_stays_a_view(ends):
    """T4: the buffer lies inside the parameter, and shows the new values."""
    model, target = Convolution(), Convolution()
    for value in (3.0, 4.0):
        model.conv1d.weight.data.copy_(torch.rand(6, 4, 1) + value)
        sender, receiver = ends.pair(model, target)
        sender.update_weights(version=1)
        receiver.poll_and_apply()
        base = target.conv1d.weight
        assert_same(base, model.conv1d.weight)
        for view in (target.conv_weights, target.first_row):
            offset = view.data_ptr() - base.data_ptr()
            assert 0 <= offset < base.nbytes
            assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        assert_same(target.conv_weights, base.detach().view(6, 4))
        assert_same(target.first_row, base.detach()[0])
        ends.shutdown()


def test_t4_a_view_that_was_not_sent(ends):
    """Only the base is sent: the view shows it, and counts as missing under its own name."""
    target = Convolution()
    sent = {"conv1d.weight": torch.rand(6, 4, 1)}
    sender, receiver = ends.pair(sent, target, receiver={"strict": False})
    sender.update_weights(version=1)
    receiver.poll_and_apply()
    assert_same(target.conv_weights, sent["conv1d.weight"].view(6, 4))


def test_parts_of_one_storage_are_not_tied(ends):
    """Fused parameters cut into views: each is sent, each arrives."""
    fused = torch.rand(6, 4)
    sent = {"q": fused[:2], "k": fused[2:4], "v": fused[4:], "all": fused, "t": fused.t()}
    before = copy_of(fused)
    target = {name: torch.zeros(tensor.shape) for name, tensor in sent.items()}
    sender, receiver = ends.pair(sent, target)
    assert sender.update_weights(version=1).tensors == 5
    receiver.poll_and_apply()
    assert_all_same(target, sent)
    assert_same(fused, before)


def test_a_conjugate_or_negated_view_is_no_tie(ends):
    z = torch.randn(4, dtype=torch.complex64)
    x = torch.randn(4)
    _, sent = send(ends, {"z": z, "conj": z.conj(), "x": x, "neg": torch._neg_view(x)})
    assert torch.equal(sent["conj"], z.conj().resolve_conj())
    assert torch.equal(sent["neg"], -x)


def test_a_view_that_becomes_a_negated_one_is_looked_at_again(ends):
    x = torch.randn(4)
    source = {"x": x}
    target = {"x": torch.zeros(4)}
    sender, receiver = ends.pair(source, target)
    sender.attach(receiver)
    sender.update_weights(version=1)
    source["x"] = torch._neg_view(x)
    sender.update_weights(version=2)
    assert torch.equal(target["x"], -x)


@pytest.mark.parametrize(
    "views",
    [lambda: (b := torch.zeros(6), {"a": b[:4], "b": b[2:]})[1],
     lambda: (w := torch.zeros(2, 2), {"a": w, "b": w.t()})[1]],
    ids=["neighbours", "transposed"],
)  # fmt: skip
def test_engine_tensors_that_overlap_get_what_agrees_and_nothing_else(ends, views):
    target = views()
    shape = target["a"].shape
    sender = ends.sender()
    receiver = ends.receiver(target)
    sender.attach(receiver)
    ones = {"a": torch.ones(shape), "b": torch.ones(shape)}
    sender.update_weights(ones, version=1)
    assert receiver.verify_weights().ok
    bad = {"a": torch.ones(shape), "b": torch.arange(4.0).reshape(shape)}
    with pytest.raises(ws.ReceiverError, match="shares memory"):
        sender.update_weights(bad, version=2)
    assert receiver.status().state == "rolled back"
    assert all(tensor.eq(1).all() for tensor in target.values())
