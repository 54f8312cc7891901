"""Whether the installed transformers has what is used of it."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import re
from typing import Any

from laconic.errors import ConfigError

FIRST = (5, 23)
"""Version of transformers from which on all names are there that are used here."""
_TRIED = ((5, 23), (5, 24))
"""Versions with which this file has been tried. Others are warned of, not refused: every load checks itself."""

_NAMES = {
    "transformers": ("AutoConfig", "AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING", "GenerationConfig"),
    "transformers.generation.utils": ("GenerationMixin._get_logits_processor",),
    "transformers.modeling_utils": (
        "PreTrainedModel._load_pretrained_model",
        "PreTrainedModel.set_attn_implementation",
        "ALL_ATTENTION_FUNCTIONS",
        "LoadStateDictConfig",
    ),
    "transformers.core_model_loading": (
        "convert_and_load_state_dict_in_model",
        "rename_source_key",
        "WeightConverter",
        "WeightRenaming",
        "MergeModulelist",
    ),
    "transformers.conversion_mapping": ("get_model_conversion_mapping",),
    "transformers.generation.configuration_utils": ("ContinuousBatchingConfig",),
    "transformers.generation.continuous_batching.continuous_api": (
        "ContinuousMixin.init_continuous_batching",
        "ContinuousBatchingManager._create_batch_processor",
        "ContinuousBatchingManager._generation_loop_body",
        "ContinuousBatchingManager._generation_step",
        "ContinuousBatchingManager.add_request",
        "ContinuousBatchingManager.cancel_request",
        "ContinuousBatchingManager.get_result",
        "ContinuousBatchingManager.is_running",
        "ContinuousBatchingManager.start",
        "ContinuousBatchingManager.stop",
    ),
    "transformers.generation.continuous_batching.cb_logits_processors": (
        "ContinuousBatchingLogitsProcessorList.__call__",
        "ContinuousBatchingLogitsProcessorList.check_kwargs",
        "ContinuousBatchingLogitsProcessorList.fill_defaults",
        "ContinuousBatchingLogitsProcessorList.prepare_tensor_args",
    ),
    "transformers.generation.continuous_batching.model_runner": ("ModelRunner._sample",),
    "transformers.generation.continuous_batching.requests": (
        "FutureRequestState",
        "RequestState.create_equivalent_initial_request",
        "RequestState.generated_len",
        "RequestState.to_generation_output",
    ),
    "transformers.generation.continuous_batching.scheduler": (
        "FIFOScheduler.add_waiting_request",
        "FIFOScheduler.finish_request",
        "FIFOScheduler.schedule_batch",
    ),
    "transformers.generation.continuous_batching.cache": (
        "PagedAttentionCache.search_prefix_match",
        "PagedAttentionCache.update",
        "group_layers_by_attn_type",
    ),
    "transformers.generation.continuous_batching.input_outputs": ("ContinuousBatchingIOs.get_model_kwargs",),
    "transformers.integrations.sdpa_attention": ("sdpa_attention_forward",),
}


_ARGUMENTS = {
    ("transformers.generation.configuration_utils", "ContinuousBatchingConfig"): (
        *("page_size", "num_blocks", "max_batch_tokens", "max_requests_per_batch"),
        *("auto_switch_to_flash", "use_cuda_graph", "use_async_batching"),
    ),
    ("transformers.generation.continuous_batching.continuous_api", "ContinuousMixin.init_continuous_batching"): (
        *("generation_config", "continuous_batching_config"),
    ),
    ("transformers.generation.continuous_batching.continuous_api", "ContinuousBatchingManager.add_request"): (
        *("input_ids", "request_id", "max_new_tokens", "eos_token_id", "logit_processor_kwargs"),
    ),
    ("transformers.generation.continuous_batching.continuous_api", "ContinuousBatchingManager.stop"): (
        *("block", "timeout", "hard_stop"),
    ),
}


def check_transformers(warns: bool = True) -> None:
    """Check that transformers is there and has all that is used of it; with `warns` log, once, a version not tried."""
    remedy = f"pip install 'transformers>={FIRST[0]}.{FIRST[1]}'"
    try:
        import transformers
    except ImportError:
        raise ConfigError(f"inference needs transformers: {remedy}") from None
    version = transformers.__version__
    for module, names in _NAMES.items():
        for name in names:
            _find(module, name, version, remedy)
    for (module, name), arguments in _ARGUMENTS.items():
        known = inspect.signature(_find(module, name, version, remedy)).parameters
        if lost := [argument for argument in arguments if argument not in known]:
            raise ConfigError(
                f"{module}.{name} of transformers {version} has no argument {', '.join(lost)}, which laconic.infer"
                f" gives; {remedy}"
            )
    if warns:
        _warn_if_untried(version)


def _find(module: str, name: str, version: str, remedy: str) -> Any:
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        raise ConfigError(
            f"transformers {version} has no {module}.{name}, which laconic.infer uses; {remedy}"
        ) from None
    return found


@functools.cache
def _warn_if_untried(version: str) -> None:
    parts = re.match(r"(\d+)\.(\d+)", version)
    if parts is None or (int(parts[1]), int(parts[2])) not in _TRIED:
        tried = " and ".join(f"{major}.{minor}" for major, minor in _TRIED)
        logging.getLogger("laconic").warning(
            "transformers %s is installed, and laconic.infer has been tried with %s; all names that are used are there,"
            " and each load compares its logits with those of the model's plain forward",
            version,
            tried,
        )
