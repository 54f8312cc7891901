"""The only file that touches names of transformers which are private or move fast.

What is used of it, and for what:

- `PreTrainedModel._load_pretrained_model`, overridden in a subclass: between building a model on the meta device and
  loading its weights, the experts of an attention worker are taken out, so that their weights are never read.
- `core_model_loading` and `conversion_mapping`: an expert worker reads its share of each layer's experts through the
  same renaming and merging of a checkpoint's tensors as `from_pretrained`.
- `init_continuous_batching` and ContinuousBatchingManager: requests, the paged cache, prefill mixed with decode.
- The manager's loop and its scheduler's choice of a batch: a forward that fails ends those requests alone that make it
  fail, not the loop.
- The manager's `logit_processor`, which is told the requests of each batch, and `_sample` of its ModelRunner, which is
  called with their logits: the tokens are chosen there.
- `GenerationMixin._get_logits_processor`: the processors of one request, made by logits_rules.py, which is given the
  model. Those of a manager see a request's last token alone.
- `PagedAttentionCache.update`: rows of multi-head latent attention, which are narrower than the paged cache, are filled
  with zeros.

`check_transformers` says at once if the installed version lacks a name or an argument.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from laconic.errors import CollectiveError, ConfigError, LaconicError, ModelError
from laconic.infer.logits_rules import LogitsRules, make_rules, try_rules
from laconic.infer.sampling import ChosenToken, Sampling, sample
from laconic.json_text import parse_json
from laconic.moe.huggingface.blocks import Block, find_blocks
from laconic.moe.huggingface.experts import FusedExperts, check
from laconic.train.model import no_progress_bars

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = [
    "FIRST",
    "CacheLimits",
    "Finished",
    "Replay",
    "Requests",
    "check_transformers",
    "check_weights",
    "find_experts",
    "load_attention_model",
    "load_experts",
    "load_whole_model",
    "num_positions",
    "quiet_transformers",
    "read_config",
]

FIRST = (5, 23)
"""Version of transformers from which on all names are there that are used here."""
_TRIED = ((5, 23), (5, 24))
"""Versions with which this file has been tried. Others are warned of, not refused: every load checks itself."""

_NAMES = {
    "transformers": ("AutoConfig", "AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING", "GenerationConfig"),
    "transformers.generation.utils": ("GenerationMixin._get_logits_processor",),
    "transformers.modeling_utils": (
        "PreTrainedModel._load_pretrained_model",
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
    "transformers.generation.continuous_batching.cache": ("PagedAttentionCache.update", "group_layers_by_attn_type"),
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
    """Check the installed transformers.

    Args:
        warns: whether to log, once, that the version has not been tried.

    Raises:
        ConfigError: it is missing, or lacks a name or an argument that is used here.
    """
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


def read_config(model_dir: Path) -> PretrainedConfig:
    """Read the configuration of the model in `model_dir`.

    Raises:
        ModelError: the directory holds no model that can be served, or a quantized one.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
    from transformers.generation.continuous_batching.cache import group_layers_by_attn_type

    if not (model_dir / "config.json").is_file():
        raise ModelError(
            f"{str(model_dir)!r} holds no config.json, so it is no model; give a directory that save_pretrained or"
            " `laconic export` wrote"
        )
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # foreign code may raise anything
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{str(model_dir / 'config.json')!r} cannot be read: {why}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"{str(model_dir)!r} is a model of type {config.model_type}, which transformers does not know as a causal"
            " language model; only those can be served"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"{str(model_dir)!r} holds quantized weights, which laconic.infer does not read; load the model with"
            " dequantize=True and save it"
        )
    try:
        group_layers_by_attn_type(config.get_text_config())
    except Exception as error:  # layers of another kind, or no list of layers at all
        raise ModelError(
            f"{str(model_dir)!r} is a model of type {config.model_type}, for some of whose layers transformers has no"
            f" paged cache ({error}); only models of full and sliding attention can be served"
        ) from None
    return config


def num_positions(config: PretrainedConfig) -> int | None:
    """Return how many positions a model has, prompt and answer together; None if its configuration names no number."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def find_experts(config: PretrainedConfig, dtype: torch.dtype | None = None) -> tuple[Any, dict[str, Block]]:
    """Build the model on the meta device and find its experts, by module name and in the order of layers.

    A model without any is dense.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        wanted = dtype or config.dtype or torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=wanted, trust_remote_code=False)
    return model, find_blocks(model)


def load_whole_model(model_dir: Path, dtype: torch.dtype | None) -> nn.Module:
    """Load a model with its experts, for inference.

    Raises:
        ModelError: weights are missing or cannot be read.
    """
    return load_attention_model(model_dir, dtype, None)


def load_attention_model(
    model_dir: Path, dtype: torch.dtype | None, replace: Callable[[int, nn.Module], nn.Module] | None
) -> nn.Module:
    """Load a model for inference, with something else in the place of each layer's experts.

    The weights of the experts are not read.

    Args:
        model_dir: directory of the model.
        dtype: of the weights; None takes the checkpoint's.
        replace: returns, for a layer's number and its experts (on the meta device), what stands there instead; None
            loads the experts too.

    Raises:
        ModelError: weights are missing or cannot be read.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = read_config(model_dir)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    taken_out: list[str] = []

    def load(model: Any, *args: Any, **kwargs: Any) -> Any:
        for layer, name in enumerate(find_blocks(model) if replace is not None else ()):
            owner, _, child = name.rpartition(".")
            assert replace is not None
            setattr(model.get_submodule(owner), child, replace(layer, model.get_submodule(name)))
            taken_out.append(f"{name}.")
        return kind._load_pretrained_model(model, *args, **kwargs)

    # Conversions of weights are registered by the name of the class; whether its experts can be grouped is read from
    # the source of its module.
    own = {"_load_pretrained_model": staticmethod(load), "__module__": kind.__module__}
    without_experts: Any = type(kind.__name__, (kind,), own)
    with quiet_transformers():
        try:
            model, info = without_experts.from_pretrained(
                model_dir,
                config=config,
                dtype=dtype or "auto",
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
            )
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(f"the weights in {str(model_dir)!r} cannot be loaded: {error}") from error
    _check_loaded(model_dir, info["missing_keys"], info["mismatched_keys"])
    if strange := sorted(key for key in info["unexpected_keys"] if not key.startswith(tuple(taken_out))):
        logging.getLogger("laconic").warning(
            "%s holds %d tensors that a %s has not, and that are left aside: %s%s",
            model_dir.name,
            len(strange),
            kind.__name__,
            ", ".join(strange[:5]),
            ", ..." * (len(strange) > 5),
        )
    model.__class__ = kind
    return model.eval()


def load_experts(model_dir: Path, dtype: torch.dtype | None, share: Callable[[int], range]) -> list[FusedExperts]:
    """Load a range of the experts of every layer, and nothing else.

    Args:
        model_dir: directory of the model.
        dtype: of the weights; None takes the checkpoint's.
        share: returns the range of a layer's experts that are wanted, for their number.

    Raises:
        ModelError: weights are missing or cannot be read, or the experts compute something unknown.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        MergeModulelist,
        WeightConverter,
        WeightRenaming,
        convert_and_load_state_dict_in_model,
        rename_source_key,
    )
    from transformers.modeling_utils import LoadStateDictConfig

    # 1. The model without memory, its experts cut down to the share.
    config = read_config(model_dir)
    model, blocks = find_experts(config, dtype)
    shares: dict[str, range] = {}
    checked: set[object] = set()
    for name, block in blocks.items():
        experts = model.get_submodule(name)
        if (kind := (type(experts), str(experts))) not in checked:
            check(experts, name)
            checked.add(kind)
        held = share(block.num_experts)
        for key, parameter in list(experts.named_parameters()):
            shares[f"{name}.{key}"] = held
            experts._parameters[key] = nn.Parameter(parameter[held.start : held.stop], requires_grad=False)

    # 2. The checkpoint's tensors of that share, as transformers would rename and merge them.
    mapping: list[Any] = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    merged = {
        pattern
        for converter in converters
        for pattern in converter.source_patterns
        if any(isinstance(operation, MergeModulelist) for operation in converter.operations)
    }
    known = model.state_dict()
    wanted: dict[str, Tensor | _Lazy] = {}
    for key, tensor in _tensors(model_dir).items():
        target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        if (held_here := shares.get(target)) is None:
            continue
        if pattern not in merged:  # one tensor holds all experts
            wanted[key] = _Lazy(tensor, held_here)
        elif (number := _expert_number(key)) is not None and number in held_here:
            wanted[key] = _Lazy(tensor, None)
    with quiet_transformers():
        try:
            info, _ = convert_and_load_state_dict_in_model(
                model, wanted, LoadStateDictConfig(dtype=model.dtype, weight_mapping=mapping)
            )
        except Exception as error:
            raise ModelError(f"the weights in {str(model_dir)!r} cannot be loaded: {error}") from error
    failed = {str(key) for key in info.conversion_errors} & set(shares)
    _check_loaded(model_dir, (info.missing_keys & set(shares)) | failed, info.mismatched_keys)

    # 3. Experts on sorted rows.
    layers = []
    for name in blocks:
        experts = model.get_submodule(name)
        layers.append(FusedExperts(experts, {key: _frozen(p) for key, p in experts.named_parameters()}))
    return layers


class _Lazy:
    """A tensor of a checkpoint, or the part of it along the first dimension, that is read when it is indexed."""

    def __init__(self, source: Any, part: range | None) -> None:
        self._source, self._part = source, part

    def __getitem__(self, index: Any) -> Tensor:
        if self._part is None:
            tensor: Tensor = self._source[index]
        else:
            tensor = self._source[self._part.start : self._part.stop]
        return tensor


def _frozen(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach(), requires_grad=False)


def _expert_number(key: str) -> int | None:
    """Return the expert of a checkpoint's tensor, which has its number between dots behind its list of experts."""
    found = re.search(r"experts\.(\d+)\.", key)
    return None if found is None else int(found[1])


def check_weights(model_dir: Path) -> None:
    """Check that the weights are safetensors files and whole, without reading any.

    Raises:
        ModelError: a file is missing, cut short or of another kind.
    """
    _tensors(model_dir)


def _tensors(model_dir: Path) -> dict[str, Any]:
    """List the tensors of all safetensors files, each to be read when it is indexed."""
    found: dict[str, Any] = {}
    for file in _weight_files(model_dir):
        if not (model_dir / file).is_file():
            pickled = sorted(path.name for path in model_dir.glob("*.bin"))
            instead = f" (it holds {pickled[0]}, a pickle, which is never opened)" if pickled else ""
            raise ModelError(
                f"{str(model_dir)!r} holds no {file}{instead}; only safetensors are served: load the model with"
                " transformers and save it with save_pretrained"
            )
        try:
            opened = safe_open(str(model_dir / file), framework="pt")
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{str(model_dir / file)!r} is no whole safetensors file ({error}); copy or download it again"
            ) from None
        found |= {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
    return found


def _weight_files(model_dir: Path) -> list[str]:
    """Names of the safetensors files of a checkpoint, by its index if it has one."""
    index = model_dir / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"]
    try:
        return sorted({str(file) for file in parse_json(index.read_bytes())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{str(index)!r} is no index of safetensors files ({type(error).__name__}: {error}); save the model again"
        ) from None


def _check_loaded(model_dir: Path, missing: Any, mismatched: Any) -> None:
    wrong = sorted(missing) or sorted(str(key[0]) for key in mismatched)
    if wrong:
        shown = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise ModelError(
            f"the checkpoint in {str(model_dir)!r} lacks {shown}, or holds it in another shape than config.json says;"
            " save the model again"
        )


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No bar for each of the workers, and no table of tensors that were left out on purpose; all else is heard."""

    def is_no_table(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in str(record.msg)

    loading = logging.getLogger("transformers.modeling_utils")
    loading.addFilter(is_no_table)
    try:
        with no_progress_bars():
            yield
    finally:
        loading.removeFilter(is_no_table)


def fit_latent_attention(model: Any) -> None:
    """Let the paged cache, which `Requests` makes, hold the rows of multi-head latent attention.

    The cache has one width for keys and values, and takes it, and their number of heads, from the configuration, whose
    `head_dim` counts the rotary part alone. Where attention functions fill the cache, they have keys and values, of
    which the keys are wider. From transformers 5.24 on the model's layers do, with the latents that both are made of,
    as one head. The model's modules have been built by then.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    text = model.config.get_text_config()
    if getattr(text, "kv_lora_rank", None) is None:
        return
    by_layers = "cache" not in inspect.signature(sdpa_attention_forward).parameters
    if by_layers and any(hasattr(module, "expand_kv") for module in model.modules()):
        text.head_dim, text.num_key_value_heads = max(text.kv_lora_rank, text.qk_rope_head_dim), 1
    else:
        text.head_dim = text.qk_nope_head_dim + text.qk_rope_head_dim


def _widen_rows(cache: Any) -> None:
    """Let a paged cache take rows that are narrower than it is: zeros fill them, and are cut off what it returns."""
    update = cache.update

    def widened(key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]) -> Any:
        width = cache.layer_to_allocator[layer_idx].head_dim
        rows = (key_states, value_states)
        found = update(*(nn.functional.pad(each, (0, width - each.shape[-1])) for each in rows), layer_idx, kwargs)
        return tuple(whole[..., : each.shape[-1]].contiguous() for whole, each in zip(found, rows, strict=True))

    cache.update = widened


@dataclass(frozen=True)
class CacheLimits:
    """Size of one micro-batch's paged cache and of its batches.

    Attributes:
        cache_tokens: tokens, of prompts and answers together, that the cache holds.
        batch_tokens: tokens that one forward takes at most; longer prompts are cut.
    """

    cache_tokens: int = 4096
    batch_tokens: int = 256

    PAGE_TOKENS = 16

    def __post_init__(self) -> None:
        for name, least in (("cache_tokens", self.PAGE_TOKENS), ("batch_tokens", 1)):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"{name} is {value}, but it must be at least {least}")


@dataclass(frozen=True)
class Finished:
    """A request's end.

    Attributes:
        name: of the request.
        tokens: that it was given.
        error: what ended it, if anything did.
        is_own: whether that is the request's own error, after which others go on.
    """

    name: str
    tokens: list[int]
    error: str | None = None
    is_own: bool = False


@dataclass(frozen=True)
class Replay:
    """A request whose tokens are given: its logits are heard, not obeyed.

    Attributes:
        tokens: of the answer, in order.
        hear: is called, on the thread that runs the model, with the number of a token and the logits before any
            processor, float32 [vocabulary] on the CPU; they are the caller's only until it returns.
        on_end: is called, on another thread, at the end.
    """

    tokens: list[int]
    hear: Callable[[int, Tensor], None]
    on_end: Callable[[Finished], None]


class _Sampler:
    """Chooses the token of each request, in the place of a manager's own choice.

    A manager tells its logits processors which requests are in a batch. The sampler stands before them for that alone:
    there are none, since each request has its own rules. As `ModelRunner._sample` it gets the logits.

    Args:
        processors: of the manager.
        on_tokens: called once per batch, with each request's name and the token it is given.
        on_failed: called with a request's name and what keeps a token from being chosen.

    Attributes:
        replays: requests whose tokens are given, by name.
    """

    def __init__(
        self,
        processors: Any,
        on_tokens: Callable[[list[tuple[str, ChosenToken]]], None],
        on_failed: Callable[[str, Exception], None],
    ) -> None:
        self._processors, self._on_tokens, self._on_failed = processors, on_tokens, on_failed
        self.tensors_required: int = processors.tensors_required
        self.do_processing: bool = processors.do_processing
        self._states: list[Any] = []
        self.replays: dict[str, Replay] = {}

    def fill_defaults(self, storage: Tensor) -> None:
        self._processors.fill_defaults(storage)

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Accept what `Requests.add` gives."""

    def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: Tensor) -> Tensor:
        self._states = [request.state for request in requests_in_batch if request.has_new_token]
        return self._processors.prepare_tensor_args(requests_in_batch, arg_storage)

    def __call__(self, input_ids: Tensor, scores: Tensor, arguments: Tensor) -> Tensor:
        """Process logits; called if `do_processing`."""
        return self._processors(input_ids, scores, arguments)

    def choose(self, scores: Tensor, output_ids: Tensor) -> None:
        """Write the chosen tokens into `output_ids`.

        Args:
            scores: float32 [1, rows, vocabulary]; the first rows are those of the requests with a new token, in order,
                and what follows is padding.
            output_ids: integers [1 or more, at least rows]; tokens belong into the first row.
        """
        if not self._states:
            return
        rows = scores[0, : len(self._states)].cpu()
        # NumPy's argmax is 10 times as fast as torch's here. Both take the first of equals, and NaN for the greatest.
        places = torch.from_numpy(rows.numpy().argmax(-1))
        finite = rows.gather(-1, places[:, None])[:, 0].isfinite().tolist()
        chosen: list[tuple[str, ChosenToken]] = []
        tokens = places.tolist()
        for number, state in enumerate(self._states):
            if (replay := self.replays.get(state.request_id)) is not None:
                step = _position(state)
                replay.hear(step, rows[number])
                with contextlib.suppress(LaconicError):  # logits without a number
                    sample(rows[number], _TRIAL, step)  # what is tried is all that a request meets
                tokens[number] = replay.tokens[step]
                continue
            options = state.logit_processor_kwargs
            rules: LogitsRules | None = options["rules"]
            if finite[number] and rules is None and _takes_greatest(options["sampling"]):
                token: ChosenToken | None = ChosenToken(tokens[number])
            else:
                token = self._sample(state, rows[number], rules)
            if token is not None:
                tokens[number] = token.token
                chosen.append((state.request_id, token))
        output_ids[0, : len(tokens)] = torch.tensor(tokens)
        self._on_tokens(chosen)

    def _sample(self, state: Any, logits: Tensor, rules: LogitsRules | None) -> ChosenToken | None:
        position = _position(state)
        try:
            if rules is None:
                return sample(logits, state.logit_processor_kwargs["sampling"], position)
            token = sample(logits, rules.sampling, position, rules.scores(logits, position))
        except Exception as error:  # of this request alone
            self._on_failed(state.request_id, error)
            return None
        rules.take(token.token, position)
        return token


_TRIAL = Sampling(temperature=1.0, top_p=0.9)


def _position(state: Any) -> int:
    """Number of tokens that a request has been given.

    One that lost its place in the cache comes again with its tokens in the prompt.
    """
    return len(state.initial_tokens) - int(state.logit_processor_kwargs["prompt_tokens"]) + int(state.generated_len())


def _takes_greatest(sampling: Sampling) -> bool:
    return sampling.is_greedy and sampling.logprobs is None


class _BatchFailedError(Exception):
    """A forward, or the choice of its tokens, has raised `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class _FaultyBatches:
    """Lets a manager's loop outlive a batch that raises.

    The requests of such a batch are tried again, each alone until it has its next token. One that fails alone ends; the
    others go on with the tokens that they have. What else the loop may raise, of the scheduler or the cache, ends it:
    nothing that it leaves behind could be trusted.

    Args:
        manager: whose loop it is.
        on_alone: called, on its thread, with the name of a request that has failed alone, the tokens that it was given,
            and why it failed; the manager knows nothing of it any more.
        on_ended: called, on its thread, with what ends the loop, before any request hears of it.
    """

    def __init__(
        self, manager: Any, on_alone: Callable[[str, list[int], Exception], None], on_ended: Callable[[Exception], None]
    ) -> None:
        self._on_alone, self._on_ended = on_alone, on_ended
        self._body, self._step = manager._generation_loop_body, manager._generation_step
        self._suspects: deque[str] = deque()
        manager._generation_loop_body, manager._generation_step = self._run_body, self._run_step

    def watch(self, processor: Any) -> None:
        """Choose the batches of a manager's processor."""
        scheduler = processor.scheduler
        for owner, names in (
            (scheduler, ("active_requests", "waiting_requests", "waiting_requests_order", "block_new_requests")),
            (processor.inputs_and_outputs, ("requests_in_batch",)),
        ):
            if lost := [name for name in names if not hasattr(owner, name)]:
                raise ConfigError(
                    f"{type(owner).__name__} of transformers has no {', '.join(lost)}, which is used here"
                )
        schedule = scheduler.schedule_batch
        scheduler.schedule_batch = lambda *budgets: self._schedule(scheduler, schedule, *budgets)

    def _run_step(self) -> None:
        try:
            self._step()
        except CollectiveError:  # an expert worker is lost
            raise
        except Exception as error:
            raise _BatchFailedError(error) from error

    def _run_body(self, processor: Any, bootstrapping: bool) -> bool:
        try:
            goes_on: bool = self._body(processor, bootstrapping)
            if goes_on and self._suspects:
                self._clear(processor.inputs_and_outputs.requests_in_batch)
            return goes_on
        except _BatchFailedError as failed:
            self._recover(processor, failed.error)
            return True
        except CollectiveError:
            raise
        except Exception as error:
            self._on_ended(error)
            raise

    def _clear(self, batch: list[Any]) -> None:
        for future in batch:
            if future.has_new_token and self._suspects and future.state.request_id == self._suspects[0]:
                self._suspects.popleft()

    def _recover(self, processor: Any, error: Exception) -> None:
        states = [future.state for future in processor.inputs_and_outputs.requests_in_batch]
        names = [state.request_id for state in states]
        logging.getLogger("laconic").error("a forward of %d requests failed", len(states), exc_info=error)
        if len(states) == 1:
            self._suspects = deque(name for name in self._suspects if name != names[0])
            processor.scheduler.finish_request(names[0])
            self._on_alone(names[0], states[0].to_generation_output().generated_tokens, error)
            return
        for state in states:
            again = state.create_equivalent_initial_request()
            processor.scheduler.finish_request(state.request_id)
            processor.scheduler.add_waiting_request(again)
        self._suspects.extend(name for name in names if name not in self._suspects)

    def _schedule(self, scheduler: Any, schedule: Callable[..., Any], *budgets: int) -> Any:
        """Choose a batch; while there are suspects, from the first of them alone."""
        active, waiting = scheduler.active_requests, scheduler.waiting_requests
        while self._suspects and self._suspects[0] not in active and self._suspects[0] not in waiting:
            self._suspects.popleft()  # it was cancelled
        if not self._suspects:
            return schedule(*budgets)
        name = self._suspects[0]
        order, blocked = scheduler.waiting_requests_order, scheduler.block_new_requests
        scheduler.active_requests = {key: state for key, state in active.items() if key == name}
        scheduler.waiting_requests = {key: state for key, state in waiting.items() if key == name}
        scheduler.waiting_requests_order = deque(scheduler.waiting_requests)
        scheduler.block_new_requests = False
        try:
            return schedule(*budgets)
        finally:
            active.update(scheduler.active_requests)
            if name not in scheduler.waiting_requests and waiting.pop(name, None) is not None:
                order.remove(name)
            scheduler.active_requests, scheduler.waiting_requests = active, waiting
            scheduler.waiting_requests_order, scheduler.block_new_requests = order, blocked


class Requests:
    """The requests of one micro-batch, by a ContinuousBatchingManager with a thread of its own.

    Args:
        model: of `load_attention_model`; several managers may share it.
        limits: of the cache.
        on_finished: called, on another thread, for every request that ends; not for those that were cancelled. A
            request for which no token can be chosen may end a second time.
        on_tokens: called, on another thread, once per forward, with each request's name and the token it is given.
        on_trouble: called, on another thread, with the name of a request that has failed by itself in a way that may
            not be its own, and with what ends it, to be called once the others are known to be well.
        on_ended: called, on another thread, with what ends the loop of requests, before any of them hears of it.

    Attributes:
        eos_token_ids: tokens that end every request.

    Raises:
        ModelError: transformers does not batch requests of such a model.
    """

    def __init__(
        self,
        model: Any,
        limits: CacheLimits,
        on_finished: Callable[[Finished], None],
        on_tokens: Callable[[list[tuple[str, ChosenToken]]], None] = lambda tokens: None,
        on_trouble: Callable[[str, Callable[[], None]], None] = lambda name, end: end(),
        on_ended: Callable[[str], None] = lambda why: None,
    ) -> None:
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        self._model, self._generation = model, model.generation_config
        eos = self._generation.eos_token_id
        eos = -1 if eos is None else eos
        try_rules(model, self._generation)
        # Without rules: see logits_rules.py.
        generation = GenerationConfig(do_sample=False, num_beams=1, eos_token_id=eos)
        batching = ContinuousBatchingConfig(
            page_size=limits.PAGE_TOKENS,
            num_blocks=-(-limits.cache_tokens // limits.PAGE_TOKENS),
            max_batch_tokens=limits.batch_tokens,
            max_requests_per_batch=limits.batch_tokens,
            auto_switch_to_flash=False,
            use_cuda_graph=False,
            use_async_batching=False,
        )
        try:
            self._manager = model.init_continuous_batching(generation, batching)
        except Exception as error:  # foreign code may raise anything
            raise ModelError(
                f"transformers does not batch requests of {model.config.model_type} models ({type(error).__name__}:"
                f" {error}); use its own generate for this model"
            ) from error
        self.eos_token_ids = tuple(token for token in ([eos] if isinstance(eos, int) else eos) if token >= 0)
        self._on_finished, self._on_trouble = on_finished, on_trouble
        faults = _FaultyBatches(
            self._manager, self._fail_alone, lambda error: on_ended(f"{type(error).__name__}: {error}")
        )
        sampler = self._sampler = _Sampler(self._manager.logit_processor, on_tokens, self._fail)
        create = self._manager._create_batch_processor

        def create_with_sampler() -> Any:
            processor = create()
            processor.model_runner._sample = sampler.choose
            faults.watch(processor)
            if getattr(model.config.get_text_config(), "kv_lora_rank", None) is not None:
                _widen_rows(processor.cache)
            return processor

        self._manager.logit_processor = sampler
        self._manager._create_batch_processor = create_with_sampler
        self._manager.start()
        threading.Thread(target=self._watch, name="laconic-results", daemon=True).start()

    @property
    def runs_here(self) -> bool:
        """Whether this thread is the one that runs the model for these requests."""
        return threading.current_thread() is self._manager._generation_thread

    def add(self, name: str, prompt: list[int], sampling: Sampling) -> None:
        """Add a request for tokens after `prompt`."""
        eos = [*(() if sampling.ignore_eos else self.eos_token_ids), *sampling.stop_token_ids]
        try:
            rules = make_rules(self._model, self._generation, sampling, prompt, eos)
        except Exception as error:  # transformers checks the values of a request's rules
            self._end(Finished(name, [], f"the request's rules for logits are refused: {error}", is_own=True))
            return
        self._add(name, prompt, sampling, eos or [-1], rules)

    def replay(self, name: str, prompt: list[int], replay: Replay) -> None:
        """Add a request whose tokens are given; neither `on_finished` nor `on_tokens` hears of it."""
        self._sampler.replays[name] = replay
        self._add(name, prompt, Sampling(max_new_tokens=len(replay.tokens)), [-1], None)

    def _add(
        self, name: str, prompt: list[int], sampling: Sampling, end_tokens: list[int], rules: LogitsRules | None
    ) -> None:
        added = self._manager.add_request(
            prompt,
            name,
            sampling.max_new_tokens,
            eos_token_id=end_tokens,
            sampling=sampling,
            rules=rules,
            prompt_tokens=len(prompt),
        )
        if added is None:
            self._end(Finished(name, [], "the generation loop has ended"))

    def _end(self, finished: Finished) -> None:
        replay = self._sampler.replays.pop(finished.name, None)
        (self._on_finished if replay is None else replay.on_end)(finished)

    def cancel(self, name: str) -> None:
        """Forget a request; nothing more is heard of it, unless it has ended already."""
        self._manager.cancel_request(name)

    def stop(self) -> None:
        """End the manager's thread; requests in flight fail."""
        self._manager.stop(block=True, timeout=5.0, hard_stop=True)

    def _fail(self, name: str, error: Exception) -> None:
        """End a request for which no token can be chosen."""
        self._manager.cancel_request(name)
        if isinstance(error, LaconicError):
            self._end(Finished(name, [], str(error), is_own=True))
        else:
            logging.getLogger("laconic").error("no token can be chosen for %s", name, exc_info=error)
            self._fail_alone(name, [], error)

    def _fail_alone(self, name: str, tokens: list[int], error: Exception) -> None:
        finished = Finished(name, tokens, str(error) or type(error).__name__, is_own=True)
        self._on_trouble(name, lambda: self._end(finished))

    def _watch(self) -> None:
        while True:
            running = self._manager.is_running()
            output = self._manager.get_result(timeout=0.1)
            if output is not None and output.is_finished():
                self._end(Finished(output.request_id, output.generated_tokens, output.error))
            elif output is None and not running:
                return
