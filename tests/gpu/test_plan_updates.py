"""Updates by copy plan on a GPU, in bfloat16 with CUDA graphs.

While requests run: the suite of all forms (``test_forms.py``), which updates by plan here, too.

Right is what vLLM's own reload would make of the same weights: ``verify_weights`` does such a
reload and compares every tensor, bit for bit.
"""

import threading

import pytest
import torch

import weightsync as ws
from tests.conftest import newest_slot
from tests.gpu.test_forms import arguments, sharp
from tests.vllm.conftest import PROMPTS, greedy, llama_config, stop
from weightsync.testing.faults import corrupt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.timeout(60, func_only=True),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = {"hidden_size": 256, "intermediate_size": 512, "torch_dtype": "bfloat16"}


def llama():
    return llama_config(**SIZES)


def qwen_tied():
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=100,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
        **SIZES,
    )


def qwen_experts():
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=100,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"],
        torch_dtype="bfloat16",
    )


@pytest.fixture(scope="module", params=[llama, qwen_tied, qwen_experts])
def engine(request, tmp_path_factory):
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    config = request.param()
    folder = tmp_path_factory.mktemp("model")
    config.save_pretrained(folder)
    transfer = WeightTransferConfig(backend="weightsync")
    llm = LLM(**arguments(folder, weight_transfer_config=transfer))
    yield llm, config
    stop(llm)


@pytest.fixture(params=["auto", "staged"])
def ends(engine, run_dir, request):
    llm, config = engine
    scheme = ws.DoubleBufferScheme(run_dir)
    receiver = scheme.create_receiver(llm, stage=request.param == "staged")
    with scheme.create_sender() as sender, receiver:
        sender.connect()
        receiver.connect()
        yield llm, config, sender, receiver


@pytest.fixture
def staged(ends):
    return ends[3]._options["stage"]


def test_fifty_updates_are_what_the_reload_makes_of_the_same_weights(ends):
    _, config, sender, receiver = ends
    model, notes, seen = sharp(config, 1).cuda(), set(), []
    for number in range(1, 51):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.roll(1, 0) * (1 if number % 7 else -1))
        sender.update_weights(model, version=number)
        report = receiver.poll_and_apply(timeout=10)
        notes.update(report.notes)
        outcome = receiver.verify_weights()
        assert not outcome.different, (number, outcome)
        assert not outcome.unchecked, (number, outcome)
        if number in (10, 50):
            seen.append(torch.cuda.mem_get_info()[0])
    print(notes)
    assert any("copies by plan" in note and "reload" not in note for note in notes), notes
    assert seen[0] - seen[1] < 64 << 20, seen


def test_a_version_that_comes_again_gives_the_same_tokens(ends):
    llm, config, sender, receiver = ends
    tokens = {}
    models = [sharp(config, seed).cuda() for seed in range(4)]
    for number, model in enumerate(models, start=1):
        sender.update_weights(model, version=number)
        receiver.poll_and_apply(timeout=10)
        tokens[number] = greedy(llm, PROMPTS, 20)
    assert len({str(each) for each in tokens.values()}) == len(models)
    for number, model in enumerate(models, start=5):
        sender.update_weights(model, version=number)
        receiver.poll_and_apply(timeout=10)
        assert greedy(llm, PROMPTS, 20) == tokens[number - 4]


def test_a_slot_that_was_changed_is_refused_and_the_former_version_stays(ends, staged):
    llm, config, sender, receiver = ends
    first, second = sharp(config, 1).cuda(), sharp(config, 2).cuda()
    for number in (1, 2):
        sender.update_weights(first, version=number)
        receiver.poll_and_apply(timeout=10)
    tokens = greedy(llm, PROMPTS, 20)
    sender.update_weights(second, version=3)
    corrupt(newest_slot(sender.scheme), 5000)
    refused = ""
    try:
        receiver.poll_and_apply(timeout=10)
    except ws.WeightSyncError as error:
        refused = str(error)
    if refused:
        assert "digest" in refused
        assert greedy(llm, PROMPTS, 20) == tokens
        assert receiver.version.number == 2
    else:  # read ahead, and right, before it was changed
        assert staged
        assert greedy(llm, PROMPTS, 20) != tokens


def test_an_update_while_another_thread_polls(ends):
    _, config, sender, receiver = ends
    model = sharp(config, 3).cuda()
    done = threading.Event()

    def follow():
        while not done.is_set():
            receiver.poll_and_apply(timeout=0.2)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        for number in range(1, 6):
            sender.update_weights(model, version=number, wait="applied", timeout=20)
    finally:
        done.set()
        thread.join(20)
    assert receiver.version.number == 5
    assert receiver.verify_weights().ok
