"""How vLLM's CPU build is told to leave linear layers as they are loaded.

It packs their weights otherwise, and keeps them where no plan reaches; on a GPU they are plain.
"""

from torch import nn


def keep(layer, remove_weight):
    """In the place of ``dispatch_cpu_unquantized_gemm``."""
    layer.cpu_linear = nn.functional.linear
