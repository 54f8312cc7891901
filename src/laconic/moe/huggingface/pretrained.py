"""Loads a Hugging Face checkpoint into a model on the meta device, each process its own part.

A checkpoint is a directory of safetensors files. Most have experts one by one (`experts.3.w1.weight`), which
transformers renames and stacks by rules of its own (`transformers.conversion_mapping`); the same rules are followed
here. Where a parameter is a stack of such tensors, or a tensor of the files itself, only the rows and columns of this
process are read. A parameter made by another rule is read whole, converted by transformers, and cut.

Names, shapes and what the rules make of them are compared with the model before any tensor is read.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from laconic.errors import CheckpointError, LaconicError
from laconic.moe.huggingface.apart import own_names
from laconic.moe.huggingface.apply import Parallelized, parallelize
from laconic.moe.huggingface.safetensors_source import Converted, Plain, Source, Stacked, TensorFiles
from laconic.moe.parallel.grid import Grid


@dataclass(frozen=True)
class Loaded:
    """What `load_pretrained` did in this process."""

    nbytes: int
    """Bytes of tensors read from files."""
    read_whole: tuple[str, ...]
    """Parameters of which this process keeps a part but had to read everything, because a rule makes them of it."""


def from_pretrained(
    directory: str | Path,
    mesh: DeviceMesh | Grid | None = None,
    *,
    config: Any = None,
    model_class: Any = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> Parallelized:
    """Build a model on the meta device, spread its experts and load them, each process its own.

    Args:
        directory: a checkpoint on disk, with config.json and safetensors files.
        mesh: as of `parallelize`.
        config: in place of the directory's config.json.
        model_class: of transformers; None is AutoModelForCausalLM.
        dtype: of parameters; None is the configuration's. What transformers keeps in fp32 beside it, as some routers'
            biases, is fp32 here, too.
        device: of parameters; None is the mesh's.
        options: of `parallelize`.

    Returns:
        As `parallelize`; the model is in evaluation mode, as transformers' from_pretrained returns it.

    Raises:
        CheckpointError, ModelError, ConfigError: as of `load_pretrained` and `parallelize`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    directory = _directory(directory)
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False) if config is None else config
    maker: Any = model_class or AutoModelForCausalLM
    dtype = dtype or config.dtype or torch.float32
    with torch.device("meta"):
        if hasattr(maker, "from_config"):
            model = maker.from_config(config, dtype=dtype, trust_remote_code=False)
        else:  # a class of its own, which no file names
            model = maker._from_config(config, dtype=dtype)
    for pattern, wider in model._get_dtype_plan(dtype).items():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if re.search(pattern.replace("*", ".*"), name):
                tensor.data = tensor.to(wider)
    done = parallelize(model, mesh, **options)
    load_pretrained(model, directory, device=device)
    if (directory / "generation_config.json").is_file() and hasattr(model, "generation_config"):
        model.generation_config = GenerationConfig.from_pretrained(directory)
    model.eval()
    return done


def load_pretrained(model: nn.Module, directory: str | Path, *, device: torch.device | str | None = None) -> Loaded:
    """Load the safetensors files of `directory` into `model`, each process its part. Values get the parameters' dtypes.

    Call it after `parallelize` (and after `fully_shard`, if it is used). Parameters on the meta device are made on
    `device`; buffers that no checkpoint has (rotary frequencies) are computed as transformers does.

    Args:
        model: a model of transformers, parallelized or not.
        directory: with model.safetensors, or an index and its files.
        device: for what is on the meta device; None is the mesh's device, or the CPU.

    Raises:
        CheckpointError: before anything is read, if files cannot be read, or tensors are missing or do not fit, naming
            them; a buffer cannot be computed.
    """
    directory = _directory(directory)
    if not hasattr(model, "initialize_weights") or not hasattr(model, "config"):
        raise CheckpointError(f"model is a {type(model).__name__}, but only models of transformers have such files")
    if getattr(model.config, "quantization_config", None) is not None:
        raise CheckpointError(f"{directory} holds quantized weights; load it with transformers, and parallelize then")
    with TensorFiles(directory) as files:
        sources, missing = _plan(model, files)
        _materialize(model, device)
        state = model.state_dict(keep_vars=True)
        read_whole = []
        with torch.no_grad():
            for source in sources:
                for name in source.read(files, {name: state[name] for name in source.targets if name in state}):
                    if isinstance(state[name], DTensor):
                        read_whole.append(name)
        model.tie_weights(missing_keys=missing, recompute_mapping=False)  # type: ignore[operator]
        return Loaded(files.nbytes_read, tuple(read_whole))


def _directory(directory: str | Path) -> Path:
    path = Path(directory)
    if not path.is_dir():
        raise CheckpointError(
            f"{directory} is no directory; download a checkpoint first, as with huggingface_hub.snapshot_download"
        )
    return path


# --- which tensors make which parameters ---


def _plan(model: Any, files: TensorFiles) -> tuple[list[Source], set[str]]:
    """Return where every parameter comes from, and the names of those that are tied to others and so in no file."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    state = model.state_dict(keep_vars=True)
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix = model.base_model_prefix
    apart = own_names(model)
    rows = {name: (stack, row) for stack, names in apart.items() for row, name in enumerate(names)}

    # 1. Group the files' tensors by the parameter they belong to.
    plain: dict[str, str] = {}
    groups: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    stacks: dict[str, dict[int, str]] = {stack: {} for stack in apart}
    unused = []
    for key in sorted(files.keys(), key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, {**state, **rows})
        if name not in state and key in state:
            name, pattern = key, None
        if name in rows:
            stack, row = rows.pop(name)
            stacks[stack][row] = key
        elif name not in state:
            unused.append(key)
        elif pattern is None:
            plain[name] = key
        else:
            rule, tensors = groups.setdefault(name, (by_pattern[pattern], {}))
            tensors.setdefault(pattern, []).append(key)

    # 2. Say what each group makes.
    problems: list[str] = [f"{name} is missing" for name in rows]
    sources: list[Source] = [Plain(name, key) for name, key in plain.items()]
    sources += [
        Stacked(name, [[keys[row] for row in range(len(keys))]], 1)
        for name, keys in stacks.items()
        if len(keys) == len(apart[name])
    ]
    for name, (rule, tensors) in groups.items():
        try:
            sources.append(_of_rule(name, rule, tensors, files, model))
        except LaconicError as error:
            problems.append(str(error))
    found: dict[str, tuple[int, ...]] = {}
    for source in sources:
        try:
            found |= source.shapes(files)
        except CheckpointError as error:
            problems.append(str(error))

    # 3. Compare with the model.
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    missing = set(state) - set(found)
    untied = {name for name in missing if not _is_tied(name, tied, found)}
    ignored = model._keys_to_ignore_on_load_missing or ()
    untied = {name for name in untied if not any(re.search(pattern, name) for pattern in ignored)}
    problems += [f"{name} is missing" for name in sorted(untied) if not any(one.startswith(name) for one in problems)]
    for name, shape in found.items():
        if name in state and tuple(state[name].shape) != shape:
            problems.append(f"{name} is {list(shape)} there and {list(state[name].shape)} here")
    if problems:
        raise CheckpointError(
            f"{files.directory} does not fit the model: {len(problems)} tensors are missing or have another shape:"
            f" {'; '.join(problems[:20])}{'; ...' if len(problems) > 20 else ''}"
        )
    _warn_of_unused(unused, model, files.directory)
    return sources, missing


def _is_tied(name: str, tied: dict[str, str], found: Iterable[str]) -> bool:
    partners = {tied.get(name)} | {target for target, source in tied.items() if source == name}
    return bool(partners & set(found))


def _of_rule(name: str, rule: Any, tensors: dict[str, list[str]], files: TensorFiles, model: Any) -> Source:
    kinds = [type(operation).__name__ for operation in rule.operations]
    patterns = [pattern for pattern in rule.source_patterns if pattern in tensors]
    if kinds in (["MergeModulelist"], ["MergeModulelist", "Concatenate"]) and rule.operations[0].dim == 0:
        along = rule.operations[1].dim if len(kinds) > 1 else 1
        if along > 0:
            if len(patterns) < len(rule.source_patterns) or len({len(tensors[one]) for one in patterns}) > 1:
                counts = ", ".join(f"{len(tensors.get(one, ()))} of {one}" for one in rule.source_patterns)
                raise CheckpointError(f"{name} is made of {counts}, which should be as many of each")
            return Stacked(name, [tensors[one] for one in patterns], along)

    def convert(make: Callable[[str], Tensor]) -> dict[str, Tensor]:
        mine = copy.deepcopy(rule)
        for pattern, keys in tensors.items():
            for key in keys:
                mine.add_tensor(name, key, pattern, make(key))
        try:
            made = mine.convert(name, model=model, config=model.config)
        except Exception as error:  # rules are foreign code
            raise CheckpointError(f"{name} cannot be made: {type(error).__name__}: {error}") from error
        return {target: value[0] if isinstance(value, list) else value for target, value in made.items()}

    return Converted.of(convert, files)


def _warn_of_unused(keys: list[str], model: Any, directory: Path) -> None:
    known = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]
    keys = [key for key in keys if not any(re.search(pattern, key) for pattern in known)]
    if keys:
        warnings.warn(
            f"{directory} has {len(keys)} tensors that {type(model).__name__} has no use for: {', '.join(keys[:5])}"
            f"{', ...' if len(keys) > 5 else ''}",
            stacklevel=4,
        )


# --- memory ---


def _materialize(model: Any, device: torch.device | str | None) -> None:
    """Make what is on the meta device on `device`, and compute the buffers that are in no state dict."""
    parameters = [*model.parameters(), *model.buffers()]
    if not any(tensor.is_meta for tensor in parameters):
        return
    if device is None:
        meshes = [tensor.device_mesh for tensor in parameters if isinstance(tensor, DTensor)]
        device = meshes[0].device_type if meshes else "cpu"
    computed = [name for name, buffer in model.named_non_persistent_buffers() if buffer.is_meta]
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    for parameter in model.parameters():
        # A DTensor has got another tensor under it, which does not know of its hooks.
        if parameter._backward_hooks:
            parameter._backward_hooks = parameter._backward_hooks
    if not computed:
        return
    # What transformers computes for a buffer replaces these.
    empty = {name: _impossible(model.get_buffer(name).dtype) for name in computed}
    with torch.no_grad():
        for name in computed:
            model.get_buffer(name).fill_(empty[name])
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    model.initialize_weights()
    for name in computed:
        buffer = model.get_buffer(name)
        same = buffer.isnan() if buffer.is_floating_point() else buffer == empty[name]
        if buffer.dtype != torch.bool and buffer.numel() and bool(same.any()):
            raise CheckpointError(
                f"buffer {name} is on the meta device and in no file, and {type(model).__name__} does not compute it;"
                " build the model on another device"
            )


def _impossible(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point:
        return float("nan")
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min
