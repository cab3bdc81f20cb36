"""Real vLLM engines on the CPU, started once for all tests that can share one."""

import gc
import os
import secrets

import pytest
import torch

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # vLLM's sampler: 16 s at the first request

PROMPTS = [[1, 2, 3, 4], [9, 8, 7], [42], [5] * 20]


def llama_config(**changes):
    from transformers import LlamaConfig

    return LlamaConfig(
        **{
            "vocab_size": 100,  # no multiple of 64: the engine pads it
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "architectures": ["LlamaForCausalLM"],
            "torch_dtype": "float32",
            **changes,
        }
    )


def mixtral_config():
    from transformers import MixtralConfig

    return MixtralConfig(
        vocab_size=100,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=256,
        sliding_window=None,
        architectures=["MixtralForCausalLM"],
        torch_dtype="float32",
    )


def make_model(config, seed):
    """A model whose greedy tokens depend on every weight."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
            else:
                parameter.uniform_(0.5, 1.5)
    return model


def make_llm(path, load_format="dummy", *, backend="weightsync", **options):
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    if backend:
        options["weight_transfer_config"] = WeightTransferConfig(backend=backend)
    return LLM(
        model=str(path),
        load_format=load_format,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        dtype="float32",
        **options,
    )


def stop(llm):
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()


def greedy(llm, prompts=PROMPTS, count=10):
    from vllm import SamplingParams

    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=count, detokenize=False, ignore_eos=True),
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def expected(model, prompts=PROMPTS, count=10):
    """What transformers generates with the model as it is."""
    return [
        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            pad_token_id=0,
            eos_token_id=None,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """A folder with a config only, and an engine of it with random weights."""
    folder = tmp_path_factory.mktemp("llama")
    llama_config().save_pretrained(folder)
    llm = make_llm(folder)
    yield llm
    stop(llm)


@pytest.fixture
def path():
    return f"/dev/shm/weightsync-test-{os.getpid()}-{secrets.token_hex(4)}"
