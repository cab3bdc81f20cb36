"""Every code block in README and docs runs (those with vLLM: tests/vllm/test_docs.py)."""

import contextlib
import pathlib
import queue
import shutil
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import weightsync as ws
from tests.conftest import WAIT, Ends, assert_all_same, read
from tests.docs import PAGES, blocks, run
from tests.live import trainers
from tests.live.world import World
from tests.schemes.cuda_ipc.host import HostIPCScheme
from weightsync.deadline import Deadline
from weightsync.version import Version

WITH_VLLM = {
    ("README.md", "engine"),
    ("docs/adapters.md", "trainer"),
    ("docs/adapters.md", "engine"),
    ("docs/engines.md", "AsyncLLM"),
    ("docs/gpu.md", "staged"),  # tests/vllm/test_plan_updates.py
    ("docs/engines.md", "server"),  # tests/vllm/forms/test_server.py
    ("docs/integrations/torchrl.md", "vllm"),  # tests/vllm/test_torchrl.py
}

WITH_FRAMEWORKS = {
    ("docs/integrations/torchrl.md", "collector"),  # tests/integrations/torchrl
    ("docs/integrations/torchrl.md", "server"),
    ("docs/integrations/ray.md", "ray"),  # tests/integrations/test_ray.py
    ("docs/integrations/trl.md", "trainer"),  # tests/integrations/test_trl.py
    ("docs/integrations/trl.md", "client"),
    ("docs/migrating/torchrl.md", "collector, before"),  # tests/integrations/torchrl
    ("docs/migrating/torchrl.md", "collector, after"),
    ("docs/migrating/torchrl.md", "vllm, before"),
    ("docs/migrating/torchrl.md", "vllm, after"),
    ("docs/migrating/trl.md", "trainer, before"),  # tests/integrations/test_trl.py
    ("docs/migrating/trl.md", "trainer, after"),
}

METRICS = ["wandb", "prometheus", "opentelemetry", "listener", "logging"]

ONE_FILE = [  # tests/testing/test_one_file.py
    *(f"one file, {part}" for part in ("scheme", "head", "publisher", "subscriber", "snapshot")),
    *("one file, bytes", "one file, files", "suite"),
]

ENGINE = ("sampler", "engine", "use", "worker")  # tests/test_docs_engine.py


def test_every_block_has_a_name_by_which_it_is_tested():
    for page in PAGES:
        assert "" not in blocks(page), page


def test_all_blocks_are_known_here():
    found = {(page, name) for page in PAGES for name in blocks(page)}
    tested = {
        ("README.md", "trainer"),
        ("docs/getting-started.md", "one process"),
        ("docs/getting-started.md", "trainer"),
        ("docs/getting-started.md", "engine"),
        ("docs/schemes.md", "configuration"),
        ("docs/engines.md", "replicas"),
        ("docs/engines.md", "guard"),
        ("docs/schemes.md", "nccl"),
        ("docs/schemes.md", "CUDA IPC"),
        ("docs/schemes.md", "disk"),
        ("docs/schemes.md", "fallback"),
        *(("docs/metrics.md", name) for name in METRICS),  # tests/metrics/test_docs.py
        ("docs/sources.md", "options"),
        ("docs/sources.md", "ranks"),
        *(("docs/writing-a-scheme.md", name) for name in ONE_FILE),
        *(("docs/writing-an-engine.md", name) for name in ENGINE),
        ("docs/integrations/loops.md", "trainer's side"),
        ("docs/integrations/loops.md", "collector's side"),
        ("docs/integrations/loops.md", "switch"),
    }
    assert found == tested | WITH_VLLM | WITH_FRAMEWORKS


def test_the_trainer_of_the_readme(run_dir):
    names = run("README.md", "trainer", run_dir, model=torch.nn.Linear(4, 4))
    assert names["report"].version == Version(names["report"].version.epoch, 3)
    names["sender"].shutdown()


def test_one_process(run_dir):
    run("docs/getting-started.md", "one process", run_dir, run_directory=run_dir)


def test_two_processes(run_dir):
    """With a thread for each."""
    page = "docs/getting-started.md"
    model, engine = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    generated, begun, ended = [], threading.Event(), threading.Event()
    patience = Deadline(3 * WAIT)

    def train(model):
        begun.wait(WAIT)
        with torch.no_grad():
            model.weight.add_(1)

    def generate(engine):
        generated.append(engine.weight[0, 0].item())

    def done():
        begun.set()
        same = torch.equal(engine.weight, model.weight)
        return patience.expired or (ended.is_set() and same)

    with ThreadPoolExecutor(1) as pool:
        given = {"engine": engine, "done": done, "generate": generate}
        receiving = pool.submit(run, page, "engine", run_dir, **given)
        names = run(page, "trainer", run_dir, model=model, train=train)
        ended.set()
        receiving.result(4 * WAIT)
    names["sender"].shutdown()
    assert torch.equal(engine.weight, model.weight)
    assert generated
    assert generated == sorted(generated)


def test_configuration(run_dir):
    run("docs/schemes.md", "configuration", run_dir)


def test_several_engines_and_their_guard(run_dir, capsys):
    model = torch.nn.Linear(4, 4)
    one, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    with ws.DoubleBufferScheme(run_dir).create_sender(model) as sender:
        sender.connect()
        version = sender.update_weights(version=1).version
        names = run("docs/engines.md", "replicas", run_dir, one=one, other=other)
        with names["receiver"] as receiver:
            assert names["report"].version == version
            assert (
                capsys.readouterr().out == f"a applied {version} None\nb applied {version} None\n"
            )
            assert torch.equal(one.weight, model.weight)
            assert torch.equal(other.weight, model.weight)
        with ws.DoubleBufferScheme(run_dir).create_receiver(one) as receiver:
            receiver.connect()
            guarded = run("docs/engines.md", "guard", run_dir, receiver=receiver)["llm"]
            with pytest.raises(ws.EngineUnusableError):
                guarded(torch.ones(4))
            receiver.poll_and_apply()
            assert torch.equal(guarded(torch.ones(4)), model(torch.ones(4)))


def test_broadcast(run_dir):
    names = run("docs/schemes.md", "nccl", run_dir)
    assert names["report"].version.number == 1


def test_one_gpu(run_dir, monkeypatch):
    """With shared memory in the place of the GPU's."""
    monkeypatch.setattr(ws, "CUDAIPCScheme", HostIPCScheme, raising=False)
    policy, engine = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    try:
        names = run("docs/schemes.md", "CUDA IPC", run_dir, policy=policy, engine=engine)
    finally:
        shutil.rmtree(run_dir + ".memory", ignore_errors=True)
    assert [r.state for r in names["report"].receivers] == ["applied"]
    assert torch.equal(policy.weight, engine.weight)


def test_versions_on_a_disk(run_dir, tmp_path):
    from safetensors.torch import load_file

    model = torch.nn.Linear(4, 4)
    names = run(
        "docs/schemes.md", "disk", run_dir, model=model, run_directory=str(tmp_path / "run")
    )
    (file,) = pathlib.Path(names["folder"]).glob("*.safetensors")
    assert_all_same(load_file(file), dict(model.state_dict()))


def test_a_fallback(run_dir, tmp_path):
    other = str(tmp_path / "run")
    run("docs/schemes.md", "fallback", run_dir, run_directory=run_dir, other_directory=other)


def test_options_of_a_source(run_dir):
    model = torch.nn.ModuleDict(
        {name: torch.nn.Linear(2, 2) for name in ("body", "norm", "value_head")}
    )
    names = run("docs/sources.md", "options", run_dir, model=model)
    manifest = names["sender"]._source.manifest()
    dtypes = {spec.name: spec.dtype for spec in manifest.tensors}
    assert dtypes["policy.body.weight"] == torch.bfloat16
    assert dtypes["policy.norm.weight"] == torch.float32
    assert len(dtypes) == 4
    names["sender"].shutdown()


def test_a_loop_with_its_collector(run_dir):
    """A collector in a thread, and a trainer that it gives to; the first sample is too old."""
    page = "docs/integrations/loops.md"
    model, engine = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    given, ended, learnt = queue.Queue(maxsize=1), threading.Event(), []

    def collect():
        hooks = {"engine": engine, "ended": ended.is_set, "sample": lambda engine: "samples"}
        names = run(page, "collector's side", run_dir, **hooks, give=give)
        names["receiver"].shutdown()

    def give(version, batch):
        with contextlib.suppress(queue.Full):
            given.put((version, batch), timeout=0.1)

    def learn(model, batch):
        learnt.append(batch)
        with torch.no_grad():
            model.weight.add_(1)

    with ThreadPoolExecutor(1) as pool:
        collecting = pool.submit(collect)
        try:
            names = run(page, "trainer's side", run_dir, model=model, take=given.get, learn=learn)
            held = [report.version for report in names["sender"].receivers()]
            assert [names["sender"].lag(version) <= 2 for version in held] == [True]
        finally:
            ended.set()
        collecting.result(WAIT)
        names["sender"].shutdown()
    assert len(learnt) > 10


def test_another_run(run_dir, tmp_path):
    other_run, held = str(tmp_path / "other"), torch.nn.Linear(4, 4)
    model, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    with (
        ws.DoubleBufferScheme(run_dir).create_sender(model) as sender,
        ws.DiskScheme(other_run).create_sender(other) as elsewhere,
        ws.DoubleBufferScheme(run_dir).create_receiver(held) as receiver,
    ):
        for each in (sender, elsewhere):
            each.connect()
            each.update_weights(version=1)
        receiver.connect()
        given = {"receiver": receiver, "other_run": other_run}
        run("docs/integrations/loops.md", "switch", run_dir, **given)
        assert torch.equal(held.weight, other.weight)


@pytest.mark.live
def test_ranks_of_a_trainer(run_dir, tmp_path):
    """What every rank of a torchrun does."""
    ranks = World(2, tmp_path / "store", join=False)
    try:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environments = trainers.torchrun(2, port)
        for peer, environment in zip(ranks.peers, environments, strict=True):
            peer.start(trainers.run_page, "docs/sources.md", "ranks", run_dir, environment)
        for peer in ranks.peers:
            peer.result(60)
        assert_all_same(read(Ends(run_dir))[1], dict(trainers.plain().state_dict()))
        ranks(trainers.end_senders)
    finally:
        ranks.dispose()
