"""What each part of weightsync relies on in vLLM, since which release, and what it does without.

Edit this together with the code: a name of vLLM's that is not in here is not looked for in the
next release.
"""

from __future__ import annotations

from dataclasses import dataclass

OLDEST = "0.25"
"""The first release that weightsync claims to work with."""

NEWEST = "0.33"
"""The last one that was looked at."""


@dataclass(frozen=True)
class Need:
    """One thing that is relied on.

    Attributes:
        any_of: references (see ``sources``), of which one must be there.
        since: the first release that must have it.
        without: what weightsync does in the releases before.
    """

    any_of: tuple[str, ...]
    since: str = OLDEST
    without: str = ""


def need(*any_of: str, since: str = OLDEST, without: str = "") -> Need:
    return Need(any_of, since, without)


TRANSFER = "vllm.distributed.weight_transfer"
_RELOAD = "vllm.model_executor.model_loader.reload"
_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_LAYERS = "vllm.model_executor.layers"
_ENTRY = "vllm.entrypoints.llm:LLM"
_ENGINE = "vllm.v1.engine.llm_engine:LLMEngine"
_ASYNC = "vllm.v1.engine.async_llm:AsyncLLM"
_CORE = "vllm.v1.engine.core_client"

TABLE: dict[str, tuple[Need, ...]] = {
    "the plug-in: vllm_worker/plugin.py, transfer_engine.py": (
        need(f"{TRANSFER}.factory:WeightTransferEngineFactory._registry"),
        need(
            f"{TRANSFER}.factory:WeightTransferEngineFactory.register_engine"
            "(name, module_path_or_cls, class_name)"
        ),
        need(f"{TRANSFER}.base:WeightTransferInitInfo"),
        need(f"{TRANSFER}.base:WeightTransferUpdateInfo"),
        *(
            need(f"{TRANSFER}.base:WeightTransferEngine.{name}")
            for name in (
                "init_info_cls",
                "update_info_cls",
                "__init__(config, vllm_config, device, model)",
                "parse_update_info(update_dict)",
                "init_transfer_engine(init_info)",
                "start_weight_update",
                "update_weights(update_info)",
                "receive_weights(update_info)",
                "finish_weight_update",
                "shutdown",
                "model",
                "model_config",
                "vllm_config",
                "parallel_config",
            )
        ),
        need("vllm.config:set_current_vllm_config(vllm_config)"),
        need("vllm.config:WeightTransferConfig"),
        need("vllm.v1.worker.worker_base:WorkerBase"),
        *(
            need(f"vllm.config.parallel:ParallelConfig.{name}")
            for name in ("rank", "world_size", "data_parallel_rank", "data_parallel_size")
        ),
    ),
    "sessions of a worker: vllm_worker/compat.py": (
        *(
            need(f"{_WORKER}.{name}")
            for name in (
                "weight_transfer_engine",
                "_weight_update_active",
                "start_weight_update",
                "update_weights(update_info)",
                "finish_weight_update",
                "sleep(level)",
                "wake_up(tags)",
            )
        ),
        need("vllm.v1.worker.cpu_worker:CPUWorker.start_weight_update"),
        *(
            need(reference, since="0.26", without="the engine is pointed at the draft by ours")
            for reference in (
                f"{_WORKER}.start_draft_weight_update",
                f"{_WORKER}._set_draft_weight_update_target",
                f"{TRANSFER}.base:WeightTransferEngine.reset_weight_update_target",
            )
        ),
    ),
    "layerwise reload: vllm_worker/compat.py, verification.py": (
        need(f"{_RELOAD}:initialize_layerwise_reload"),
        need(f"{_RELOAD}:finalize_layerwise_reload"),
        need(f"{_RELOAD}.layerwise:initialize_layerwise_reload(model)"),
        need(f"{_RELOAD}.layerwise:finalize_layerwise_reload"),
        need(f"{_RELOAD}.layerwise:get_layerwise_info(layer)"),
        need(f"{_RELOAD}.layerwise:_layerwise_process(layer, info)"),
        need(f"{_RELOAD}.layerwise:_place_kernel_tensors(layer, info)"),
        need(f"{_RELOAD}.layerwise:_wrap_parameters_weight_loader(layer)"),
        need(f"{_RELOAD}.layerwise:_finalize_attention_layer(layer, info, model_config)"),
        need(f"{_RELOAD}.layerwise:_copy_and_restore_kernel_tensors(layer, info)"),
        need(f"{_RELOAD}.layerwise:LOADING_LAYERS"),
        need(f"{_RELOAD}.meta:materialize_meta_tensor(meta_tensor)"),
        need(
            f"{_RELOAD}.layerwise:is_deferred_attention_layer",
            f"{_RELOAD}.layerwise:MLAAttention",
        ),
        need(f"{_RELOAD}.layerwise:SKIP_LOAD_TENSORS", f"{_RELOAD}.meta:SKIP_TENSORS"),
        *(
            need(f"{_RELOAD}.types:LayerReloadingInfo.{name}")
            for name in ("can_load", "reset", "kernel_tensors", "loaded_weights")
        ),
        need("vllm.model_executor.model_loader.weight_utils:default_weight_loader"),
        need(f"{_LAYERS}.linear:QKVParallelLinear"),
        need(f"{_LAYERS}.linear:MergedColumnParallelLinear.output_sizes"),
        need(f"{_LAYERS}.quantization.base_config:QuantizeMethodBase"),
        need("vllm.platforms:current_platform"),
    ),
    "sleep: vllm_worker/compat.py, sleep.py, engines/vllm/sleeping.py": (
        need("vllm.device_allocator.cumem:CuMemAllocator.instance"),
        need("vllm.device_allocator.cumem:CuMemAllocator.pointer_to_data"),
        need("vllm.device_allocator.cumem:AllocationData.tag"),
        need("vllm.device_allocator.cumem:AllocationData.is_asleep"),
        need(f"{_CORE}:InprocClient.sleep(level)"),
        need(f"{_CORE}:SyncMPClient.sleep(level)"),
        need(f"{_CORE}:AsyncMPClient.sleep_async(level)"),
    ),
    "LLM: engines/vllm/llm.py, facts.py": (
        need("vllm:SamplingParams"),
        need("vllm.sampling_params:SamplingParams.prompt_logprobs"),
        need(f"{_ENTRY}.llm_engine"),
        need(f"{_ENTRY}.collective_rpc(method, args)"),
        need(f"{_ENTRY}.sleep(level, mode)"),
        need(f"{_ENTRY}.wake_up(tags)"),
        need(f"{_ENTRY}.reset_prefix_cache(reset_running_requests)"),
        need(f"{_ENTRY}.generate(prompts, sampling_params, use_tqdm, lora_request)"),
        need(
            f"{_ENTRY}.update_weight_version",
            since="0.27",
            without="an LLM has no label",
        ),
        need(
            "vllm.outputs:CompletionOutput.weight_versions",
            since="0.32",
            without="an answer does not say of which version its tokens are",
        ),
        need(f"{_ENGINE}.is_sleeping"),
        need(f"{_ENGINE}.reset_encoder_cache"),
        need(f"{_ENGINE}.engine_core"),
        need(f"{_ENGINE}.output_processor"),
        need(f"{_ENGINE}.vllm_config"),
        need(f"{_CORE}:InprocClient"),
        need("vllm.config:VllmConfig.weight_transfer_config"),
        need("vllm.config:VllmConfig.lora_config"),
    ),
    "AsyncLLM: engines/vllm/async_llm.py": (
        need(f"{_ASYNC}.pause_generation(mode, clear_cache)"),
        need(f"{_ASYNC}.resume_generation"),
        need(f"{_ASYNC}.is_paused"),
        need(f"{_ASYNC}.is_sleeping"),
        need(f"{_ASYNC}.sleep(level, mode)"),
        need(f"{_ASYNC}.wake_up(tags)"),
        need(f"{_ASYNC}.reset_prefix_cache(reset_running_requests)"),
        need(f"{_ASYNC}.reset_encoder_cache"),
        need(f"{_ASYNC}.collective_rpc(method, timeout, args, kwargs)"),
        need(f"{_ASYNC}.generate(prompt, sampling_params, request_id, lora_request)"),
        need(f"{_ASYNC}.errored"),
        need(f"{_ASYNC}.output_handler"),
        need(f"{_ASYNC}.output_processor"),
        need(f"{_ASYNC}.update_weight_version", since="0.27", without="no label"),
        need(f"{_CORE}:AsyncMPClient._call_utility_async(method, engine)"),
        need(f"{_CORE}:MPClient.core_engines"),
        need(f"{_CORE}:MPClient.resources"),
        need(f"{_CORE}:BackgroundResources.engine_dead"),
        need("vllm.v1.engine.output_processor:OutputProcessor.request_states"),
        need("vllm.v1.engine.output_processor:RequestState.lora_name"),
    ),
    "the server: engines/vllm/server.py": (
        need("POST /collective_rpc"),
        need("POST /pause(mode, clear_cache)"),
        need("POST /resume"),
        need("GET /is_paused"),
        need("GET /is_sleeping"),
        need("POST /wake_up(tags)"),
        need("POST /reset_prefix_cache(reset_running_requests)"),
        need("POST /reset_encoder_cache"),
        need("GET /get_world_size"),
        need("GET /server_info(config_format)"),
        need("GET /health"),
        need("GET /version"),
        need("POST /v1/completions"),
        need("POST /inference/v1/generate"),
        need("POST /update_weight_version", since="0.27", without="no label"),
        need("GET /weight_info", since="0.27", without="no label"),
    ),
    "adapters: engines/vllm/adapter.py, vllm_worker/adapters.py": (
        *(
            need(f"vllm.lora.request:LoRARequest.{name}")
            for name in ("lora_name", "lora_int_id", "lora_path", "load_inplace")
        ),
        need("vllm.lora.peft_helper:PEFTHelper.from_dict(config_dict)"),
        need("vllm.lora.peft_helper:PEFTHelper.validate_legal(lora_config)"),
        need("vllm.model_executor.model_loader.utils:get_model_cls(model_config)"),
        need(f"{_WORKER}.add_lora(lora_request)"),
        need(f"{_WORKER}.remove_lora(lora_id)"),
        need(f"{_WORKER}.list_loras"),
        need("POST /v1/load_lora_adapter"),
        need("POST /v1/unload_lora_adapter"),
    ),
}
