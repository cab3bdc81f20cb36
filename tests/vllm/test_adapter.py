"""A LoRA adapter by itself into a real vLLM ``LLM`` on the CPU, next to a base that stays."""

import contextlib
import copy
import gc
import os
import signal
import subprocess
import sys
from glob import glob
from types import SimpleNamespace

import pytest
import torch

import weightsync as ws
from tests.vllm.conftest import (
    PROMPTS,
    expected,
    llama_config,
    make_llm,
    make_model,
    mixtral_config,
    stop,
)
from weightsync.engines.vllm.adapter_files import Folder, Link, remove_leftovers

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

LONG = [list(range(1, 70))]  # several whole cache blocks
TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
FOLDERS = "/dev/shm/weightsync-adapter-*"


def make_adapter(base, seed, **options):
    """A PEFT model on a copy of the base, with an adapter that changes what it says."""
    from peft import LoraConfig, get_peft_model

    config = {"r": 8, "lora_alpha": 16, "target_modules": TARGETS, **options}
    peft = get_peft_model(copy.deepcopy(base), LoraConfig(**config))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)
    return peft


def merged(peft):
    return copy.deepcopy(peft).merge_and_unload()


def greedy(llm, request=None, prompts=PROMPTS, count=10):
    from vllm import SamplingParams

    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=count, detokenize=False, ignore_eos=True),
        use_tqdm=False,
        lora_request=request,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def require_from_either(answers, models, prompt):
    """Each token is what one of two models says after those before it."""
    whole = [tuple(expected(model, [prompt], len(answers[0]))[0]) for model in models]
    mixed = {tuple(tokens) for tokens in answers} - set(whole)
    for tokens in list(mixed)[:5]:
        for place, token in enumerate(tokens):
            so_far = [*prompt, *tokens[:place]]
            assert [token] in [expected(model, [so_far], 1)[0] for model in models]


@pytest.fixture(scope="module")
def base():
    return make_model(llama_config(), seed=1)


@pytest.fixture(scope="module")
def llm(base, tmp_path_factory):
    """An engine that holds the base and has room for two adapters."""
    folder = tmp_path_factory.mktemp("base")
    base.save_pretrained(folder)
    llm = make_llm(folder, "safetensors", enable_lora=True, max_lora_rank=8, max_loras=2)
    yield llm
    stop(llm)


@pytest.fixture
def ends(llm, path):
    """An attached sender, and a receiver on the shared engine's adapter."""
    scheme = ws.DoubleBufferScheme(path)
    engine = ws.VLLMAdapter(llm)
    with scheme.create_sender() as sender, scheme.create_receiver(engine) as receiver:
        sender.connect()
        sender.attach(receiver)
        yield sender, receiver, engine
    engine.unload()
    assert not glob(FOLDERS)


def test_successive_versions_give_the_tokens_of_the_merged_model(llm, base, path):
    """K1 too: neither the cache of adapters nor that of prefixes gives old answers."""
    peft = make_adapter(base, seed=10)
    scheme = ws.DoubleBufferScheme(path)
    engine = ws.VLLMAdapter(llm, name="policy")
    seen, paths = set(), []
    with (
        scheme.create_sender(ws.AdapterSource(peft)) as sender,
        scheme.create_receiver(engine) as receiver,
    ):
        sender.connect()
        receiver.connect()
        for number in (1, 2, 3):
            for name, parameter in peft.named_parameters():
                if "lora_" in name:
                    parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
            sender.update_weights(version=number)
            report = receiver.poll_and_apply()
            assert engine.lora_request.lora_name.startswith(f"policy@{report.version}#")
            for prompts in (PROMPTS, LONG):
                right = expected(merged(peft), prompts)
                assert greedy(llm, engine.lora_request, prompts) == right
                assert greedy(llm, engine.lora_request, prompts) == right  # from the cache
                assert greedy(llm, None, prompts) == expected(base, prompts) != right
            seen.add(str(right))
            paths.append(engine.lora_request.lora_path)
            assert set(glob(FOLDERS)) == set(paths[-2:])  # the last one may be on its way still
    assert len(seen) == 3
    engine.unload()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"r": 4, "use_rslora": True},
        {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"down_proj": 3}},
        {"target_modules": ["embed_tokens", "lm_head", "k_proj"]},
    ],
    ids=["rsLoRA", "patterns", "embeddings"],
)
def test_other_plain_forms_of_lora(llm, ends, base, options):
    sender, _, engine = ends
    peft = make_adapter(base, seed=20, **options)
    sender.update_weights(ws.AdapterSource(peft), version=1)
    right = expected(merged(peft))
    assert greedy(llm, engine.lora_request) == right != expected(base)


def other_shape(base):
    return make_adapter(make_model(llama_config(hidden_size=256), seed=2), seed=31)


def other_names(base):
    from torch import nn

    model = copy.deepcopy(base)
    model.extra = nn.Linear(4, 4)
    return make_adapter(model, seed=32, target_modules=["q_proj", "extra"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda base: make_adapter(base, 33, r=16), "LoRA rank 16 is greater than max_lora_rank 8"),
        (
            lambda base: make_adapter(base, 34, rank_pattern={"v_proj": 9}),
            "LoRA rank 9 is greater than max_lora_rank 8",
        ),
        (
            lambda base: make_adapter(base, 36, modules_to_save=["lm_head"]),
            r"Unsupported modules_to_save: \['lm_head'\]",
        ),
        (other_shape, r"policy': .*must match the size of tensor b \(256\)"),
        (other_names, r"expected target modules in .* received \['extra'"),
    ],
    ids=["rank", "rank of a pattern", "modules_to_save", "shape", "names"],
)
def test_what_vllm_refuses_leaves_the_former_version(llm, ends, base, make, words):
    sender, receiver, engine = ends
    peft = make_adapter(base, seed=30)
    sender.update_weights(ws.AdapterSource(peft), version=1)
    request, right = engine.lora_request, expected(merged(peft))
    with pytest.raises(ws.ReceiverError, match=words):
        sender.update_weights(ws.AdapterSource(make(base)), version=2)
    assert receiver.version.number == 1
    assert engine.lora_request.lora_path == request.lora_path
    assert greedy(llm, request) == right
    assert glob(FOLDERS) == [request.lora_path]
    better = make_adapter(base, seed=39)
    sender.update_weights(ws.AdapterSource(better), version=3)
    assert greedy(llm, engine.lora_request) == expected(merged(better))


@pytest.mark.slow
def test_a_first_version_that_vllm_refuses_leaves_none(llm, ends, base):
    sender, receiver, engine = ends
    with pytest.raises(ws.ReceiverError, match="must match"):
        sender.update_weights(ws.AdapterSource(other_shape(base)), version=1)
    with pytest.raises(ws.EngineUnusableError, match="adapter 'policy' holds no version"):
        _ = engine.lora_request  # None would say: the base
    assert not glob(FOLDERS)
    assert greedy(llm) == expected(base)
    peft = make_adapter(base, seed=40)
    sender.update_weights(ws.AdapterSource(peft), version=2)
    assert greedy(llm, engine.lora_request) == expected(merged(peft))
    receiver.require_ready()


@pytest.mark.slow
def test_corrupt_bytes_never_reach_vllm(llm, ends, base, path):
    sender, receiver, engine = ends
    peft = make_adapter(base, seed=50)
    sender.update_weights(ws.AdapterSource(peft), version=1)
    request = engine.lora_request
    sender.detach(receiver)
    sender.update_weights(ws.AdapterSource(make_adapter(base, seed=51)), version=2)
    head = receiver.scheme.inspect()
    slot = next(s for s in head.slots if s.version == head.version)
    with open(f"{path}/{slot.generation}/slot{slot.slot}.bin", "r+b") as file:
        file.seek(5000)
        byte = file.read(1)
        file.seek(5000)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(ws.CorruptError, match="digest"):
        receiver.poll_and_apply()
    assert engine.lora_request.lora_path == request.lora_path
    assert greedy(llm, request) == expected(merged(peft))


def test_weights_that_are_no_adapter(llm, ends, base):
    sender, _, _ = ends
    with pytest.raises(ws.ReceiverError, match=r"no adapter.*AdapterSource\(model\)"):
        sender.update_weights(base, version=1)


@pytest.mark.slow
def test_a_version_that_cannot_be_labelled_is_rolled_back(llm, ends, base, monkeypatch):
    sender, receiver, engine = ends
    peft = make_adapter(base, seed=60)
    sender.update_weights(ws.AdapterSource(peft), version=1)
    flush = engine.flush

    def fail_once(deadline):
        monkeypatch.setattr(engine, "flush", flush)
        raise ws.EngineError("not now")

    monkeypatch.setattr(engine, "flush", fail_once)
    with pytest.raises(ws.ReceiverError, match="not now"):
        sender.update_weights(ws.AdapterSource(make_adapter(base, seed=61)), version=2)
    assert receiver.status().state == "rolled back"
    assert greedy(llm, engine.lora_request) == expected(merged(peft))
    assert glob(FOLDERS) == [engine.lora_request.lora_path]


@pytest.mark.slow
def test_a_request_in_flight_ends_with_the_version_it_was_started_with(llm, ends, base):
    """F3: no answer mixes two versions, and each says whose it is."""
    from vllm import SamplingParams

    sender, _, engine = ends
    pefts = [make_adapter(base, seed) for seed in (70, 71, 72)]
    parameters = SamplingParams(temperature=0, max_tokens=20, detokenize=False, ignore_eos=True)
    prompt = {"prompt_token_ids": PROMPTS[0]}
    requests = []
    for number, peft in enumerate(pefts):  # more at once than there is room for
        sender.update_weights(ws.AdapterSource(peft), version=number)
        requests.append(engine.lora_request)
        llm.llm_engine.add_request(str(number), prompt, parameters, lora_request=requests[-1])
        for _ in range(3):
            llm.llm_engine.step()
    assert len(glob(FOLDERS)) == 3
    done = {}
    while llm.llm_engine.has_unfinished_requests():
        done.update({out.request_id: out for out in llm.llm_engine.step() if out.finished})
    for number, peft in enumerate(pefts):
        output = done[str(number)]
        assert list(output.outputs[0].token_ids) == expected(merged(peft), PROMPTS[:1], 20)[0]
        assert output.lora_request.lora_name == requests[number].lora_name
    sender.update_weights(ws.AdapterSource(pefts[0]), version=3)
    assert len(glob(FOLDERS)) == 2


@pytest.mark.slow
def test_several_adapters_take_turns_in_too_few_places(llm, base, path):
    """The one that is not there is read from its files again, when a request asks for it."""
    adapters = {}
    with contextlib.ExitStack() as stack:
        for name in ("policy", "critic", "judge"):
            scheme = ws.DoubleBufferScheme(f"{path}-{name}")
            engine = ws.VLLMAdapter(llm, name=name)
            sender = stack.enter_context(scheme.create_sender())
            receiver = stack.enter_context(scheme.create_receiver(engine))
            sender.connect()
            sender.attach(receiver)
            adapters[name] = sender, engine
        for number in (1, 2):
            right = {}
            for name, (sender, _) in adapters.items():
                peft = make_adapter(base, seed=80 + 10 * len(right) + number)
                sender.update_weights(ws.AdapterSource(peft), version=number)
                right[name] = expected(merged(peft))
            for name in [*adapters, *adapters]:
                assert greedy(llm, adapters[name][1].lora_request) == right[name]
    for name, (_, engine) in adapters.items():  # what an engine holds outlives the receiver
        assert greedy(llm, engine.lora_request) == right[name]
        engine.unload()
    assert not glob(FOLDERS)


@pytest.fixture
def one_name(llm, path):
    """As ``ends``, but all versions of the adapter have one name."""
    scheme = ws.DoubleBufferScheme(path)
    engine = ws.VLLMAdapter(llm, one_name=True)
    with scheme.create_sender() as sender, scheme.create_receiver(engine) as receiver:
        sender.connect()
        sender.attach(receiver)
        yield sender, receiver, engine
    engine.unload()
    assert not glob(FOLDERS)


def test_one_name_for_all_versions(llm, one_name, base):
    """K1: the caches know the adapter by that name, and hold nothing of the old version."""
    sender, _, engine = one_name
    requests, seen = [], set()
    for number in (1, 2, 3):
        peft = make_adapter(base, seed=110 + number)
        sender.update_weights(ws.AdapterSource(peft), version=number)
        requests.append(engine.lora_request)
        right = expected(merged(peft), LONG)
        assert greedy(llm, requests[0], LONG) == right  # the same object for ever
        assert greedy(llm, requests[0], LONG) == right  # from the cache
        assert greedy(llm, None, LONG) == expected(base, LONG) != right
        seen.add(str(right))
    assert len(seen) == 3
    assert {(r.lora_name, r.lora_int_id, r.lora_path) for r in requests} == {
        ("policy", requests[0].lora_int_id, requests[0].lora_path)
    }
    assert len(glob(FOLDERS)) == 2  # the path that stays, and one version


def test_one_name_a_request_in_flight_goes_on_with_the_new_version(llm, one_name, base):
    """F1: not aborted, and nothing after the switch is computed with the old one's cache."""
    from vllm import SamplingParams

    sender, _, engine = one_name
    first, second = make_adapter(base, seed=120), make_adapter(base, seed=121)
    sender.update_weights(ws.AdapterSource(first), version=1)
    parameters = SamplingParams(temperature=0, max_tokens=50, detokenize=False, ignore_eos=True)
    prompt = {"prompt_token_ids": LONG[0]}
    llm.llm_engine.add_request("1", prompt, parameters, lora_request=engine.lora_request)
    while not any(out.outputs[0].token_ids for out in llm.llm_engine.step()):
        pass
    llm.sleep(level=0, mode="keep")  # else it may end before the update comes
    sender.update_weights(ws.AdapterSource(second), version=2)
    llm.wake_up(tags=["scheduling"])  # an engine that its user paused stayed so
    done = []
    while llm.llm_engine.has_unfinished_requests():
        done += [out for out in llm.llm_engine.step() if out.finished]
    tokens = list(done[0].outputs[0].token_ids)
    old = expected(merged(first), LONG, 50)[0]
    assert tokens[0] == old[0]
    switch = next(n for n in range(50) if tokens[n] != old[n])
    assert expected(merged(second), [LONG[0] + old[:switch]], 50 - switch)[0] == tokens[switch:]


def test_one_name_what_vllm_refuses_leaves_the_former_version(llm, one_name, base):
    sender, receiver, engine = one_name
    with pytest.raises(ws.ReceiverError, match="must match"):
        sender.update_weights(ws.AdapterSource(other_shape(base)), version=1)
    with pytest.raises(ws.EngineUnusableError, match="adapter 'policy' holds no version"):
        _ = engine.lora_request
    peft = make_adapter(base, seed=130)
    right = expected(merged(peft), LONG)
    sender.update_weights(ws.AdapterSource(peft), version=2)
    assert greedy(llm, engine.lora_request, LONG) == right
    for number, (make, words) in enumerate(
        [(other_shape, "must match"), (other_names, "received")], start=3
    ):
        with pytest.raises(ws.ReceiverError, match=words):
            sender.update_weights(ws.AdapterSource(make(base)), version=number)
        assert receiver.status().state == "rolled back"
        assert greedy(llm, engine.lora_request, LONG) == right
    better = make_adapter(base, seed=131)
    sender.update_weights(ws.AdapterSource(better), version=5)
    assert greedy(llm, engine.lora_request, LONG) == expected(merged(better), LONG)


@pytest.mark.slow
@pytest.mark.parametrize("names", ["ends", "one_name"])
def test_base_and_adapter_side_by_side(llm, names, base, path, request):
    """Two schemes on one LLM; a base update empties vLLM's cache of adapters."""
    sender, _, engine = request.getfixturevalue(names)
    peft = make_adapter(base, seed=100)
    sender.update_weights(ws.AdapterSource(peft), version=1)
    scheme = ws.DoubleBufferScheme(path + "-base")
    with scheme.create_sender() as base_sender, scheme.create_receiver(llm) as base_receiver:
        base_sender.connect()
        base_sender.attach(base_receiver)
        for number, seed in enumerate((3, 1)):  # another base, and the first one again
            new = make_model(llama_config(), seed)
            base_sender.update_weights(new, version=number)
            for prompts in (PROMPTS, LONG):
                on_new = merged(make_adapter(new, seed=100))
                assert greedy(llm, engine.lora_request, prompts) == expected(on_new, prompts)
                assert greedy(llm, None, prompts) == expected(new, prompts)


@pytest.mark.slow
def test_experts_that_vllm_would_leave_aside_are_refused(path, tmp_path):
    """It reports success for them. No tokens: on the CPU it has no LoRA for experts."""
    config = mixtral_config()
    config.save_pretrained(tmp_path)
    stacked = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = make_model(config, seed=1)
    llm = make_llm(tmp_path, enable_lora=True, max_lora_rank=8)
    engine = ws.VLLMAdapter(llm)
    scheme = ws.DoubleBufferScheme(path)
    try:
        with scheme.create_sender() as sender, scheme.create_receiver(engine) as receiver:
            sender.connect()
            sender.attach(receiver)
            sender.update_weights(
                ws.AdapterSource(make_adapter(model, 1, target_modules=["q_proj"]))
            )
            peft = make_adapter(model, 1, target_modules=[], target_parameters=stacked)
            with pytest.raises(ws.ReceiverError, match="enable_mixed_moe_lora_format=True"):
                sender.update_weights(ws.AdapterSource(peft))
    finally:
        stop(llm)


# ---------------------------------------------------------------- without an engine


def fake(**settings):
    parallel = SimpleNamespace(world_size=1, data_parallel_size=1)
    config = SimpleNamespace(parallel_config=parallel, **settings)
    return SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config))


@pytest.mark.parametrize(
    ("llm", "words"),
    [
        (fake(lora_config=None), r"enable_lora=True, max_lora_rank="),
        (fake(lora_config=object()), r"WeightTransferConfig\(backend='weightsync'\)"),
    ],
    ids=["no LoRA", "no backend"],
)
def test_an_engine_that_is_not_set_up_for_it(llm, words, path):
    receiver = ws.DoubleBufferScheme(path).create_receiver(ws.VLLMAdapter(llm))
    with pytest.raises(ws.EngineError, match=words):
        receiver.connect(timeout=0.1)


class Owner:
    pass


def test_a_link_leads_to_one_version_after_the_other():
    owner = Owner()
    link, *folders = Link(owner), Folder(0, owner), Folder(0, owner)
    for folder in folders:
        link.lead_to(folder)
        assert os.path.realpath(link.path) == folder.path
    del owner
    gc.collect()
    assert not os.path.lexists(link.path)
    assert not os.path.lexists(link.directory)


def test_what_a_worker_still_reads_outlives_its_driver():
    """A server goes on without us, and dies of a file that is not there."""
    from weightsync.vllm_worker import adapters

    owner = Owner()
    folder = Folder(0, owner, stays=True)
    adapters._held[7] = [adapters._hold(folder.path)]
    folder.remove()
    remove_leftovers()
    assert os.path.isdir(folder.path)
    adapters._let_go(7)
    remove_leftovers()
    assert not os.path.exists(folder.path)


def test_files_are_private_and_go_with_their_owner():
    owner = Owner()
    folder = Folder(1000, owner)
    assert os.stat(folder.path).st_mode & 0o777 == 0o700
    if os.fork() == 0:  # a child that ends removes nothing
        folder.remove()
        os._exit(0)
    os.wait()
    assert os.path.isdir(folder.path)
    del owner
    gc.collect()
    assert not os.path.exists(folder.path)


def test_too_little_room_is_said_before_the_first_byte():
    before = glob(FOLDERS)
    with pytest.raises(ws.NoRoomError, match="an adapter needs 1,125,899,906,842,624 bytes"):
        Folder(1 << 50, Owner())
    assert glob(FOLDERS) == before


def test_what_a_killed_process_left_is_removed_and_nothing_else():
    """G1."""
    code = (
        "import os\n"
        "from weightsync.engines.vllm.adapter_files import Folder\n"
        "folder = Folder(0, os)\n"
        "print(folder.path, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.returncode == -signal.SIGKILL, child.stderr
    left = child.stdout.strip()
    owner = Owner()
    live = Folder(0, owner)
    foreign = live.path + "-foreign"
    os.mkdir(foreign)
    assert os.path.isdir(left)
    try:
        remove_leftovers()
        assert not os.path.exists(left)
        assert os.path.isdir(live.path)
        assert os.path.isdir(foreign)
    finally:
        os.rmdir(foreign)
        live.remove()
