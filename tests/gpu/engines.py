"""Real vLLM engines on a GPU, small and few: what the tests of this folder make, ask and end."""

import importlib.util

import pytest
import torch

from tests.vllm.conftest import PROMPTS, llama_config, make_model, stop

__all__ = ["MARKS", "PROMPTS", "dense", "greedy", "make_llm", "model", "stop"]

MARKS = [
    pytest.mark.gpu,
    # Engines are started by fixtures, whose time does not count.
    pytest.mark.timeout(60, func_only=True),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm"),
]
"""Of a module whose tests need vLLM on a GPU."""


def dense():
    return llama_config(
        hidden_size=512, num_attention_heads=8, num_key_value_heads=4, torch_dtype="bfloat16"
    )


def model(seed):
    return make_model(dense(), seed).bfloat16()


def make_llm(folder, load_format="dummy", **options):
    """An engine of what was saved in a folder; of its config only, if nothing else says so."""
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    return LLM(
        **{
            "model": str(folder),
            "load_format": load_format,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 128,
            "max_num_seqs": 16,
            "gpu_memory_utilization": 0.1,
            "weight_transfer_config": WeightTransferConfig(backend="weightsync"),
            **options,
        }
    )


def greedy(llm, prompts=PROMPTS, count=12):
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=count, detokenize=False, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
