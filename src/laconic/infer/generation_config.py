"""What each field of a model's generation_config.json means here: honoured, without meaning, or refused by name.

A field of transformers that no table below has is refused where it is set, so that none is dropped in silence; one that
transformers does not know either is named in a note.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.errors import ModelError

if TYPE_CHECKING:
    from transformers import GenerationConfig

PROCESSORS = frozenset(
    {
        "bad_words_ids",
        "begin_suppress_tokens",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "min_length",
        "min_new_tokens",
        "no_repeat_ngram_size",
        "remove_invalid_values",
        "renormalize_logits",
        "repetition_penalty",
        "sequence_bias",
        "suppress_tokens",
        "watermarking_config",
    }
)
"""Honoured by transformers' own logits processors, greedy or not."""

WARPERS = frozenset({"epsilon_cutoff", "eta_cutoff", "min_p", "top_h", "typical_p"})
"""Honoured by transformers' own logits processors where tokens are drawn; 1 or 0 or None switches them off."""

DEFAULTS = frozenset(
    {"do_sample", "eos_token_id", "max_length", "max_new_tokens", "stop_strings", "temperature", "top_k", "top_p"}
)
"""Honoured as what a request gets that does not say; eos_token_id ends every request."""

NO_MEANING = frozenset(
    {
        # of the cache and of speed: the engine has its own
        *("cache_config", "compile_config", "continuous_batching_config", "disable_compile", "low_memory"),
        *("max_cache_len", "prefill_chunk_size", "use_cache", "use_mtp"),
        # of what `generate` returns
        *("output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate"),
        # of beams, of which there is one
        *("early_stopping", "length_penalty"),
        # of encoders, and `generate` does not read them for a causal model either
        *("decoder_start_token_id", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty"),
        # of a second, smaller model, which `generate` is given by its caller, and of drafts: the tokens are the same
        *("assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight"),
        *("assistant_lookbehind", "is_assistant", "max_matching_ngram_size", "num_assistant_tokens"),
        *("num_assistant_tokens_schedule", "prompt_lookup_num_tokens", "speculation_type", "target_lookbehind"),
        # of prompts: the tokenizer begins them, and there is no padding
        *("bos_token_id", "pad_token_id"),
        "transformers_version",
    }
)
"""Change no token here, whatever they are."""

REFUSED: Mapping[str, tuple[object, ...]] = {
    "cache_implementation": ("dynamic", "dynamic_full", "static", "offloaded", "offloaded_static", "hybrid", "paged"),
    "constraints": (),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "force_words_ids": (),
    "guidance_scale": (1,),
    "max_time": (),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "token_healing": (False,),
}
"""Not served, unless they have one of these values, or None, which change no token."""


def _is_token(value: object) -> bool:
    return type(value) is int


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _listed(value: object) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "do_sample": (lambda value: isinstance(value, bool), "true or false"),
    "eos_token_id": (lambda value: all(map(_is_token, _listed(value))), "the id of a token, or a list of ids"),
    "stop_strings": (lambda value: all(map(_is_text, _listed(value))), "a string, or a list of them, none empty"),
}
"""What transformers takes as it is: the rule of each, which a value breaks without a word."""


@dataclass(frozen=True)
class AnswerDefaults:
    """What an answer gets whose request does not say.

    Attributes:
        temperature, top_p, top_k: of Sampling.
        max_new_tokens: of the longest answer; None leaves it to `max_length`.
        max_length: of a prompt and its longest answer; None is what the model has positions for.
        stop: strings that end an answer.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int | None = None
    max_length: int | None = None
    stop: tuple[str, ...] = ()

    def longest_answer(self, prompt_tokens: int, max_tokens: int) -> int:
        """Return the tokens of the longest answer to a prompt, where both together have `max_tokens` at most."""
        left = max_tokens - prompt_tokens
        if self.max_new_tokens is not None:
            left = min(left, self.max_new_tokens)
        elif self.max_length is not None:
            left = min(left, self.max_length - prompt_tokens)
        return max(1, left)

    @classmethod
    def of(cls, config: GenerationConfig) -> AnswerDefaults:
        """Return the defaults of a model.

        A model that does not say draws at temperature 1, as OpenAI's API does; `do_sample: false` takes the most
        probable token. transformers' own defaults for what a model leaves out, such as top_k = 50, are not taken.
        """
        stop = config.stop_strings or ()
        return cls(
            temperature=0.0 if config.do_sample is False else _or(config.temperature, 1.0),
            top_p=_or(config.top_p, 1.0),
            top_k=_or(config.top_k, 0),
            max_new_tokens=config.max_new_tokens,
            max_length=config.max_length,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
        )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def read_generation_config(model_dir: Path, config: Any) -> GenerationConfig:
    """Read the generation_config.json of a model, or what its config.json says where there is none.

    A file that cannot be read, or breaks a rule of transformers, is a ModelError.
    """
    from transformers import GenerationConfig

    path = model_dir / "generation_config.json"
    if not path.is_file():
        return GenerationConfig.from_model_config(config)
    try:
        return GenerationConfig.from_pretrained(model_dir, local_files_only=True)
    except Exception as error:  # it is not known what a file makes transformers raise
        raise ModelError(f"{str(path)!r} cannot be read: {error}; mend it, or remove it") from error


def check_generation_config(config: GenerationConfig, model_dir: Path) -> tuple[str, ...]:
    """Check that each field of a model's generation config is honoured or changes no token; returns notes for the user.

    A field that asks for what is not served is a ModelError.
    """
    from transformers import GenerationConfig, __version__

    has_file = (model_dir / "generation_config.json").is_file()
    where = f"{model_dir.name}/{'generation_config.json' if has_file else 'config.json'}"
    for name, (holds, rule) in _KINDS.items():
        if (value := getattr(config, name, None)) is not None and not holds(value):
            raise ModelError(f"{where} has {name} = {reprlib.repr(value)}, but it must be {rule}; mend it")
    known, strange = vars(GenerationConfig()), []
    for name, value in sorted(config.to_dict().items()):
        if value is None or name.startswith("_") or name in PROCESSORS | WARPERS | DEFAULTS | NO_MEANING:
            continue
        if name in REFUSED:
            if value not in REFUSED[name]:
                raise ModelError(
                    f"{where} has {name} = {reprlib.repr(value)}, which is not served; take it out of the file, or set"
                    f" it to {' or '.join(map(repr, (*REFUSED[name], None)))}: tokens are those of transformers'"
                    " generate without it then"
                )
        elif name in known:
            raise ModelError(
                f"{where} has {name} = {reprlib.repr(value)}, which transformers {__version__} knows and laconic.infer"
                " does not; remove it from the file if its effect is not wanted"
            )
        else:
            strange.append(name)
    if config.exponential_decay_length_penalty is not None and config.eos_token_id is None:
        raise ModelError(
            f"{where} has exponential_decay_length_penalty and no eos_token_id, whose score it raises; set both or"
            " neither"
        )
    notes: tuple[str, ...] = ()
    if strange:
        notes += (f"{where} has {', '.join(strange)}, which transformers does not know and laconic.infer ignores",)
    if config.stop_strings:
        notes += (f"{where} has stop_strings, which the server honours; tokens of Engine.generate do not end there",)
    return notes
