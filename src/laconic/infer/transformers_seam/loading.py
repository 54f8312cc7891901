"""Models, their configurations and weights from a directory, whole or in the parts that workers hold."""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from laconic.errors import ModelError, first_line
from laconic.formats.safetensors_header import INDEX_FILE, read_index
from laconic.moe.experts.modules import Experts
from laconic.moe.huggingface.blocks import Block, find_blocks
from laconic.moe.huggingface.experts import FusedExperts, check
from laconic.train.model import no_progress_bars
from laconic.train.model_source import how_to_get_a_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def read_config(model_dir: Path) -> PretrainedConfig:
    """Read the configuration of the model in `model_dir`.

    A directory that holds no model that can be served, a quantized one, or one with an adapter, is a ModelError.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
    from transformers.generation.continuous_batching.cache import group_layers_by_attn_type

    if not (model_dir / "config.json").is_file():
        raise ModelError(f"{str(model_dir)!r} holds no config.json, so it is no model; {how_to_get_a_model(model_dir)}")
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # foreign code may raise anything
        raise ModelError(f"{str(model_dir / 'config.json')!r} cannot be read: {first_line(error)}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"{str(model_dir)!r} is a model of type {config.model_type}, which transformers does not know as a causal"
            " language model; only those can be served"
        )
    if (model_dir / "adapter_config.json").is_file():
        raise ModelError(
            f"{str(model_dir)!r} holds an adapter of PEFT beside the model, of whose products laconic.infer would leave"
            " out those of experts; merge it (merge_and_unload) and save the model, or move adapter_config.json away"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"{str(model_dir)!r} holds quantized weights, which laconic.infer does not read; load the model with"
            " dequantize=True and save it"
        )
    if (weights := getattr(config, "transformers_weights", None)) is not None:
        raise ModelError(
            f"{str(model_dir / 'config.json')!r} has transformers_weights = {weights!r}, but laconic.infer reads"
            " model.safetensors or its index; load the model with transformers and save it with save_pretrained"
        )
    try:
        groups = group_layers_by_attn_type(config.get_text_config())
    except Exception as error:  # layers of another kind, or no list of layers at all
        raise ModelError(
            f"{str(model_dir)!r} is a model of type {config.model_type}, for some of whose layers transformers has no"
            f" paged cache ({error}); only models of full and sliding attention can be served"
        ) from None
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if (cap := getattr(config.get_text_config(), "attn_logit_softcapping", None)) is not None and _loses_caps(kind):
        # In half precision the load's check may take that for rounding.
        raise ModelError(
            f"{str(model_dir / 'config.json')!r} has attn_logit_softcapping = {cap!r}, which {kind.__name__} obeys and"
            " transformers' paged attention leaves out, so its answers would be others; use its own generate"
        )
    own_masks = sys.modules[kind.__module__]
    if "sliding_attention" in groups and not hasattr(own_masks, "create_sliding_window_causal_mask"):
        # The cache would forget what the model itself attends to, behind the tokens of the load's check.
        raise ModelError(
            f"{str(model_dir / 'config.json')!r} has a sliding_window, which transformers' paged cache obeys and"
            f" {kind.__name__} itself does not; its answers would differ beyond it: use its own generate"
        )
    if config.dtype is None:
        config.dtype = _first_dtype(model_dir)
    return config


def _loses_caps(kind: Any) -> bool:
    """Return whether a family caps scores of attention, but not where the paged cache has them computed."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    paged = ALL_ATTENTION_FUNCTIONS.get("paged|eager")  # of families that have no other attention
    return not kind._supports_sdpa and paged is not None and "softcap" not in inspect.getsource(paged)


def _first_dtype(model_dir: Path) -> torch.dtype | None:
    """Return the dtype of the first floating tensor of a checkpoint, which transformers takes where none is named.

    None if there is no such tensor. Workers that load other tensors first would take another.
    """
    try:
        with safe_open(str(model_dir / _weight_files(model_dir)[0]), framework="pt") as file:
            found = (_FLOATS.get(file.get_slice(key).get_dtype()) for key in file.keys())  # noqa: SIM118
            return next(filter(None, found), None)
    except (ModelError, SafetensorError, OSError, IndexError):  # what is wrong with it is said when it is loaded
        return None


_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def num_positions(config: PretrainedConfig) -> int | None:
    """Return how many positions of a model are served, prompt and answer together; None if it names no number.

    "longrope" has other frequencies for sequences beyond those of its first training. transformers takes them for a
    whole batch if one of its sequences is so long, and leaves keys in the cache as they are: a request would depend on
    its neighbours. So only shorter ones are served.
    """
    config = config.get_text_config()
    ropes = getattr(config, "rope_parameters", None) or {}
    ropes = [ropes, *(each for each in ropes.values() if isinstance(each, dict))]  # one of all layers, or of each kind
    found = [getattr(config, "max_position_embeddings", None)]
    found += [rope.get("original_max_position_embeddings") for rope in ropes if rope.get("rope_type") == "longrope"]
    return min((each for each in found if isinstance(each, int) and each > 0), default=None)


def find_experts(config: PretrainedConfig, dtype: torch.dtype | None = None) -> tuple[Any, dict[str, Block]]:
    """Build the model on the meta device and find its experts, by module name and in the order of layers.

    A model without any is dense; a configuration of which transformers makes none is a ModelError.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        wanted = dtype or config.dtype or torch.float32
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=wanted, trust_remote_code=False)
        except Exception as error:  # foreign code may raise anything
            raise ModelError(
                f"transformers makes no {config.model_type} model of the config.json ({type(error).__name__}: {error});"
                " mend its sizes or its dtype"
            ) from error
    return model, find_blocks(model)


def load_attention_model(
    model_dir: Path, dtype: torch.dtype | None, replace: Callable[[int, nn.Module], nn.Module] | None
) -> nn.Module:
    """Load a model for inference, with something else in the place of each layer's experts, whose weights are not read.

    `replace` returns it, for the layer's number and its experts on the meta device; None loads the experts too. `dtype`
    None is the checkpoint's. Weights that are missing or cannot be read are a ModelError.
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


def load_experts(
    model_dir: Path,
    dtype: torch.dtype | None,
    share: Callable[[int], Sequence[int]],
    keep: Callable[[str, FusedExperts], Experts] | None = None,
) -> list[Experts]:
    """Load some of the experts of every layer, and nothing else, one layer after the other.

    `share` returns which of a layer's experts are wanted, ascending, for their number; it is called once for each
    layer, in their order. `keep` returns what is kept of a layer, for its name and its experts, before the next is
    read; None keeps it as it is. `dtype` None is the checkpoint's. A ModelError if weights are missing or cannot be
    read, or the experts compute something unknown.
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
    shares: dict[str, Sequence[int]] = {}
    counts: dict[str, int] = {}
    checked: set[object] = set()
    for name, block in blocks.items():
        experts = model.get_submodule(name)
        if (kind := (type(experts), str(experts))) not in checked:
            check(experts, name)
            checked.add(kind)
        held = share(block.num_experts)
        for key, parameter in list(experts.named_parameters()):
            shares[f"{name}.{key}"] = held
            counts[f"{name}.{key}"] = block.num_experts
            experts._parameters[key] = nn.Parameter(parameter[list(held)], requires_grad=False)

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
    wanted: dict[str, dict[str, _Lazy]] = {name: {} for name in blocks}
    for key, tensor in _tensors(model_dir).items():
        target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        if (held_here := shares.get(target)) is None:
            continue
        layer, count = wanted[target.rpartition(".")[0]], counts[target]
        if pattern not in merged:  # one tensor holds all experts
            _check_number(model_dir, key, tensor.get_shape()[0] - 1, count)
            layer[key] = _Lazy(tensor, held_here)
        elif (number := _expert_number(key)) is not None:
            _check_number(model_dir, key, number, count)
            if number in held_here:
                layer[key] = _Lazy(tensor, None)

    # 3. Layer by layer, read and put on sorted rows; the model gives each away before the next comes.
    layers: list[Experts] = []
    for name, tensors in wanted.items():
        experts = model.get_submodule(name)
        own = {f"{name}.{key}" for key, _ in experts.named_parameters()}
        with quiet_transformers():
            try:
                info, _ = convert_and_load_state_dict_in_model(
                    model, tensors, LoadStateDictConfig(dtype=model.dtype, weight_mapping=mapping)
                )
            except Exception as error:
                raise ModelError(f"the weights in {str(model_dir)!r} cannot be loaded: {error}") from error
        failed = {str(key) for key in info.conversion_errors} & own
        _check_loaded(model_dir, (info.missing_keys & own) | failed, info.mismatched_keys)
        loaded = FusedExperts(experts, {key: _frozen(p) for key, p in experts.named_parameters()})
        layers.append(loaded if keep is None else keep(name, loaded))
        experts.to("meta")
        del loaded
    return layers


class _Lazy:
    """A tensor of a checkpoint, or some of it along the first dimension, that is read when it is indexed."""

    def __init__(self, source: Any, part: Sequence[int] | None) -> None:
        self._source, self._part = source, part

    def __getitem__(self, index: Any) -> Tensor:
        if self._part is None:
            tensor: Tensor = self._source[index]
            return tensor
        if isinstance(self._part, range):
            tensor = self._source[self._part.start : self._part.stop]
            return tensor
        return torch.cat([self._source[number : number + 1] for number in self._part])


def _frozen(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach(), requires_grad=False)


def _expert_number(key: str) -> int | None:
    """Return the expert of a checkpoint's tensor, which has its number between dots behind its list of experts."""
    found = re.search(r"experts\.(\d+)\.", key)
    return None if found is None else int(found[1])


def _check_number(model_dir: Path, key: str, last: int, count: int) -> None:
    """Refuse experts that a layer has not, of which no share would have taken notice."""
    if last >= count:
        raise ModelError(
            f"the checkpoint in {str(model_dir)!r} holds expert {last} ({key}), but config.json says that a layer has"
            f" {count} experts, from 0 on; save the model again"
        )


def check_weights(model_dir: Path) -> None:
    """Check that the weights are safetensors files and whole, without reading any.

    A file that is missing, cut short or of another kind, or holds codes in place of values, is a ModelError.
    """
    tensors = {key: tensor.get_dtype() for key, tensor in _tensors(model_dir).items()}
    integers = [key for key, kind in tensors.items() if key.endswith(("weight", "proj")) and kind[0] in "IU"]
    narrow = any(kind.startswith("F8") for kind in tensors.values())
    scales = [key for key in tensors if narrow and key.endswith(("weight_scale", "weight_scale_inv"))]
    if coded := integers or scales:
        raise ModelError(
            f"{str(model_dir)!r} holds quantized weights ({coded[0]}, {tensors[coded[0]]}), though config.json has no"
            " quantization_config; they would be taken for values: load the model with dequantize=True and save it"
        )


def _tensors(model_dir: Path) -> dict[str, Any]:
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
    """Names of the safetensors files of a checkpoint: one, as transformers takes it first, or those of an index."""
    index = model_dir / INDEX_FILE
    if (model_dir / "model.safetensors").is_file() or not index.is_file():
        return ["model.safetensors"]
    try:
        return sorted(set(read_index(index).values()))
    except ValueError as error:
        raise ModelError(f"{str(index)!r} {error}; save the model again") from None


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
