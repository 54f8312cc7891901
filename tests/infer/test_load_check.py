"""Every load checks itself: what the engine computes is what the model computes, or the model is refused by name."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from laconic.errors import ModelError
from laconic.infer.load_check import difference, made_up_trials
from laconic.infer.messages import Rows
from laconic.infer.remote_experts import RemoteExperts
from laconic.infer.transformers_seam import CacheLimits, load_attention_model
from laconic.infer.transformers_seam.sampler import Sampler
from laconic.schedule.inference import InferencePlan
from tests.grid import few
from tests.infer.alone import worker_of
from tests.infer.inside import Inside
from tests.infer.models import make

attention_fills_the_cache = pytest.mark.skipif(
    "cache" not in inspect.signature(sdpa_attention_forward).parameters,
    reason="from transformers 5.24 on layers fill the cache, so that more families are served",
)
_OWN_HEADS = {"num_key_value_heads": 4}
"""Of families that do not share keys and values between heads."""
DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
ROUGHEST = [pytest.param(torch.float32, marks=pytest.mark.slow), *DTYPES[1:]]
"""For faults: what is seen beyond bfloat16's rounding is seen beyond that of the others."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes each model once."""
    folder = tmp_path_factory.mktemp("models")
    return functools.cache(lambda family, **changes: make(family, folder, **changes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", few(["llama", "gpt_oss", "deepseek_v3", "gpt2"], 2, pytest.mark.ci))
def test_a_model_that_is_served_right_is_taken_in_one_line(
    models: Callable[..., Path], family: str, dtype: torch.dtype
) -> None:
    held = worker_of(models(family, **_OWN_HEADS) if family == "gpt2" else models(family), dtype)
    held.close()
    (line,) = held.notes
    assert re.fullmatch(
        r"checked: \w+ in \w+ gives the logits of the model's plain forward to [\de.+-]+ of their spread \(bound"
        r" [\de.+-]+\), [\d.]+ s",
        line,
    )


@pytest.mark.parametrize(
    ("positions", "cache_tokens", "batch_tokens"),
    [
        (5, 16, 256),
        *(
            pytest.param(*sizes, marks=pytest.mark.ci)
            for sizes in ((20, 48, 5), (20, 16, 1), (4096, 4096, 24), (5, 4096, 24), (4096, 16, 1), (4096, 48, 5))
        ),
    ],
)
def test_small_caches_batches_and_models_are_checked_too(
    tmp_path: Path, positions: int, cache_tokens: int, batch_tokens: int
) -> None:
    path = make("gpt2", tmp_path, max_position_embeddings=positions, **_OWN_HEADS)
    held = worker_of(path, cache_tokens=cache_tokens, batch_tokens=batch_tokens, micro_batches=2)
    held.close()
    trials = made_up_trials(load_attention_model(path, None, None).config, CacheLimits(cache_tokens, batch_tokens))
    assert len(trials) == 4
    assert max(len(trial.inputs) for trial in trials) <= min(cache_tokens, positions)


UNREACHED: list[tuple[str, dict[str, Any]]] = [
    ("gptj", _OWN_HEADS | {"rotary_dim": 4}),
    ("codegen", _OWN_HEADS | {"rotary_dim": 4}),
    (
        "gpt_neo",
        _OWN_HEADS
        | {"attention_types": [[["global", "local"], 1]], "num_hidden_layers": 2, "max_position_embeddings": 64},
    ),
    ("xglm", _OWN_HEADS | {"ffn_dim": 32}),
    ("mpt", _OWN_HEADS),
    ("diffllama", {}),
    ("bloom", _OWN_HEADS),
]
"""Families whose attention reads no cache of the engine's, and changes to their small models."""


@attention_fills_the_cache
@pytest.mark.parametrize(
    ("family", "changes"),
    few([pytest.param(*case) for case in UNREACHED], 2, pytest.mark.ci),
)
@pytest.mark.parametrize("dtype", ROUGHEST)
def test_a_family_that_does_not_reach_the_cache_is_refused_by_name(
    models: Callable[..., Path], family: str, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    path = make(family, models("llama").parent / family, **changes)
    with pytest.raises(
        ModelError,
        match=rf"{family} models cannot be served: .* made-up prompt of \d+ tokens \(\w.*\), those of the .*token.* are"
        r" [\d.e-]+ of their spread away, and \w+ rounds to .*; use transformers' own generate",
    ):
        worker_of(path, dtype)


def _positions(arguments: dict[str, Any]) -> None:
    """Each piece of a sequence counts from 0."""
    for start, end in zip(arguments["cu_seq_lens_q"][:-1], arguments["cu_seq_lens_q"][1:], strict=True):
        arguments["position_ids"][0, start:end] = torch.arange(end - start)


def _next_position(arguments: dict[str, Any]) -> None:
    """Tokens behind a prompt count one too far."""
    lengths = arguments["cu_seq_lens_q"].diff()
    for start in arguments["cu_seq_lens_q"][:-1][lengths == 1]:
        arguments["position_ids"][0, start] += 1


def _unwritten(arguments: dict[str, Any]) -> None:
    """What would fill a block's last place is written elsewhere."""
    (written,) = arguments["write_index"]
    written[written % CacheLimits.PAGE_TOKENS == CacheLimits.PAGE_TOKENS - 1] = 0


def _lost_block(arguments: dict[str, Any]) -> None:
    """The second block of a prompt is never written."""
    (written,) = arguments["write_index"]
    if len(written) > 30:
        written[-4:] = 0


def _read_beside(arguments: dict[str, Any]) -> None:
    (read,) = arguments["read_index"]
    if len(read):
        read.copy_(read.roll(1))


def _newest_unseen(arguments: dict[str, Any]) -> None:
    """The mask is off by one: no token sees itself, but for the first."""
    mask = arguments["attention_mask"]
    seen = mask == 0
    mask.masked_fill_(
        seen & (seen.cumsum(-1) == seen.sum(-1, keepdim=True)) & (seen.sum(-1, keepdim=True) > 1), mask.min()
    )


def _oldest_unseen(arguments: dict[str, Any]) -> None:
    mask = arguments["attention_mask"]
    seen = mask == 0
    mask.masked_fill_(seen & (seen.cumsum(-1) == 1) & (seen.sum(-1, keepdim=True) > 1), mask.min())


def _future_seen(arguments: dict[str, Any]) -> None:
    mask = arguments["attention_mask"]
    mask.copy_(torch.where((mask == 0).roll(1, -1) & (mask != 0), 0.0, mask))


def _neighbour_seen(arguments: dict[str, Any]) -> None:
    """Sequences of a batch see each other."""
    arguments["attention_mask"].zero_()


def _wrong_row(arguments: dict[str, Any]) -> None:
    arguments["logits_indices"].sub_(1).clamp_(min=0)
    arguments["logits_to_keep"] = arguments["logits_indices"]


def _wrong_token(arguments: dict[str, Any]) -> None:
    """A step gets the token before the last."""
    lengths = arguments["cu_seq_lens_q"].diff()
    for start in arguments["cu_seq_lens_q"][:-1][lengths == 1]:
        arguments["input_ids"][0, start] = 7


FAULTS: list[Callable[[dict[str, Any]], None]] = [
    _positions,
    _next_position,
    _unwritten,
    _lost_block,
    _read_beside,
    _newest_unseen,
    _oldest_unseen,
    _future_seen,
    _neighbour_seen,
    _wrong_row,
    _wrong_token,
]


@pytest.mark.parametrize("dtype", ROUGHEST)
@pytest.mark.parametrize("fault", few(FAULTS, 3, pytest.mark.ci))
def test_a_fault_in_what_the_model_is_given_is_noticed(
    models: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[dict[str, Any]], None],
    dtype: torch.dtype,
) -> None:
    path = models("llama")

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if "cu_seq_lens_q" in kwargs:
            fault(kwargs)

    def loaded(*args: Any) -> nn.Module:
        model = load_attention_model(path, dtype, None)
        model.register_forward_pre_hook(before, with_kwargs=True)
        return model

    monkeypatch.setattr("laconic.infer.attention_worker.load_attention_model", loaded)
    with pytest.raises(ModelError, match="llama models cannot be served: the engine's logits"):
        worker_of(path, dtype)


def _unscaled(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs | {"scaling": 1.0})


def _uncached(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    """A family with an attention of its own."""
    kwargs = {name: value for name, value in kwargs.items() if name != "cache"}
    size = query.shape[2], key.shape[2]
    mask = mask if mask is None or mask.shape[-2:] == size else mask[..., -size[1] :]
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


def _other_heads(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    return sdpa_attention_forward(module, query, key.flip(1), value.flip(1), mask, **kwargs)


@attention_fills_the_cache
@pytest.mark.parametrize("attend", few([_unscaled, _uncached, _other_heads], 1, pytest.mark.ci))
@pytest.mark.parametrize("dtype", ROUGHEST)
def test_a_fault_of_the_paged_attention_is_noticed(
    models: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, attend: Callable[..., Any], dtype: torch.dtype
) -> None:
    def paged(module: Any, *args: Any, **kwargs: Any) -> Any:
        return (attend if kwargs.get("cache") is not None else sdpa_attention_forward)(module, *args, **kwargs)

    monkeypatch.setitem(cast(Any, ALL_ATTENTION_FUNCTIONS), "sdpa", paged)
    with pytest.raises(ModelError, match="llama models cannot be served"):
        worker_of(models("llama"), dtype)


@pytest.mark.parametrize("dtype", ROUGHEST)
def test_logits_that_go_to_other_requests_are_noticed(
    models: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    choose = Sampler.choose

    def swapped(self: Any, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        choose(self, scores.flip(1), output_ids)

    monkeypatch.setattr(Sampler, "choose", swapped)
    with pytest.raises(ModelError, match="llama models cannot be served"):
        worker_of(models("llama"), dtype)


def test_a_lost_sink_is_noticed(models: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss has no other attention than one that the paged cache replaces."""
    from transformers.integrations.eager_paged import eager_paged_attention_forward

    def without(module: Any, *args: Any, **kwargs: Any) -> Any:
        lost = module._parameters.pop("sinks")
        try:
            return eager_paged_attention_forward(module, *args, **kwargs)
        finally:
            module._parameters["sinks"] = lost

    monkeypatch.setitem(cast(Any, ALL_ATTENTION_FUNCTIONS), "paged|eager", without)
    with pytest.raises(ModelError, match="gpt_oss models cannot be served"):
        worker_of(models("gpt_oss"))


def _last_slice_lost(sent: list[Any]) -> list[Any]:
    return sent[:-1] if len(sent) > 1 else sent


def _places_moved(sent: list[Any]) -> list[Any]:
    return [(link, rows, places.roll(1)) for link, rows, places in sent]


@pytest.mark.parametrize("slicing", ["tokens", pytest.param("experts", marks=pytest.mark.ci)])
@pytest.mark.parametrize("family", few(["mixtral", "qwen2_moe", "deepseek_v3"], 2, pytest.mark.ci))
def test_a_split_model_is_checked_through_its_workers(models: Callable[..., Path], family: str, slicing: Any) -> None:
    plan = InferencePlan(num_micro_batches=2, num_slices=2, slicing=slicing)
    assert Inside(models(family), 2, plan).check().startswith(f"checked: {family}")


@pytest.mark.parametrize("fault", [_last_slice_lost, _places_moved])
def test_a_fault_of_slices_is_noticed(
    models: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, fault: Callable[[list[Any]], list[Any]]
) -> None:
    send = RemoteExperts._send
    inside = Inside(models("mixtral"), 2, InferencePlan(num_slices=2))

    def faulty(self: RemoteExperts, *args: Any) -> None:
        send(self, *args)
        args[-1][:] = fault(args[-1])

    monkeypatch.setattr(RemoteExperts, "_send", faulty)
    with pytest.raises(ModelError, match="mixtral models cannot be served: the engine's logits"):
        inside.check()


def test_a_fault_of_experts_numbers_is_noticed(models: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    inside = Inside(models("mixtral"), 2, InferencePlan())
    share = inside.shares[1]
    run = share.run

    def beside(rows: Rows) -> torch.Tensor:
        if rows.experts.shape[1] > 1:  # rows of an engine, not those of one expert by itself
            rows.experts[rows.experts >= 0] = 1 - rows.experts[rows.experts >= 0]
        return run(rows)

    monkeypatch.setattr(inside.experts._links[1], "_run", beside)
    with pytest.raises(ModelError, match="mixtral models cannot be served"):
        inside.check()


def test_differences_count_infinities_that_agree_as_none() -> None:
    inf, nan = torch.inf, torch.nan
    wanted = torch.tensor([[1.0, 3.0, -inf], [1.0, 3.0, 5.0], [nan, nan, nan], [2.0, 2.0, 2.0]])
    assert difference(wanted, wanted) == [0.0] * 4
    moved = torch.tensor([[1.0, 3.0, 0.0], [1.0, 3.0, nan], [1.0, 2.0, 3.0], [2.0, 2.0, 2.5]])
    assert all(each > 1 for each in difference(moved, wanted))
    # A third of a squared difference of 0.3, over a spread of the square root of 8 / 3.
    assert difference(torch.tensor([[1.0, 3.3, 5.0]]), wanted[1:2]) == [pytest.approx(0.3 / 3**0.5 / (8 / 3) ** 0.5)]
