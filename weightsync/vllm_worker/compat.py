"""Everything here depends on a vLLM release. Tried with 0.32.0 (CPU) and 0.25.1 (CUDA).

vLLM's layerwise reload (``vllm.model_executor.model_loader.reload``) moves a layer's parameters
to the meta device, buffers what ``load_weights`` brings, and processes the layer once all its
elements have arrived. A session that ends early leaves layers on meta, and the next request kills
the engine; a session that brings only a part of a fused layer reports success. Both are looked
for and undone here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from weightsync.errors import EngineError

_KERNELS = "_weightsync_moe_kernels"
"""Attribute of a model in reload: ``(quant_method, kernel)`` of the layers in question."""

_UNGUARDED = "_weightsync_unguarded"
"""Attribute of a model in reload: see :class:`Unguarded`."""

_WRITTEN = "_weightsync_written"
"""Attribute of a model in reload: the storages of unguarded tensors that were written."""


_PARTIAL = "_weightsync_partial"
"""Attribute of a model in a reload that is not for all of its layers."""


@dataclass(frozen=True)
class Unguarded:
    """A tensor that a reload writes at once, with its values before.

    vLLM buffers what is loaded until a layer is complete, except for these (biases, and those of
    routers): they would be the new ones already while an update is only looked at, and stay so if
    it is refused (seen with 0.32.0).
    """

    name: str
    tensor: torch.Tensor
    data: torch.Tensor
    value: torch.Tensor

    def restore(self) -> None:
        self.tensor.data = self.data  # processing may have put another in its place
        self.tensor.data.copy_(self.value)


def in_session(worker: Any) -> bool:
    """Whether an update was started on a worker and not finished."""
    return bool(worker._weight_update_active)


def models(worker: Any) -> dict[str, nn.Module]:
    """The worker's ``"model"``, and the ``"draft"`` that speculates for it if it has weights."""
    runner = worker.model_runner
    # 0.25 has no method for it.
    getter = getattr(runner, "get_draft_model", None)
    draft = getter() if getter else getattr(getattr(runner, "drafter", None), "model", None)
    unwrap = getattr(draft, "unwrap", None)  # out of what captures CUDA graphs of it
    draft = unwrap() if unwrap else draft
    found: dict[str, nn.Module] = {"model": runner.get_model()}
    return {**found, "draft": draft} if isinstance(draft, nn.Module) else found


def begin_session(worker: Any, target: str) -> None:
    """Start an update of the worker's ``"model"``, or of its ``"draft"``.

    Raises:
        EngineError: there is no draft model with weights of its own.
    """
    if target == "draft":
        _require_draft(worker)
    start = getattr(worker, "start_draft_weight_update", None)
    if target == "draft" and start is not None:
        start()
        return
    try:
        if target == "draft":
            _look_at_draft(worker)
        worker.start_weight_update()
    except BaseException:
        _look_back(worker)
        raise


def end_session(worker: Any) -> None:
    """Finish an update of a worker if one is open."""
    try:
        if in_session(worker):
            worker.finish_weight_update()
    finally:
        _look_back(worker)


@contextmanager
def targeting(worker: Any, target: str) -> Iterator[None]:
    """The worker's transfer engine looks at the ``target`` inside, without a session.

    Raises:
        EngineError: there is no draft model with weights of its own.
    """
    try:
        if target == "draft":
            _require_draft(worker)
            _look_at_draft(worker)
        yield
    finally:
        _look_back(worker)


def _require_draft(worker: Any) -> None:
    if "draft" not in models(worker):
        raise EngineError(
            "targets=('draft',): the engine has no draft model with weights of its own; make it "
            "with a speculative_config that names one"
        )


def _look_at_draft(worker: Any) -> None:
    look = getattr(worker, "_set_draft_weight_update_target", None)
    if look is not None:
        look()
        return
    # 0.25 has a draft model, and does not update it; what an update does to a model it does.
    engine = worker.weight_transfer_engine
    engine.model = models(worker)["draft"]
    engine.model_config = worker.vllm_config.speculative_config.draft_model_config


def _look_back(worker: Any) -> None:
    engine = worker.weight_transfer_engine
    back = getattr(engine, "reset_weight_update_target", None)
    if back is not None:
        back()
    else:
        engine.model, engine.model_config = models(worker)["model"], worker.vllm_config.model_config


def sleeping_tags() -> set[str]:
    """The kinds of memory of this process that vLLM's sleep has given away."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda_alike():
        return set()
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator: Any = CuMemAllocator.instance
    memory = allocator.pointer_to_data.values() if allocator is not None else ()
    return {data.tag for data in memory if data.is_asleep and data.tag in ("weights", "kv_cache")}


def begin_reload(model: nn.Module) -> None:
    """Start vLLM's layerwise reload."""
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    initialize_layerwise_reload(model)
    _forget_moe_kernels(model)
    setattr(model, _UNGUARDED, _unguarded(model))
    setattr(model, _WRITTEN, set())


def _unguarded(model: nn.Module) -> list[Unguarded]:
    """A reload puts every tensor on the meta device whose loading it watches over."""
    return [
        Unguarded(f"{prefix}.{name}", tensor, tensor.data, tensor.detach().clone())
        for prefix, layer in model.named_modules()
        for name, tensor in (layer._parameters | layer._buffers).items()
        if tensor is not None and not tensor.is_meta
    ]


def unguarded(model: nn.Module) -> list[Unguarded]:
    """Those of a model in reload."""
    found: list[Unguarded] = getattr(model, _UNGUARDED, [])
    return found


def _forget_moe_kernels(model: nn.Module) -> None:
    """Have the CPU's expert weights packed again when they are reloaded.

    vLLM packs them only while it makes the layer's kernel, which it does at the first load alone:
    a reload leaves raw weights for a kernel that reads packed ones, and reports success (seen with
    0.32.0, in its own ``reload_weights`` too).
    """
    from vllm.platforms import current_platform

    former = []
    if current_platform.is_cpu():
        for layer in model.modules():
            method: Any = getattr(layer, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                former.append((method, method.moe_kernel))
                method.moe_kernel = None
    setattr(model, _KERNELS, former)


def _restore_moe_kernels(model: nn.Module) -> None:
    """Give layers that were not processed their kernels back."""
    for method, kernel in getattr(model, _KERNELS, ()):
        if method.moe_kernel is None:
            method.moe_kernel = kernel
    setattr(model, _KERNELS, [])


def finish_reload(model: nn.Module, model_config: Any) -> None:
    """End vLLM's layerwise reload: process what is left, attention layers last.

    A layer that is tied to another one is not loaded itself, and vLLM leaves what it derived from
    the shared weight as it was: on the CPU an output layer keeps its repacked copy of the old
    embedding (seen with 0.32.0). So tied layers are processed here.
    """
    for layer in finish_layers(model, model_config):
        process(layer)
    setattr(model, _UNGUARDED, [])
    _restore_moe_kernels(model)


def finish_layers(model: nn.Module, model_config: Any) -> list[nn.Module]:
    """End vLLM's layerwise reload, and return the tied layers, still to be processed."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    _, tied = _survey(model)
    with _zeroed(), _unwarned(vars(model).pop(_PARTIAL, False)):
        finalize_layerwise_reload(model, model_config)
    return tied


def expect_partial(model: nn.Module) -> None:
    """The reload that is under way leaves layers out on purpose."""
    setattr(model, _PARTIAL, True)


@contextmanager
def _unwarned(partial: bool) -> Iterator[None]:
    """vLLM warns of every layer that got nothing. Of a partial reload these are most."""
    from vllm.model_executor.model_loader.reload import layerwise

    layerwise.logger.disabled, former = partial, layerwise.logger.disabled
    try:
        yield
    finally:
        layerwise.logger.disabled = former


def process(layer: nn.Module) -> None:
    """Have a layer derive anew what it derives from its weights."""
    quant_method: Any = getattr(layer, "quant_method", None)
    if quant_method is not None:
        quant_method.process_weights_after_loading(layer)


def abandon_reload(model: nn.Module) -> None:
    """Give layers that were not loaded their former tensors back, and forget the session.

    Layers that were loaded completely hold the new values: the model is a mix now, but one that
    runs and that can be reloaded.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()
    layerwise.LOADING_LAYERS.clear()
    for each in unguarded(model):
        each.restore()
    setattr(model, _UNGUARDED, [])
    _restore_moe_kernels(model)


class _DirectWrites(TorchFunctionMode):
    """Sees what a model writes into its tensors past the loaders that a reload watches.

    What it copies into a parameter in reload itself is handed to a loader: the layer would not see
    it, and keep its old values (gpt-oss). What it writes into unguarded tensors is noted.
    """

    def __init__(self, model: nn.Module, wrote: Callable[[Unguarded], None]) -> None:
        super().__init__()
        self._wrote = wrote
        self._unguarded = {_storage(each.data): each for each in unguarded(model)}
        self._parameters = {
            _storage(parameter): (layer, name)
            for layer in model.modules()
            for name, parameter in layer.named_parameters(recurse=False)
            if parameter.is_meta
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # While a loader runs, vLLM counts by a mode of its own what it copies.
        counted = bool(_get_current_dispatch_mode_stack())
        if func is torch.Tensor.copy_ and args[0].is_meta and not counted:
            layer, name = self._parameters.get(_storage(args[0]), (None, ""))
            if layer is not None:
                return _load_directly(layer, name, *args[1:], **(kwargs or {}))
        if func in (torch.Tensor.copy_, torch.Tensor.__setitem__):
            written = self._unguarded.get(_storage(args[0]))
            if written is not None:
                self._wrote(written)
        return func(*args, **(kwargs or {}))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _load_directly(layer: nn.Module, name: str, tensor: torch.Tensor) -> Any:
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    parameter: Any = getattr(layer, name)
    parameter.weight_loader = default_weight_loader
    layerwise._wrap_parameters_weight_loader(layer)
    parameter.weight_loader(parameter, tensor)
    return parameter


def load(
    model: nn.Module,
    weights: Iterable[tuple[str, torch.Tensor]],
    wrote: Callable[[Unguarded], None] = lambda written: None,
) -> None:
    """The model's own ``load_weights``, of which a reload misses nothing.

    Args:
        wrote: told of every unguarded tensor that is written.
    """
    loader: Any = model
    seen: set[int] = getattr(model, _WRITTEN)

    def note(written: Unguarded) -> None:
        seen.add(_storage(written.data))
        wrote(written)

    with _zeroed(), _DirectWrites(model, note):
        loader.load_weights(weights)


@contextmanager
def _zeroed() -> Iterator[None]:
    """Memory that a layer is loaded into is zero where nothing is loaded.

    vLLM leaves what was there: padding would differ from one load to the next.
    """
    from vllm.model_executor.model_loader.reload import meta

    materialize = meta.materialize_meta_tensor

    def zeroed(tensor: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = materialize(tensor)
        made.data.zero_()
        return made

    with patch.object(meta, "materialize_meta_tensor", zeroed):
        yield


@contextmanager
def rehearsal(model: nn.Module) -> Iterator[None]:
    """A reload that changes nothing: what is loaded inside meets shapes, names and loaders only.

    Parameters are on the meta device meanwhile and no layer is processed; afterwards every layer
    has its own tensors back. To be used between two steps of the model.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    process = layerwise._layerwise_process
    layerwise._layerwise_process = lambda layer, info: None
    try:
        begin_reload(model)
        yield
    finally:
        layerwise._layerwise_process = process
        abandon_reload(model)


def places(model: nn.Module) -> set[int]:
    """Where a model's parameters are."""
    return {tensor.data_ptr() for tensor in model.parameters() if tensor.numel()}


def incomplete_layers(
    model: nn.Module, elsewhere: Collection[int] = (), among: Collection[str] | None = None
) -> list[str]:
    """The layers that an update leaves without some of their weights; call before finishing.

    A layer is complete when every parameter was loaded with every part it consists of. The
    number of elements alone does not tell: a padded vocabulary never fills up.

    Args:
        elsewhere: what :func:`places` said, before the reload, of a model that this one shares
            layers with, and that brings the weights of those.
        among: the only layers that the reload is for; None: all.
    """
    lacking, _ = _survey(model, elsewhere)
    found = [(name, ", ".join(parts)) for name, parts in lacking.items()]
    found += [(layer, name) for layer, _, name in (n.rpartition(".") for n in _unwritten(model))]
    return [f"{layer} lacks {what}" for layer, what in found if among is None or layer in among]


def _unwritten(model: nn.Module) -> list[str]:
    """Tensors that no layer waits for, and that a checkpoint holds nevertheless.

    A router's bias: whatever its kind, a parameter in one model and a buffer in the next. The
    others of its kind (maps of experts) are computed, and no floating-point numbers.
    """
    skipped, written = _skipped_tensors(), getattr(model, _WRITTEN)
    return [
        each.name
        for each in unguarded(model)
        if each.name.rpartition(".")[2] in skipped
        and each.value.is_floating_point()
        and each.value.numel()
        and _storage(each.data) not in written
    ]


def _survey(
    model: nn.Module, elsewhere: Collection[int] = ()
) -> tuple[dict[str, list[str]], list[nn.Module]]:
    """What each layer lacks, and the layers that get their values through one they are tied to."""
    from vllm.model_executor.model_loader.reload import layerwise

    lacking: dict[str, list[str]] = {}
    layers = dict(model.named_modules())
    memory: dict[str, set[int]] = {}
    for name, layer in layers.items():
        info = layerwise.get_layerwise_info(layer)
        loading = info.can_load() and info.kernel_tensors is not None
        own = info.kernel_tensors[0].values() if loading else layer.parameters(recurse=False)
        memory[name] = {tensor.data_ptr() for tensor in own if tensor.numel()}
        # Attention layers are processed last; their scales need not be in a checkpoint.
        if loading and not _is_processed_last(layer):
            parts = _lacking_parts(layer, info)
            if parts:
                lacking[name] = parts
    loaded = set(elsewhere).union(*(memory[name] for name in layers if name not in lacking))
    tied = [name for name in lacking if memory[name] and memory[name] <= loaded]
    for name in tied:
        del lacking[name]
    return lacking, [layers[name] for name in tied]


def _lacking_parts(layer: nn.Module, info: Any) -> list[str]:
    """Parameters that got nothing, and fused ones that did not get each of their parts."""
    skipped = _skipped_tensors()
    loaded: dict[str, set[Any]] = {}
    for parameter, bound in info.loaded_weights:
        brought = loaded.setdefault(parameter, set())
        part = _part(bound)
        if bound.arguments.get("expert_id") is not None and _weight(bound).dim() == 3:
            # All experts at once (Llama 4), whichever it is said to be.
            brought |= {each for each in _expected_parts(layer, parameter) if each[1] == part[1]}
        else:
            brought.add(part)
    lacking = []
    # Parameters only: buffers (rotary tables, ...) are mostly computed, not loaded.
    for parameter, tensor in layer.named_parameters(recurse=False):
        if tensor.numel() == 0 or parameter in skipped:
            continue
        parts = loaded.get(parameter)
        if parts is None:
            lacking.append(parameter)
        elif None not in parts:
            missing = _expected_parts(layer, parameter) - parts
            lacking += [f"{parameter}[{part}]" for part in sorted(map(str, missing))]
    return lacking


def _is_processed_last(layer: nn.Module) -> bool:
    """Whether it is an attention layer, as vLLM sees it."""
    from vllm.model_executor.model_loader.reload import layerwise

    is_attention = getattr(layerwise, "is_deferred_attention_layer", None)
    if is_attention is not None:
        return bool(is_attention(layer))
    # 0.25: named in the place where it matters.
    return isinstance(layer, (layerwise.Attention, layerwise.MLAAttention))


def _skipped_tensors() -> set[str]:
    """Names of tensors that no reload waits for."""
    from vllm.model_executor.model_loader.reload import layerwise, meta

    return set(getattr(layerwise, "SKIP_LOAD_TENSORS", getattr(meta, "SKIP_TENSORS", ())))


def _part(bound: Any) -> Any:
    """Which part of a fused parameter one call of its loader brought; None for all of it."""
    arguments = bound.arguments
    for name in ("loaded_shard_id", "shard_id"):
        if arguments.get(name) is not None:
            expert = arguments.get("expert_id")
            part = arguments[name]
            part = tuple(part) if isinstance(part, list) else part
            return part if expert is None else (expert, part)
    return None


def _weight(bound: Any) -> torch.Tensor:
    tensor: torch.Tensor = bound.arguments["loaded_weight"]
    return tensor


def _expected_parts(layer: nn.Module, parameter: str) -> set[Any]:
    """The parts that a fused parameter consists of, as its loader names them; empty if unknown."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear

    if isinstance(layer, QKVParallelLinear):
        return {"q", "k", "v"}
    if isinstance(layer, MergedColumnParallelLinear):
        return set(range(len(layer.output_sizes)))
    config = getattr(layer, "moe_config", None)
    experts = getattr(config, "num_logical_experts", getattr(config, "num_experts", None))
    if isinstance(experts, int):
        fused = {"w13": ("w1", "w3"), "w2": ("w2",)}.get(parameter.partition("_")[0], ())
        return {(expert, part) for expert in range(experts) for part in fused}
    return set()


def ties_word_embeddings(model_config: Any) -> bool:
    """Whether the engine's output layer shares the embedding, so that its name is not loaded."""
    config = getattr(model_config, "hf_text_config", None) or model_config.hf_config
    return bool(getattr(config, "tie_word_embeddings", False))
