"""Imported by vLLM's workers before they make a model: ``worker_extension_cls``."""

from vllm.model_executor.layers import utils

from tests.vllm.plain import keep

utils.dispatch_cpu_unquantized_gemm = keep


class Plain:
    """Adds nothing to a worker."""
