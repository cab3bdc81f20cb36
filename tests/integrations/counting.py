"""A task that a tiny policy learns in seconds, as TRL wants it: digits that count on."""

import torch

DIGITS, PAD, END = 10, 10, 11
ANSWER = 4


def policy(seed=0, **changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 16,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 32,  # vLLM's CPU attention takes no smaller one
        "initializer_range": 0.05,  # wide enough that other weights show in the log-probabilities
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "dtype": "float32",
    }
    return LlamaForCausalLM(LlamaConfig(**{**config, **changes})).float()


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*map(str, range(DIGITS)), "<pad>", "<end>", "<unknown>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>"
    )


def dataset():
    from datasets import Dataset

    starts = range(4 * DIGITS)
    prompts = [" ".join(str((start + i) % DIGITS) for i in range(3)) for start in starts]
    return Dataset.from_dict({"prompt": prompts})


def reward(prompts, completion_ids, **_):
    """Which part of an answer counts on."""
    firsts = [int(prompt.split()[-1]) + 1 for prompt in prompts]
    return [
        sum(token == (first + i) % DIGITS for i, token in enumerate(answer)) / ANSWER
        for first, answer in zip(firsts, completion_ids, strict=True)
    ]


def configuration(kind, folder, url=None, **changes):
    """Of a trainer on the CPU: ``kind`` is ``GRPOConfig`` or one of its like."""
    return kind(
        **{
            "output_dir": str(folder),
            "use_cpu": True,
            "bf16": False,
            "use_vllm": True,
            "vllm_mode": "server",
            "vllm_server_base_url": url,
            "vllm_server_timeout": 10.0,
            "per_device_train_batch_size": 32,
            "num_generations": 4,
            "max_completion_length": ANSWER,
            "generation_kwargs": {"ignore_eos": True},
            "learning_rate": 2e-3,
            "lr_scheduler_type": "constant",
            "beta": 0.0,
            "max_steps": 3,
            "logging_steps": 1,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            **changes,
        }
    )


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]
