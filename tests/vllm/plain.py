"""Imported by vLLM's workers (``worker_extension_cls``): linear layers keep their weights.

vLLM's CPU build packs them otherwise, so that no plan covers them.
"""

import sys

from torch import nn


def keep(layer, remove_weight):
    layer.cpu_linear = nn.functional.linear


from vllm.model_executor.layers import linear, utils, vocab_parallel_embedding  # noqa: E402, F401

for module in [each for name, each in sys.modules.items() if name.startswith("vllm.")]:
    if hasattr(module, "dispatch_cpu_unquantized_gemm"):
        module.dispatch_cpu_unquantized_gemm = keep


class Plain:
    """Adds nothing to a worker."""
