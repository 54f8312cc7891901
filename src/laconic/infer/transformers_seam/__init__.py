"""The only room that touches names of transformers which are private or move fast.

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
- `ContinuousBatchingIOs.get_model_kwargs` and `PagedAttentionCache.search_prefix_match`: rows of prompts whose logprobs
  are asked for (prompt_rows.py).
- `GenerationMixin._get_logits_processor`: the processors of one request, made by logits_rules.py, which is given the
  model. Those of a manager see a request's last token alone.
- `PagedAttentionCache.update`: rows of multi-head latent attention, which are narrower than the paged cache, are filled
  with zeros.
- `ALL_ATTENTION_FUNCTIONS` and `set_attn_implementation`: what a model gives attention (model_shape.py).

`check_transformers` says at once if the installed version lacks a name or an argument.
"""

from laconic.infer.transformers_seam.loading import (
    check_weights,
    find_experts,
    load_attention_model,
    load_experts,
    num_positions,
    quiet_transformers,
    read_config,
)
from laconic.infer.transformers_seam.model_shape import planned_shape
from laconic.infer.transformers_seam.requests import CacheLimits, Requests, fit_latent_attention
from laconic.infer.transformers_seam.sampler import Finished, Replay
from laconic.infer.transformers_seam.versions import FIRST, check_transformers

__all__ = [
    "CacheLimits",
    "FIRST",
    "Finished",
    "Replay",
    "Requests",
    "check_transformers",
    "check_weights",
    "find_experts",
    "fit_latent_attention",
    "load_attention_model",
    "load_experts",
    "num_positions",
    "planned_shape",
    "quiet_transformers",
    "read_config",
]
