"""Which scheme is chosen for what is seen, and that it works; hosts and GPUs are described here."""

import logging
from dataclasses import replace

import pytest
import torch

import weightsync as ws
from tests.conftest import WAIT
from weightsync.errors import WeightSyncError
from weightsync.placement import questions

HERE = replace(ws.Place.here(gpus=()), address="10.0.0.5", backends=("gloo", "nccl"))
FAR = replace(HERE, machine="another", host="far", pid=7, address="10.0.0.6", process="7-x")


def with_gpus(place, *gpus):
    return replace(place, gpus=gpus)


def model():
    return torch.nn.Linear(4, 4)


@pytest.fixture
def no_network(monkeypatch):
    monkeypatch.setattr("weightsync.placement.place._address", lambda: "127.0.0.1")


# -------------------------------------------------------------------- one host


def test_ends_of_one_process_share_memory_and_the_scheme_works():
    policy, engine = model(), model()
    choice = ws.choose(policy, engine)
    assert isinstance(choice.scheme, ws.DoubleBufferScheme)
    with choice.scheme.create_sender(policy) as sender:
        sender.connect()
        with choice.schemes[0].create_receiver(engine) as receiver:
            receiver.connect(timeout=WAIT)
            sender.update_weights(version=1)
            receiver.poll_and_apply(timeout=WAIT)
    assert torch.equal(policy.weight, engine.weight)


def test_processes_of_one_host_share_memory_also_if_they_have_gpus_of_their_own():
    choice = ws.choose(with_gpus(HERE, "a"), [with_gpus(HERE, "b"), with_gpus(HERE, "c")])
    assert isinstance(choice.scheme, ws.DoubleBufferScheme)


def test_what_cannot_be_read_where_it_was_written_is_not_shared(no_network, monkeypatch):
    def nothing(question):
        raise FileNotFoundError("no such file")

    monkeypatch.setitem(questions._ANSWERS, "find", nothing)
    with pytest.raises(ws.SchemeError, match=r"to this process's Linear(?s:.*)does not find it"):
        ws.choose(None, model())


def test_memory_without_room_for_the_weights_is_not_used(no_network):
    room = r"- /dev/shm has [\d,]+ bytes of room, and 2,000,000,000,000,000 are needed"
    with pytest.raises(ws.SchemeError, match=room):
        ws.choose(None, model(), nbytes=10**15)


def test_room_is_counted_for_a_model_that_is_given(no_network, monkeypatch):
    monkeypatch.setitem(questions._ANSWERS, "leave", lambda question: {"free": 150})
    monkeypatch.setitem(questions._ANSWERS, "find", lambda question: None)
    with pytest.raises(ws.SchemeError, match="150 bytes of room, and 160 are needed"):
        ws.choose(model(), model())  # 64 bytes, and 16


def test_another_directory_of_the_host_is_used_where_memory_has_no_room(monkeypatch, tmp_path):
    leave = questions._ANSWERS["leave"]

    def little(question):
        left = leave(question)
        return {"free": 150} if question["directory"] == "/dev/shm" else left

    monkeypatch.setitem(questions._ANSWERS, "leave", little)
    choice = ws.choose(model(), model(), directory=str(tmp_path), name="run42")
    assert choice.scheme == ws.DoubleBufferScheme(f"{tmp_path}/weightsync-run42")


# -------------------------------------------------------------------- one GPU


def test_ends_on_one_gpu_use_the_trainers_own_memory():
    choice = ws.choose(with_gpus(HERE, "a"), with_gpus(HERE, "a"))
    assert isinstance(choice.scheme, ws.CUDAIPCScheme)
    assert "the trainer waits for them" in choice.why


@pytest.mark.parametrize(
    "engine",
    [
        with_gpus(replace(HERE, spaces="others"), "a"),
        with_gpus(HERE, "a", "b"),
        with_gpus(HERE, "b"),
        HERE,
    ],
    ids=["other namespaces", "one of two perhaps", "another one", "none"],
)
def test_a_gpu_that_is_not_proven_to_be_the_same_is_not_shared(engine):
    choice = ws.choose(with_gpus(HERE, "a"), engine)
    assert isinstance(choice.scheme, ws.DoubleBufferScheme)


# -------------------------------------------------------------------- several hosts


def test_hosts_with_gpus_of_their_own_use_nccl():
    engines = [with_gpus(FAR, "b", "c"), with_gpus(FAR, "d")]
    choice = ws.choose(with_gpus(HERE, "a"), engines, port=29500)
    scheme = choice.scheme
    assert isinstance(scheme, ws.NCCLScheme)
    assert (scheme.master_address, scheme.master_port) == ("10.0.0.5", 29500)
    assert (scheme.backend, scheme.num_replicas) == ("nccl", 2)
    assert ws.scheme_from_url(scheme.to_url()) == scheme


@pytest.mark.parametrize(
    ("trainer", "engines"),
    [
        (HERE, [with_gpus(FAR, "b")]),
        (with_gpus(HERE, "a"), [with_gpus(FAR, "b"), with_gpus(FAR, "b")]),
        (with_gpus(HERE, "a"), [replace(with_gpus(FAR, "b"), backends=("gloo",))]),
    ],
    ids=["a trainer without", "two replicas on one GPU (P7)", "torch without NCCL"],
)
def test_where_nccl_would_not_work_gloo_is_used(trainer, engines):
    choice = ws.choose(trainer, engines, port=29500)
    assert choice.scheme.backend == "gloo"
    assert "gloo over the network" in choice.why


def test_a_container_of_the_same_host_does_not_share_memory():
    boot, _ = HERE.machine.split("/")
    choice = ws.choose(HERE, replace(HERE, machine=f"{boot}/mnt:[1]"), port=29500)
    assert isinstance(choice.scheme, ws.NCCLScheme)


def test_nodes_with_names_do_not_share_memory_though_they_are_of_one_host():
    one, other = (replace(HERE, node=name) for name in ("one", "other"))
    assert isinstance(ws.choose(one, one).scheme, ws.DoubleBufferScheme)
    assert isinstance(ws.choose(one, other, port=29500).scheme, ws.NCCLScheme)


def test_each_engine_gets_what_leads_to_it():
    choice = ws.choose(HERE, [HERE, FAR], port=29500, directory="/mnt/runs", name="run42")
    memory, network, files = choice.scheme.schemes
    assert memory.path == "/dev/shm/weightsync-run42"
    assert files.path == "/mnt/runs/weightsync-run42-checkpoints"
    assert choice.schemes == (memory, ws.FallbackScheme([network, files]))


def test_a_directory_is_enough_where_there_is_no_network():
    alone = replace(HERE, backends=())
    choice = ws.choose(alone, FAR, directory="/mnt/runs")
    assert isinstance(choice.scheme, ws.DiskScheme)


@pytest.mark.parametrize(
    ("trainer", "reason"),
    [
        (replace(HERE, address="127.0.0.1"), "the trainer's address is 127.0.0.1"),
        (replace(HERE, address=None), "the trainer's address is None"),
        (replace(HERE, backends=()), "torch.distributed is not to be had everywhere"),
        (HERE, "port= names one"),
    ],
    ids=["loopback", "no route", "no torch.distributed", "no port"],
)
def test_what_nothing_leads_to_is_named_with_what_was_seen(trainer, reason):
    with pytest.raises(ws.SchemeError) as caught:
        ws.choose(trainer, [HERE, FAR])
    assert str(FAR) in str(caught.value).splitlines()[0]
    assert "directory=" in str(caught.value)
    assert reason in str(caught.value)


def test_engines_that_may_come_on_other_hosts_are_provided_for():
    choice = ws.choose(HERE, HERE, may_grow=True, port=29500)
    assert [type(s) for s in choice.scheme.schemes] == [ws.DoubleBufferScheme, ws.NCCLScheme]
    with pytest.raises(ws.SchemeError, match="to other hosts"):
        ws.choose(replace(HERE, address=None), HERE, may_grow=True)


# -------------------------------------------------------------------- what is said


def test_the_reasons_go_to_the_log_and_into_a_text_without_secrets(caplog):
    with caplog.at_level(logging.INFO, "weightsync"):
        choice = ws.choose(HERE, FAR, port=29500)
    (line,) = caplog.messages
    assert "\n" not in line
    assert all(why in line for why in choice.reasons)
    assert str(choice).startswith("NCCLScheme(gloo), because\n- ")
    assert choice.why in str(choice).replace("\n- ", "\n")
    assert choice.scheme.token not in caplog.text


def test_no_engine_is_an_error():
    with pytest.raises(WeightSyncError, match="there is no engine"):
        ws.choose(HERE, [])


def test_replicas_have_their_names():
    choice = ws.choose(None, ws.Replicas({"a": model(), "b": model()}))
    assert "on one host with the trainer: a, b" in choice.reasons


@pytest.mark.parametrize("engine", ["http://127.0.0.1:1", 4, object, torch.zeros(2)])
def test_what_no_receiver_takes_is_no_engine(engine):
    with pytest.raises(ws.EngineError, match="is not an engine"):
        ws.choose(torch.nn.Linear(2, 2), [engine])


def test_a_place_as_a_dict_is_told_how_to_be_passed():
    with pytest.raises(ws.EngineError, match=r"Place\.from_dict"):
        ws.choose(torch.nn.Linear(2, 2), [ws.Place.here().to_dict()])


@pytest.mark.parametrize("trainer", [3, object])
def test_what_no_sender_sends_is_no_trainer(trainer):
    with pytest.raises(ws.SchemeError, match=r"the trainer of choose\(\)"):
        ws.choose(trainer, [torch.nn.Linear(2, 2)])


def test_a_directory_that_the_trainer_cannot_write_is_not_used(tmp_path):
    (tmp_path / "missing").write_text("a file")
    model, engine = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    choice = ws.choose(model, [engine], may_grow=True, directory=str(tmp_path / "missing" / "too"))
    assert "disk" not in choice.scheme.to_url()
    assert "it is not so that the trainer wrote into" in choice.why
