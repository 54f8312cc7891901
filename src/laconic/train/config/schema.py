"""Everything that `laconic train` can be told, as plain frozen dataclasses.

One tree serves three doors: Python code builds it, a TOML file is read into it, flags override it. The resolved tree is
saved with every run, so a run can be repeated from its own directory. Rules are checked in `__post_init__` of the class
that owns the fields; what depends on the machine (world size, data) is checked where it is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from laconic.train.config.values import MAX_COUNT, check_values, require

__all__ = [
    "FINE_TUNING_RATE",
    "PRETRAINING_RATE",
    "ActivationsConfig",
    "CheckpointConfig",
    "DataConfig",
    "GradientsConfig",
    "ModelConfig",
    "MoEConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "TrainConfig",
]

_COUNT = f"be at least 1 and at most {MAX_COUNT}"

PRETRAINING_RATE = 2e-3
"""Peak learning rate for random weights, when none is given."""
FINE_TUNING_RATE = 2e-5
"""Peak learning rate for weights that are trained already, when none is given."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model is trained."""

    path: str | None = None
    """A local directory, as save_pretrained writes it. With weights training starts from them; with only a config.json
    the model is initialized from scratch. When set, `family` and the sizes below are not used."""
    family: str = "llama"
    """A model_type known to transformers (llama, mistral, qwen2, qwen3, gemma2, phi3, olmo2, gpt2, ...)."""
    hidden_size: int = 128
    """Width of the residual stream."""
    intermediate_size: int = 384
    """Width of the feed-forward layer."""
    num_hidden_layers: int = 4
    """Number of decoder layers."""
    num_attention_heads: int = 4
    """Number of query heads."""
    num_key_value_heads: int | None = None
    """Number of key/value heads; None means as many as query heads."""
    tie_word_embeddings: bool = True
    """Share the embedding matrix with the output projection."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields for the family's transformers config, e.g. {"rope_theta": 500000.0}. TOML: [model.extra]."""
    allow_download: bool = False
    """Let `path` be a Hugging Face hub name and contact the hub. Off: nothing is ever looked up on a network."""

    def __post_init__(self) -> None:
        check_values(self, "model.")
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            require(1 <= getattr(self, name) <= MAX_COUNT, f"model.{name}", getattr(self, name), _COUNT)
        require(
            self.hidden_size % self.num_attention_heads == 0,
            "model.hidden_size",
            self.hidden_size,
            f"be a multiple of model.num_attention_heads ({self.num_attention_heads})",
        )
        kv = self.num_key_value_heads
        require(
            kv is None or (kv >= 1 and self.num_attention_heads % kv == 0),
            "model.num_key_value_heads",
            kv,
            f"divide model.num_attention_heads ({self.num_attention_heads})",
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What text the model learns, and how it becomes tokens."""

    paths: tuple[str, ...] = ()
    """Files, directories or glob patterns of text (.txt, .py, .md, ...) or JSONL (.jsonl). Empty: the sources of the
    installed Python standard library."""
    tokenizer: str | None = None
    """"bytes" (vocabulary of 256 plus one end-of-document token), or the path of a tokenizer.json or of a directory
    with a tokenizer; None means the tokenizer of model.path, and bytes without one."""
    end_of_document: str | None = None
    """Token that ends each document; None means the tokenizer's own (eos_token of the tokenizer_config.json beside it,
    or a well-known name such as <|endoftext|> or </s>)."""
    text_key: str = "text"
    """The field of each JSONL object that holds its text."""
    validation_fraction: float = 0.02
    """Share of documents held out for the validation loss."""
    cache_dir: str | None = None
    """Where token files are kept; None means ~/.cache/laconic (or $XDG_CACHE_HOME/laconic)."""

    def __post_init__(self) -> None:
        check_values(self, "data.")
        require(
            0.0 <= self.validation_fraction < 1.0,
            "data.validation_fraction",
            self.validation_fraction,
            "be at least 0 and below 1",
        )


@dataclass(frozen=True, kw_only=True)
class ActivationsConfig:
    """How what backward needs is kept."""

    bits: int = 4
    """Bits kept per value: 4, 5, 6, 8, or 16 for no compression."""
    format: Literal["nf4", "e2m1", "int4", "int5", "int6", "int8"] | None = None
    """Block format; None means nf4 at 4 bits and int5, int6 or int8 at 5, 6 or 8."""
    block_size: int = 64
    """Values that share one scale."""
    mode: Literal["sites", "hooks"] = "sites"
    """"sites" rewrites recognized layers and rebuilds the rest; "hooks" packs every saved tensor of any model."""
    attention: Literal["exact", "int8", "nf4"] | None = None
    """How query, key and value are kept: as they are, or packed, and attention runs again in backward; None means the
    library's default, and exact with bits = 16."""
    loss: Literal["exact", "chunked", "auto"] = "exact"
    """exact: the logits of a micro-batch are held at once. chunked: never more than a tile of them, for one more matrix
    product. auto: chunked where the logits are more than a tile."""

    def __post_init__(self) -> None:
        check_values(self, "activations.")
        require(
            self.mode == "sites" or self.attention in (None, "exact"),
            "activations.attention",
            self.attention,
            'be exact or left out with activations.mode = "hooks", which knows no sites',
        )
        require(
            self.mode == "sites" or self.loss != "chunked",
            "activations.loss",
            self.loss,
            'be exact or auto with activations.mode = "hooks"',
        )
        require(
            self.bits in (4, 5, 6, 8, 16),
            "activations.bits",
            self.bits,
            "be 4, 5, 6, 8 or 16 (16 means no compression)",
        )
        require(
            self.block_size in (16, 32, 64, 128, 256),
            "activations.block_size",
            self.block_size,
            "be 16, 32, 64, 128 or 256",
        )
        format_bits = None if self.format is None else {"int5": 5, "int6": 6, "int8": 8}.get(self.format, 4)
        require(
            format_bits is None or format_bits == self.bits,
            "activations.format",
            self.format,
            f"be a {self.bits}-bit format, because activations.bits is {self.bits}; leave it out for the default"
            if self.bits < 16
            else "be left out, because activations.bits is 16 (no compression)",
        )


@dataclass(frozen=True, kw_only=True)
class GradientsConfig:
    """How gradients are held between micro-batches, and how processes average them."""

    bits: int = 32
    """32, or 8 (int8) or 12 (int8 and an int4 residual): each gradient is folded into codes and freed as soon as it is
    made."""
    reduce: Literal["native", "q8"] | None = None
    """native: DDP's all-reduce or FSDP2's reduce-scatter in fp32. q8: codes travel. None means native, but q8 where
    codes are all there is: with ddp at 8 or 12 bits."""

    def __post_init__(self) -> None:
        check_values(self, "gradients.")
        require(self.bits in (8, 12, 32), "gradients.bits", self.bits, "be 8, 12 or 32 (32 means no compression)")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay."""

    kind: Literal["adamw", "adamw8bit"] = "adamw"
    """adamw: torch's, moments in fp32. adamw8bit: laconic's, moments in 8 bits; it reads gradients of 8 or 12 bits as
    they are, for the other one they are unpacked before the update."""
    learning_rate: float | None = None
    """Peak learning rate; None means 2e-3, and 2e-5 when training starts from the weights of model.path."""
    min_learning_rate_ratio: float = 0.1
    """Learning rate at the last step, as a share of the peak."""
    warmup_steps: int = 20
    """Steps of linear warm-up."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay; not applied to vectors (norms, biases)."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""

    def __post_init__(self) -> None:
        check_values(self, "optimizer.")
        rate = self.peak_learning_rate
        require(math.isfinite(rate) and rate > 0, "optimizer.learning_rate", rate, "be finite and above 0")
        require(
            0 <= self.min_learning_rate_ratio <= 1,
            "optimizer.min_learning_rate_ratio",
            self.min_learning_rate_ratio,
            "lie in [0, 1]",
        )
        require(self.warmup_steps >= 0, "optimizer.warmup_steps", self.warmup_steps, "be at least 0")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"optimizer.{name}", getattr(self, name), "lie in [0, 1)")
        require(self.eps > 0, "optimizer.eps", self.eps, "be above 0")
        require(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "be at least 0")
        require(self.clip_norm >= 0, "optimizer.clip_norm", self.clip_norm, "be at least 0")

    @property
    def peak_learning_rate(self) -> float:
        """`learning_rate`, or the default for random weights when it is left out."""
        return PRETRAINING_RATE if self.learning_rate is None else self.learning_rate


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """The model cut into stages on different processes; `parallel` then says how the replicas of a stage share it."""

    stages: int = 1
    """Processes that one copy of the model is cut over; 1 means no pipeline. Divides the number of processes."""
    virtual_stages: int = 1
    """Chunks of layers per process; above 1 only with interleaved-1f1b."""
    schedule: Literal["gpipe", "1f1b", "interleaved-1f1b"] = "1f1b"
    """In which order a process runs forwards and backwards."""
    micro_batches: int | None = None
    """Micro-batches per optimizer step; None means accumulation if that is above 1, else twice the stages."""
    split: tuple[int, ...] = ()
    """Decoder layers per chunk, stages x virtual_stages numbers; empty: balanced by parameters, embedding and head
    counted."""

    def __post_init__(self) -> None:
        check_values(self, "pipeline.")
        for name in ("stages", "virtual_stages"):
            require(1 <= getattr(self, name) <= MAX_COUNT, f"pipeline.{name}", getattr(self, name), _COUNT)
        require(
            (self.virtual_stages > 1) == (self.schedule == "interleaved-1f1b"),
            "pipeline.virtual_stages",
            self.virtual_stages,
            "be at least 2 with pipeline.schedule = interleaved-1f1b"
            if self.virtual_stages == 1
            else f"be 1 with pipeline.schedule = {self.schedule}; interleaved-1f1b takes more",
        )
        require(
            self.stages > 1 or self.virtual_stages == 1,
            "pipeline.virtual_stages",
            self.virtual_stages,
            "be 1 with one stage",
        )
        micro = self.micro_batches
        require(micro is None or micro >= 1, "pipeline.micro_batches", micro, "be at least 1")
        require(
            micro is None or self.schedule != "1f1b" or micro >= self.stages,
            "pipeline.micro_batches",
            micro,
            f"be at least pipeline.stages ({self.stages}) with 1f1b",
        )
        rounds = 1 if micro is None else max(1, micro // self.stages)
        require(
            micro is None or self.schedule != "interleaved-1f1b" or micro % rounds == 0,
            "pipeline.micro_batches",
            micro,
            f"be a multiple of micro_batches // stages ({rounds}) with interleaved-1f1b; "
            f"a multiple of {self.stages} always is",
        )
        num_chunks = self.stages * self.virtual_stages
        require(
            not self.split or (len(self.split) == num_chunks and min(self.split) >= 1),
            "pipeline.split",
            list(self.split),
            f"have stages x virtual_stages = {num_chunks} numbers of at least 1",
        )


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Experts of a mixture-of-experts model: how they are kept evenly used, and how they are spread over processes."""

    expert_parallel: int | None = None
    """Processes that share a layer's experts (EP); divides the number of processes and of experts. 1: every process has
    all of them, in layers of laconic.moe. None: the model's own blocks are left as they are."""
    dispatcher: Literal["flat", "hierarchical", "auto"] = "flat"
    """flat: one all-to-all. hierarchical: level by level, each row once per group of processes that has experts for
    it. auto: laconic.moe.autotune chooses one of these, depth, code of rows and chunks, by measured rates, and again
    when routing has drifted."""
    levels: tuple[int, ...] = ()
    """Groups that the processes of one EP group form at each level, such as nodes: each number is a multiple of the one
    before. Empty: the machines, as LOCAL_WORLD_SIZE tells."""
    depth: int | None = None
    """Stages of the hierarchical all-to-all, 1 to the number of levels + 1; None means the largest."""
    dispatch_codec: Literal["exact", "raw", "lossless", "int8"] = "exact"
    """What travels to experts and back. exact: rows bit for bit, shortened as `zip` says; raw: never; lossless: always.
    int8: blocks of 128, which rounds rows and their gradients."""
    chunks: tuple[int, ...] = ()
    """Pieces that a layer is cut into, so that rows of one travel while another is computed: one number, or one for
    forward and one for backward. Empty: layers are not cut."""
    overlap_grad_reduce: bool = False
    """Average the dense part's gradients while layers in chunks leave the wire between nodes idle in backward, not in
    DDP's buckets or when FSDP2 would."""
    capacity_factor: float | None = None
    """In training an expert takes at most this many times its even share of a process's micro-batch, tokens in order;
    the rest is dropped. None drops nothing."""
    swap_every: int = 0
    """Least number of steps between two looks at a layer for experts that should change places; 0 means never. Needs
    measured rates, and layers whose rows go in levels."""
    swap_policy: Literal["cost_aware", "always"] = "cost_aware"
    """cost_aware: once a swap would have gained what it costs, on tokens of later steps than the one it was found in;
    looks come less often while nothing pays. always: in every look, if it shortens the all-to-all of that step's
    tokens."""
    swap_pairs: int = 1
    """Most pairs of experts of a layer that change places at a time."""
    rates: str | None = None
    """File with measured rates of the cluster (laconic.cost.MoERates) for `swap_every` and for dispatcher = auto; None
    means the one that laconic profile wrote; auto measures where there is none."""
    router_aux_loss_coef: float | None = None
    """Times the routers' load balancing loss, added to the cross entropy in training; None means the family's
    router_aux_loss_coef, 0 where it has none."""
    router_z_loss_coef: float = 0.0
    """Times the mean square of the logsumexp of router logits, added in training."""
    bias_rate: float | None = None
    """By how much a step lowers the bias of an expert with more tokens than the mean and raises that of one with fewer,
    in families whose routers have biases (DeepSeek-V3); None means 0.001 there."""

    def __post_init__(self) -> None:
        check_values(self, "moe.")
        size, factor = self.expert_parallel, self.capacity_factor
        for name in ("router_aux_loss_coef", "router_z_loss_coef", "bias_rate"):
            value = getattr(self, name)
            require(
                value is None or (math.isfinite(value) and value >= 0), f"moe.{name}", value, "be finite and at least 0"
            )
        require(size is None or size >= 1, "moe.expert_parallel", size, "be at least 1")
        travel = ("dispatcher", "levels", "depth", "dispatch_codec", "chunks", "overlap_grad_reduce", "capacity_factor")
        for name in (*travel, "swap_every", "swap_policy", "swap_pairs", "rates"):
            value = getattr(self, name)
            require(
                size is not None or value == MoEConfig.__dataclass_fields__[name].default,
                f"moe.{name}",
                list(value) if isinstance(value, tuple) else value,
                "be left out without moe.expert_parallel; set that to 1 or more",
            )
        require(
            self.depth is None or (self.depth >= 1 and self.dispatcher == "hierarchical"),
            "moe.depth",
            self.depth,
            "be at least 1 and come with moe.dispatcher = hierarchical",
        )
        require(
            len(self.chunks) <= 2 and all(number >= 1 for number in self.chunks),
            "moe.chunks",
            list(self.chunks),
            "be one or two numbers of at least 1, as [2] or [2, 4]",
        )
        require(
            self.dispatcher != "auto" or self.dispatch_codec != "lossless",
            "moe.dispatch_codec",
            self.dispatch_codec,
            "be exact, raw or int8 with moe.dispatcher = auto, which shortens rows where that pays",
        )
        require(
            self.dispatcher != "auto" or not self.chunks,
            "moe.chunks",
            list(self.chunks),
            "be left out with moe.dispatcher = auto, which chooses them",
        )
        require(
            not self.overlap_grad_reduce or max(self.chunks, default=1) > 1,
            "moe.overlap_grad_reduce",
            True,
            "be left out without moe.chunks above 1: windows are between chunks",
        )
        require(
            factor is None or (math.isfinite(factor) and factor > 0),
            "moe.capacity_factor",
            factor,
            "be finite and above 0",
        )
        require(self.swap_every >= 0, "moe.swap_every", self.swap_every, "be at least 0")
        require(
            not self.swap_every or ((size or 1) > 1 and self.dispatcher != "flat"),
            "moe.swap_every",
            self.swap_every,
            "be 0 unless moe.expert_parallel is above 1 and moe.dispatcher = hierarchical or auto: rows are counted by "
            "level",
        )
        require(self.swap_pairs >= 1, "moe.swap_pairs", self.swap_pairs, "be at least 1")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When and how many checkpoints are kept."""

    every: int = 0
    """Save each time this many steps are done; 0 means only at the end (and on Ctrl-C)."""
    keep: int = 2
    """Newest checkpoints that stay on disk."""
    load: int | None = None
    """With resume: step of the checkpoint to continue from; None means the newest. What came after it is dropped."""
    zip: bool = False
    """Write the shards losslessly shortened. Any run can be continued from either kind."""

    def __post_init__(self) -> None:
        check_values(self, "checkpoint.")
        require(self.every >= 0, "checkpoint.every", self.every, "be at least 0")
        require(self.keep >= 1, "checkpoint.keep", self.keep, "be at least 1")
        require(self.load is None or self.load >= 1, "checkpoint.load", self.load, "be at least 1")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run. The defaults are the demo: a small Llama on the Python standard library, two processes."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    activations: ActivationsConfig = field(default_factory=ActivationsConfig)
    gradients: GradientsConfig = field(default_factory=GradientsConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    plan: str | None = None
    """A file that `laconic plan` wrote. It decides what activations keep, and the run has to be the planned one."""
    run_dir: str | None = None
    """Where the run is written; None means runs/<date>-<time>."""
    resume: bool = False
    """Continue from the newest good checkpoint in `run_dir`."""
    nproc: int = 2
    """Local processes to start. Not used under torchrun, which has started them already."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """ddp: a full copy per process. fsdp: parameters, gradients and optimizer state sharded (FSDP2)."""
    zip: Literal["auto", "on", "off"] = "auto"
    """Whether what processes send each other (gathered parameters, gradients, activations between stages) is shortened
    losslessly. auto: where the cost model says it pays. on: always. off: torch's own collectives."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """fp32, or bf16 autocast with fp32 parameters and optimizer state."""
    steps: int = 200
    """Optimizer steps in the whole run."""
    batch_size: int = 16
    """Sequences per optimizer step over all processes; a multiple of processes x accumulation, with a pipeline of
    replicas x micro-batches."""
    accumulation: int = 1
    """Micro-batches per optimizer step and process."""
    sequence_length: int = 256
    """Tokens per sequence."""
    seed: int = 0
    """Seeds initialization, dropout and the order of samples."""
    log_every: int = 10
    """Steps between log lines; metrics.jsonl gets every step."""
    eval_every: int = 50
    """Steps between validation losses; 0 means only at the end."""
    eval_sequences: int = 64
    """Validation sequences per evaluation, over all processes; always the same ones."""
    tensorboard: bool = False
    """Also write TensorBoard event files (needs laconic[tensorboard])."""
    rank_timeout_seconds: float = 300.0
    """A collective that waits longer than this for another rank fails."""

    def __post_init__(self) -> None:
        check_values(self)
        for name in ("nproc", "batch_size", "accumulation", "sequence_length"):
            require(1 <= getattr(self, name) <= MAX_COUNT, name, getattr(self, name), _COUNT)
        for name in ("steps", "log_every"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "be at least 1")
        for name in ("eval_every", "eval_sequences", "seed"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "be at least 0")
        require(
            self.batch_size % self.accumulation == 0,
            "batch_size",
            self.batch_size,
            f"be a multiple of accumulation ({self.accumulation})",
        )
        require(
            self.pipeline.stages == 1 or self.accumulation in (1, self.micro_batches),
            "accumulation",
            self.accumulation,
            f"be 1 or pipeline.micro_batches ({self.micro_batches}), which it is another name for with a pipeline",
        )
        require(
            self.gradients.reduce != "native" or self.gradients.bits == 32 or self.parallel == "fsdp",
            "gradients.reduce",
            self.gradients.reduce,
            f'be q8 or left out with parallel = "ddp" and gradients.bits = {self.gradients.bits}: codes are reduced as '
            "they are",
        )
        for name in ("router_aux_loss_coef", "router_z_loss_coef", "bias_rate"):
            require(
                not getattr(self.moe, name) or self.pipeline.stages == 1,
                f"moe.{name}",
                getattr(self.moe, name),
                f"be left out with pipeline.stages = {self.pipeline.stages}: routers are on different processes",
            )
        whole = self.parallel == "ddp" or (self.accumulation == 1 and self.precision == "fp32")
        require(
            not self.moe.overlap_grad_reduce or (whole and self.gradients.bits == 32),
            "moe.overlap_grad_reduce",
            True,
            "be left out with gradients.bits below 32, and under fsdp with accumulation or bf16, where gradients are "
            "folded or cast before they are reduced",
        )
        spread = self.moe.expert_parallel
        require(
            spread is None or self.pipeline.stages == 1,
            "moe.expert_parallel",
            spread,
            f"be left out with pipeline.stages = {self.pipeline.stages}: stages are cut from the model's own blocks",
        )
        require(
            spread is None or self.plan is None,
            "moe.expert_parallel",
            spread,
            "be left out with a plan, which knows nothing of it",
        )
        require(
            0 < self.rank_timeout_seconds <= 1e8,
            "rank_timeout_seconds",
            self.rank_timeout_seconds,
            "be above 0 and at most 1e8 (three years)",
        )
        require(not (self.resume and self.run_dir is None), "resume", True, "come with run_dir, the run to continue")

    @property
    def micro_batches(self) -> int:
        """Micro-batches per optimizer step and process (with a pipeline: per replica)."""
        if self.pipeline.stages == 1:
            return self.accumulation
        if self.pipeline.micro_batches is not None:
            return self.pipeline.micro_batches
        return self.accumulation if self.accumulation > 1 else 2 * self.pipeline.stages

    @property
    def reduce(self) -> Literal["native", "q8"]:
        """`gradients.reduce`, or what it means when it is left out."""
        if self.gradients.reduce is not None:
            return self.gradients.reduce
        return "q8" if self.gradients.bits < 32 and self.parallel == "ddp" else "native"
