"""All settings of `laconic train`, as frozen dataclasses.

Python code builds the tree, TOML files are read into it, and flags override it. The resolved tree is saved with every
run, so a run can be repeated from its own directory. The type of a field states its range, and `__post_init__` checks
rules of several fields; what depends on the machine or the data is checked where that is known.

Docstrings of sections and fields are the help texts of the flags and the descriptions of the JSON schema.
"""

from __future__ import annotations

import os
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Strict, StrictBool, StrictInt, TypeAdapter
from pydantic_core import PydanticCustomError

from laconic.options import (
    CODE_BITS,
    ActivationBits,
    Attention,
    BlockSize,
    Code,
    DifferenceBits,
    GateName,
    GradientBits,
    Loss,
    Mode,
    Optimizer,
)
from laconic.train.config.settings import IS_PATH
from laconic.train.config.tasks import DEFAULT_TASK, find_task, task_names
from laconic.train.config.values import MAX_INT, check_table, refuse, refuse_unused, section

Size = Annotated[int, Strict(), Field(ge=1, le=2**31 - 1)]
"""A number of processes, sequences or tokens, or of entries of a dimension."""
PositiveInt = Annotated[int, Strict(), Field(ge=1, le=MAX_INT)]
NonNegativeInt = Annotated[int, Strict(), Field(ge=0, le=MAX_INT)]
PositiveFloat = Annotated[float, Strict(), Field(gt=0)]
NonNegativeFloat = Annotated[float, Strict(), Field(ge=0)]
Fraction = Annotated[float, Strict(), Field(ge=0, lt=1)]
Text = Annotated[str, Strict(), Field(pattern=r"^[^\x00]*$")]
PathText = Annotated[Text, Field(min_length=1), AfterValidator(os.path.expanduser), IS_PATH]
if TYPE_CHECKING:
    TaskName = str
else:
    TaskName = Literal[task_names()]
exact = BeforeValidator(TypeAdapter(StrictInt).validate_python)
"""Validator for choices of integers; pydantic alone would accept 8.0 for 8."""


def list_of(words: str) -> BeforeValidator:
    """Make a validator that accepts lists and tuples only; `words` names their elements in its message."""

    def listed(value: object) -> object:
        if not isinstance(value, list | tuple):
            raise PydanticCustomError("list_type", f"be a list of {words}")
        return tuple(value)

    return BeforeValidator(listed)


integers = list_of("integers, e.g. [3, 2]")
Integers = Annotated[tuple[PositiveInt, ...], integers]
Paths = Annotated[tuple[PathText, ...], list_of('strings, e.g. ["corpus/"]')]

_OF_SPREAD_EXPERTS = (
    *("dispatcher", "levels", "depth", "dispatch_codec", "chunks", "overlap_grad_reduce"),
    *("capacity_factor", "eval_capacity_factor", "gate"),
    *("swap_every", "swap_policy", "swap_pairs", "rates"),
    *("copies", "copy_every"),
)
"""Settings of `[moe]` that need `moe.expert_parallel`."""
_OF_SIZED_MODELS = (
    *("family", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "tie_word_embeddings", "extra"),
)
"""Settings of `[model]` that shape a model without a directory."""

PRETRAINING_RATE = 2e-3
"""Peak learning rate for random weights, when none is given."""
FINE_TUNING_RATE = 2e-5
"""Peak learning rate for weights that are trained already, when none is given."""
LORA_RATE = 2e-4
"""Peak learning rate for adapters, when none is given."""


@section("model.")
class ModelConfig:
    """Which model is trained."""

    path: PathText | None = None
    """A local directory, as save_pretrained writes it. With weights training starts from them; with only a config.json
    the model is initialized from scratch. When set, `family`, `extra` and the sizes below must be left out."""
    family: Text = "llama"
    """A model_type known to transformers (llama, mistral, qwen2, qwen3, gemma2, phi3, olmo2, gpt2, ...)."""
    hidden_size: Size = 128
    """Width of the residual stream."""
    intermediate_size: Size = 384
    """Width of the feed-forward layer."""
    num_hidden_layers: Size = 4
    """Number of decoder layers."""
    num_attention_heads: Size = 4
    """Number of query heads."""
    num_key_value_heads: PositiveInt | None = None
    """Number of key/value heads; None means as many as query heads."""
    tie_word_embeddings: StrictBool = True
    """Share the embedding matrix with the output projection."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields for the family's transformers config, e.g. {"rope_theta": 500000.0}. TOML: [model.extra]."""
    allow_download: StrictBool = False
    """Let `path` be a Hugging Face hub name and contact the hub. Off: nothing is ever looked up on a network."""

    def __post_init__(self) -> None:
        check_table(self.extra, "model.extra")
        heads, kv = self.num_attention_heads, self.num_key_value_heads
        if self.hidden_size % heads:
            refuse(self, "hidden_size", f"be a multiple of model.num_attention_heads ({heads})")
        if kv is not None and heads % kv:
            refuse(self, "num_key_value_heads", f"divide model.num_attention_heads ({heads})")
        if self.path is not None:
            refuse_unused(self, _OF_SIZED_MODELS, "be left out with model.path, whose config.json decides it")


@section("lora.")
class LoraConfig:
    """Low-rank adapters (LoRA): model.path's weights are frozen, two small matrices beside each layer are trained."""

    r: Size | None = None
    """Rank of the adapters, which need laconic[lora]; None means that all weights are trained."""
    alpha: PositiveInt | None = None
    """An adapter's output is multiplied by alpha / r; None means 2 x r."""
    dropout: Fraction = 0.0
    """Dropout of an adapter's input."""
    target_modules: Annotated[tuple[Text, ...], list_of('strings, e.g. ["q_proj", "v_proj"]')] = ()
    """Names of the layers that get an adapter, as q_proj or model.layers.0.self_attn.q_proj. Empty: all linear layers
    but the output projection."""

    def __post_init__(self) -> None:
        for name in ("alpha", "dropout", "target_modules"):
            if self.r is None and getattr(self, name):
                refuse(self, name, "be left out without lora.r, the rank of the adapters")


@section("data.")
class DataConfig:
    """What text the model learns, and how it becomes tokens."""

    paths: Paths = ()
    """Files, directories or glob patterns of text (.txt, .py, .md, ...) or JSONL (.jsonl). Empty: the sources of the
    installed Python standard library. Images: one folder of class folders, IDX files, arrays or a Hugging Face dataset,
    or one .npz file. Instructions: .jsonl files of messages, or of prompt and completion."""
    tokenizer: PathText | None = None
    """"bytes" (vocabulary of 256 plus one end-of-document token), or the path of a tokenizer.json or of a directory
    with a tokenizer; None means the tokenizer of model.path, and bytes without one."""
    end_of_document: Text | None = None
    """Token that ends each document; None means the tokenizer's own (eos_token of the tokenizer_config.json beside it,
    or a well-known name such as <|endoftext|> or </s>)."""
    text_key: Text = "text"
    """The field of each JSONL object that holds its text."""
    validation_fraction: Fraction = 0.02
    """Share of documents or images held out for the validation loss."""
    cache_dir: PathText | None = None
    """Where token files are kept; None means ~/.cache/laconic (or $XDG_CACHE_HOME/laconic)."""


@section("images.")
class ImagesConfig:
    """How images are read and varied, with task = image-classification."""

    size: Size | None = None
    """Height and width in pixels that image files are resized to; None: they must all have one size."""
    mode: Literal["L", "RGB"] | None = None
    """Mode that image files are converted to; None: they must all have one, L or RGB."""
    skip_corrupt: StrictBool = False
    """Leave out image files that cannot be read, and say how many; otherwise the first of them ends the run."""
    image_column: Text | None = None
    """Column of the images of a Hugging Face dataset; None: the only one there is."""
    label_column: Text | None = None
    """Column of the labels of a Hugging Face dataset; None: the only one there is."""
    flip: StrictBool = False
    """In training, mirror every other image, left to right, at random."""
    crop_padding: Annotated[int, Strict(), Field(ge=0, le=1024)] = 0
    """In training, move each image by up to this many pixels in each direction; what comes in is black."""


@section("activations.")
class ActivationsConfig:
    """How activations are saved for backward."""

    bits: Annotated[ActivationBits, exact] = 4
    """Bits kept per value: 2, 4, 5, 6, 8, or 16 for no compression."""
    format: Code | None = None
    """Block format; None means nf4 at 4 bits and the only one at other numbers of bits."""
    block_size: Annotated[BlockSize, exact] = 64
    """Values that share one scale."""
    mode: Mode = "sites"
    """"sites" rewrites recognized layers, "hooks" packs every saved tensor of any model, "combined" does both."""
    attention: Attention | None = None
    """How query, key and value are kept: as they are; packed, and attention runs again in backward; or not at all, and
    the whole module runs again (recompute). None means the library's default, and exact with bits = 16."""
    loss: Literal[Loss, "auto"] = "exact"
    """exact: the logits of a micro-batch are held at once. chunked: never more than a tile of them, on a GPU for one
    more matrix product. auto: chunked where the logits are more than a tile."""

    def __post_init__(self) -> None:
        if self.mode == "hooks" and self.attention not in (None, "exact"):
            refuse(self, "attention", 'be exact or left out with activations.mode = "hooks", which knows no sites')
        if self.mode == "hooks" and self.loss == "chunked":
            refuse(self, "loss", 'be exact or auto with activations.mode = "hooks"')
        if self.format is not None and self.bits == 16:
            refuse(self, "format", "be left out, because activations.bits is 16 (no compression)")
        if self.format is not None and self.bits != CODE_BITS[self.format]:
            because = f"because activations.bits is {self.bits}; leave it out for the default"
            refuse(self, "format", f"be a {self.bits}-bit format, {because}")
        if self.bits == 16:
            idle = ("mode", "block_size") if self.attention in (None, "exact", "recompute") else ("mode",)
            refuse_unused(self, idle, "be left out, because activations.bits is 16 (no compression)")


@section("gradients.")
class GradientsConfig:
    """How gradients are held between micro-batches, and how processes average them."""

    bits: Annotated[GradientBits, exact] = 32
    """32, or 8 (int8) or 12 (int8 and an int4 residual): each gradient is folded into codes and freed as soon as it is
    made."""
    reduce: Literal["native", "q8"] | None = None
    """native: DDP's all-reduce or FSDP2's reduce-scatter in fp32. q8: codes travel. None means native, but q8 where
    codes are all there is: with ddp at 8 or 12 bits."""


@section("optimizer.")
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay."""

    kind: Literal["adamw", Optimizer] = "adamw"
    """adamw: torch's, moments in fp32. adamw8bit and adamw4bit: laconic's, moments in 8 or 4 bits; they read gradients
    of 8 or 12 bits as they are, for the other one they are unpacked before the update."""
    learning_rate: PositiveFloat | None = None
    """Peak learning rate; None means 2e-3, 2e-5 when training starts from the weights of model.path, and 2e-4 for
    adapters."""
    min_learning_rate_ratio: Annotated[NonNegativeFloat, Field(le=1)] = 0.1
    """Learning rate at the last step, as a share of the peak."""
    warmup_steps: NonNegativeInt = 20
    """Steps of linear warm-up."""
    beta1: Fraction = 0.9
    """Decay of the first moment."""
    beta2: Fraction = 0.95
    """Decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay; not applied to vectors (norms, biases)."""
    clip_norm: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    update_in_backward: StrictBool = False
    """Update a parameter in backward, as soon as its gradient is whole, so that gradients are never there all at once.
    Needs adamw8bit or adamw4bit, clip_norm = 0, one micro-batch, and one process or parallel = fsdp."""

    def __post_init__(self) -> None:
        if not self.update_in_backward:
            return
        if self.kind == "adamw":
            refuse(self, "kind", "be adamw8bit or adamw4bit with optimizer.update_in_backward, which torch's lacks")
        if self.clip_norm:
            known = "the norm of all gradients is known after their updates"
            refuse(self, "clip_norm", f"be 0 with optimizer.update_in_backward: {known}")

    @property
    def peak_learning_rate(self) -> float:
        """`learning_rate`, or the default for random weights when it is left out."""
        return PRETRAINING_RATE if self.learning_rate is None else self.learning_rate


@section("outer.")
class OuterConfig:
    """The outer optimizer of `local_steps`: SGD with Nesterov momentum on averaged differences (DiLoCo)."""

    bits: Annotated[DifferenceBits, exact] = 4
    """In which differences from the common point travel, and their average: 4 (nf4), 8 (int8) or 32. What rounding
    drops is added to the next difference."""
    learning_rate: PositiveFloat = 0.7
    """How far the common point moves along the average."""
    momentum: Fraction = 0.9
    """Nesterov momentum; 0 is plain SGD."""
    fragments: PositiveInt = 1
    """Groups of parameters that are synchronized in turn within `local_steps`, so that no step sends all."""
    delay: NonNegativeInt = 0
    """Steps that go on while a synchronization runs in the background; 0: it is awaited. Below `local_steps`."""


@section("pipeline.")
class PipelineConfig:
    """How the model is cut into stages on different processes; `parallel` says how the replicas of a stage share it."""

    stages: Size = 1
    """Processes that one copy of the model is cut over; 1 means no pipeline. Divides the number of processes."""
    virtual_stages: Size = 1
    """Chunks of layers per process; above 1 only with interleaved-1f1b."""
    schedule: Literal["gpipe", "1f1b", "interleaved-1f1b"] = "1f1b"
    """In which order a process runs forwards and backwards."""
    micro_batches: PositiveInt | None = None
    """Micro-batches per optimizer step; None means accumulation if that is above 1, else twice the stages."""
    split: Integers = ()
    """Decoder layers per chunk, stages x virtual_stages numbers; empty: balanced by parameters, embedding and head
    counted."""

    def __post_init__(self) -> None:
        stages, virtual, schedule, micro = self.stages, self.virtual_stages, self.schedule, self.micro_batches
        interleaved = schedule == "interleaved-1f1b"
        if interleaved and virtual == 1:
            refuse(self, "virtual_stages", f"be at least 2 with pipeline.schedule = {schedule}")
        if not interleaved and virtual > 1:
            refuse(self, "virtual_stages", f"be 1 with pipeline.schedule = {schedule}; interleaved-1f1b takes more")
        if stages == 1 and virtual > 1:
            refuse(self, "virtual_stages", "be 1 with one stage")
        if stages == 1:
            idle = ("schedule", "micro_batches", "split")
            refuse_unused(self, idle, "be left out with pipeline.stages = 1; accumulation counts micro-batches then")
        if micro is not None and schedule == "1f1b" and micro < stages:
            refuse(self, "micro_batches", f"be at least pipeline.stages ({stages}) with 1f1b")
        if micro is not None and interleaved and micro % (rounds := max(1, micro // stages)):
            multiple = f"a multiple of micro_batches // stages ({rounds}) with {schedule}"
            refuse(self, "micro_batches", f"be {multiple}; a multiple of {stages} always is")
        if self.split and len(self.split) != stages * virtual:
            refuse(self, "split", f"have pipeline.stages x pipeline.virtual_stages = {stages * virtual} numbers")


@section("moe.")
class MoEConfig:
    """Experts of a mixture-of-experts model: how they are kept evenly used, and how they are spread over processes."""

    expert_parallel: PositiveInt | None = None
    """Processes that share a layer's experts (EP); divides the number of processes and of experts. 1: every process has
    all of them, in layers of laconic.moe. None: the model's own blocks are left as they are."""
    dispatcher: Literal["flat", "hierarchical", "auto"] = "flat"
    """flat: one all-to-all. hierarchical: level by level, each row once per group of processes that has experts for
    it. auto: laconic.moe.autotune chooses one of these, depth, code of rows and chunks, by measured rates and the first
    micro-batch."""
    gate: GateName | None = None
    """Decides in the place of the model's routers, with their weights; one that has no other parameters, as softmax,
    sinkhorn and expert_choice. Nothing else balances it. None: the routers."""
    levels: Integers = ()
    """Groups that the processes of one EP group form at each level, such as nodes: each number is a multiple of the one
    before. Empty: the machines, as LOCAL_WORLD_SIZE tells."""
    depth: PositiveInt | None = None
    """Stages of the hierarchical all-to-all, 1 to the number of levels + 1; None means the largest."""
    dispatch_codec: Literal["exact", "raw", "lossless", "int8"] = "exact"
    """What travels to experts and back. exact: rows bit for bit, shortened as `zip` says; raw: never; lossless: always.
    int8: blocks of 128, which rounds rows and their gradients."""
    chunks: Annotated[tuple[PositiveInt, ...], Field(max_length=2), integers] = ()
    """Chunks that a layer is cut into, so that rows of one travel while another is computed: one number, or one for
    forward and one for backward. Empty: layers are not cut."""
    overlap_grad_reduce: StrictBool = False
    """Average the dense part's gradients in backward while layers in chunks leave the link between nodes idle, instead
    of in DDP's buckets or FSDP2's reduce-scatter."""
    capacity_factor: PositiveFloat | None = None
    """In training an expert takes at most this many times its even share of a process's micro-batch, tokens in order;
    the rest is dropped. None drops nothing."""
    eval_capacity_factor: PositiveFloat | None = None
    """As capacity_factor, in evaluation; None drops nothing there."""
    swap_every: NonNegativeInt = 0
    """Fewest steps between two routing queries of a layer for experts that should change places; 0 means never. Needs
    measured rates and a dispatcher that goes in levels."""
    swap_policy: Literal["cost_aware", "always"] = "cost_aware"
    """cost_aware: swap once it would have gained what it costs, on tokens of later steps than the one it was found in;
    queries come less often while nothing pays. always: swap in every query that finds a shorter all-to-all for its
    step's tokens."""
    swap_pairs: PositiveInt = 1
    """Most pairs of experts of a layer that change places at a time."""
    copies: NonNegativeInt = 0
    """Most copies of hot experts of a layer that a process holds beside its own experts; chosen by measured loads, and
    fewer where more would not relieve the busiest process. 0: none."""
    copy_every: PositiveInt = 10
    """Steps after which experts are chosen anew for `copies`, by the tokens that they got since the last choice; the
    first choice comes after the first step."""
    rates: PathText | None = None
    """File with measured rates of the cluster (laconic.cost.MoERates) for `swap_every` and for dispatcher = auto; None
    means the one that laconic profile --moe wrote; auto measures where there is none."""
    router_aux_loss_coef: NonNegativeFloat | None = None
    """Weight of the load-balancing loss in training; None means the family's router_aux_loss_coef, 0 where it has
    none."""
    router_z_loss_coef: NonNegativeFloat = 0.0
    """Weight of the router z-loss (mean square of the logsumexp of router logits) in training."""
    bias_rate: NonNegativeFloat | None = None
    """Step size of router biases, in families that have them (DeepSeek-V3): lowered for an expert with more tokens than
    the mean, raised for one with fewer. None means 0.001 there, 0 with adapters."""

    def __post_init__(self) -> None:
        if self.expert_parallel is None:
            without = "be left out without moe.expert_parallel; set that to 1 or more"
            refuse_unused(self, _OF_SPREAD_EXPERTS, without)
        if not self.swap_every:
            refuse_unused(self, ("swap_policy", "swap_pairs"), "be left out without moe.swap_every")
            if self.dispatcher != "auto":
                unless = "be left out unless moe.swap_every is above 0 or moe.dispatcher = auto, which read it"
                refuse_unused(self, ("rates",), unless)
        for name in ("router_aux_loss_coef", "router_z_loss_coef", "bias_rate"):
            if self.gate is not None and getattr(self, name):
                refuse(self, name, "be left out with moe.gate: it balances routers, whose decisions are not taken")
        if self.depth is not None and self.dispatcher != "hierarchical":
            refuse(self, "depth", "come with moe.dispatcher = hierarchical")
        if self.dispatcher == "auto" and self.dispatch_codec == "lossless":
            shortens = "which shortens rows where that pays"
            refuse(self, "dispatch_codec", f"be exact, raw or int8 with moe.dispatcher = auto, {shortens}")
        if self.dispatcher == "auto" and self.chunks:
            refuse(self, "chunks", "be left out with moe.dispatcher = auto, which chooses them")
        if self.overlap_grad_reduce and max(self.chunks, default=1) == 1:
            refuse(self, "overlap_grad_reduce", "be left out without moe.chunks above 1, between which it runs")
        if self.swap_every and (self.expert_parallel == 1 or self.dispatcher == "flat"):
            unless = "moe.expert_parallel is above 1 and moe.dispatcher = hierarchical or auto"
            refuse(self, "swap_every", f"be 0 unless {unless}: rows are counted by level")
        if not self.copies:
            refuse_unused(self, ("copy_every",), "be left out without moe.copies")
        elif self.dispatcher == "auto":
            refuse(self, "copies", "be 0 with moe.dispatcher = auto, which may cut layers into chunks")
        elif max(self.chunks, default=1) > 1:
            refuse(self, "copies", "be 0 with moe.chunks: the weights of copies arrive for a whole layer")
        elif self.swap_every:
            refuse(self, "copies", "be 0 with moe.swap_every: swaps are weighed without copies")
        if self.expert_parallel == 1:
            refuse_unused(self, ("copies",), "be left out with moe.expert_parallel = 1: every process has all experts")
            of_rows = ("dispatcher", "depth", "dispatch_codec")
            refuse_unused(self, of_rows, "be left out with moe.expert_parallel = 1: no rows travel between processes")


@section("checkpoint.")
class CheckpointConfig:
    """When checkpoints are saved, and how many are kept."""

    every: NonNegativeInt = 0
    """Save each time this many steps are done; 0 means only at the end (and on Ctrl-C)."""
    keep: PositiveInt = 2
    """Newest checkpoints that stay on disk."""
    load: PositiveInt | None = None
    """With resume: step of the checkpoint to continue from; None means the newest. What came after it is dropped."""
    zip: StrictBool = False
    """Write the shards losslessly shortened. Any run can be continued from either kind."""


@section("verify.")
class VerifyConfig:
    """When replicas are compared bit by bit, to find memory that changed silently."""

    every: NonNegativeInt = 100
    """Compare weights, optimizer state and buffers of all replicas each time this many steps are done, and before each
    checkpoint; 0 means never. Shards without a replica are not covered."""


@section()
class TrainConfig:
    """One training run. The defaults are the demo: a small Llama on the Python standard library, two processes."""

    task: TaskName = DEFAULT_TASK
    """What is learned: the next token of a text, the answers of instructions, or the class of an image."""
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    images: ImagesConfig = field(default_factory=ImagesConfig)
    activations: ActivationsConfig = field(default_factory=ActivationsConfig)
    gradients: GradientsConfig = field(default_factory=GradientsConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)

    plan: PathText | None = None
    """A file that `laconic plan` wrote. It decides what activations keep, and the run has to be the planned one."""
    run_dir: PathText | None = None
    """Where the run is written; None means runs/<date>-<time>."""
    resume: StrictBool = False
    """Continue from the newest good checkpoint in `run_dir`."""
    nproc: Size = 2
    """Local processes to start. Not used under torchrun, which has started them already."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """ddp: a full copy per process. fsdp: parameters, gradients and optimizer state sharded (FSDP2)."""
    local_steps: NonNegativeInt = 0
    """Steps that each process makes by itself between two synchronizations of a parameter, for slow links (DiLoCo;
    `outer`). 0: gradients are averaged in every step. Losses between synchronizations are those of rank 0."""
    zip: Literal["auto", "on", "off"] = "auto"
    """Whether what processes send each other (gathered parameters, gradients, activations between stages) is shortened
    losslessly. auto: where the cost model says it pays. on: always. off: torch's own collectives."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """fp32, or bf16 autocast with fp32 parameters and optimizer state."""
    compile: StrictBool = False
    """Compile each decoder layer, or an image model as a whole (torch.compile; needs a C++ compiler). A compressed
    layer then takes the host about half as long, and the first step a minute longer."""
    steps: PositiveInt = 200
    """Optimizer steps in the whole run."""
    batch_size: Size = 16
    """Sequences or images per optimizer step over all processes; a multiple of processes x accumulation, with a
    pipeline of replicas x micro-batches."""
    accumulation: Size = 1
    """Micro-batches per optimizer step and process."""
    sequence_length: Size = 256
    """Tokens per sequence."""
    seed: NonNegativeInt = 0
    """Seeds initialization, dropout and the order of samples."""
    audit: StrictBool = True
    """Before the first step, compare some rows of it with the exact computation, and refuse what differs."""
    log_every: PositiveInt = 10
    """Steps between log lines; metrics.jsonl gets every step."""
    eval_every: NonNegativeInt = 50
    """Steps between validation losses; 0 means only at the end."""
    eval_sequences: NonNegativeInt = 64
    """Validation sequences or images per evaluation, over all processes; always the same ones."""
    tensorboard: StrictBool = False
    """Also write TensorBoard event files (needs laconic[tensorboard])."""
    wandb: StrictBool = False
    """Also log to Weights & Biases, or with WANDB_MODE=offline to its files (needs laconic[wandb])."""
    rank_timeout_seconds: Annotated[PositiveFloat, Field(le=1e8)] = 300.0
    """A collective that waits longer than this for another rank fails."""
    restarts: NonNegativeInt = 0
    """How often the processes are started again when one of them dies, fails or hangs; they go on from the newest good
    checkpoint. Not used under torchrun, which has --max-restarts for it."""

    def __post_init__(self) -> None:
        stages, gradients, moe = self.pipeline.stages, self.gradients, self.moe
        if self.batch_size % self.accumulation:
            refuse(self, "batch_size", f"be a multiple of accumulation ({self.accumulation})")
        if stages > 1 and self.accumulation not in (1, self.micro_batches):
            micro = f"pipeline.micro_batches ({self.micro_batches})"
            refuse(self, "accumulation", f"be 1 or {micro}, which it is another name for with a pipeline")
        self._check_local_steps()
        if self.optimizer.update_in_backward:
            self._check_updates_in_backward()
        if gradients.reduce == "native" and gradients.bits < 32 and self.parallel == "ddp" and not self.local_steps:
            held = f'parallel = "ddp" and gradients.bits = {gradients.bits}'
            refuse(self, "gradients.reduce", f"be q8 or left out with {held}: codes are reduced as they are")
        left_out = f"be left out with pipeline.stages = {stages}"
        for name in ("router_aux_loss_coef", "router_z_loss_coef", "bias_rate"):
            if stages > 1 and getattr(moe, name):
                refuse(self, f"moe.{name}", f"{left_out}: routers are on different processes")
        if moe.overlap_grad_reduce and gradients.bits < 32:
            refuse(
                self, "moe.overlap_grad_reduce", "be left out with gradients.bits below 32, as codes are reduced then"
            )
        if moe.overlap_grad_reduce and self.parallel == "fsdp" and (self.accumulation > 1 or self.precision == "bf16"):
            cast = "gradients are added up or cast before they are reduced"
            refuse(self, "moe.overlap_grad_reduce", f"be left out under fsdp with accumulation or bf16: {cast}")
        if moe.expert_parallel is not None and stages > 1:
            refuse(self, "moe.expert_parallel", f"{left_out}: stages are cut from the model's own blocks")
        if moe.copies and self.parallel == "fsdp":
            refuse(self, "moe.copies", 'be 0 with parallel = "fsdp", under which no process has whole experts to copy')
        if moe.expert_parallel is not None and self.plan is not None:
            refuse(self, "moe.expert_parallel", "be left out with a plan, which knows nothing of it")
        if self.lora.r is not None:
            if self.model.path is None:
                refuse(self, "lora.r", "come with model.path (or --init), the model that the adapters are for")
            if moe.expert_parallel is not None:
                refuse(self, "moe.expert_parallel", "be left out with lora.r: adapters are not spread over processes")
            if moe.bias_rate:
                refuse(self, "moe.bias_rate", "be 0 or left out with lora.r: biases are frozen, as the model's weights")
            if stages > 1:
                refuse(self, "lora.r", f"{left_out}: stages are balanced and cut by trained weights")
            if self.plan is not None:
                refuse(self, "lora.r", "be left out with a plan, which counts gradients and moments of all weights")
        if self.plan is not None:
            decided = ("bits", "format", "block_size", "mode", "attention")
            refuse_unused(self.activations, decided, "be left out with a plan, which decides it")
        if not self.resume:
            refuse_unused(self.checkpoint, ("load",), "be left out without resume")
        find_task(self.task).check(self)
        if self.resume and self.run_dir is None:
            refuse(self, "resume", "come with run_dir, the run to continue")

    def _check_local_steps(self) -> None:
        steps, outer = self.local_steps, self.outer
        if not steps:
            refuse_unused(outer, (), "be left out without local_steps; set that to 1 or more")
            return
        alone = f"with local_steps = {steps}: each process trains the whole model by itself"
        if self.parallel != "ddp":
            refuse(self, "parallel", f"be ddp {alone}")
        if self.pipeline.stages > 1:
            refuse(self, "pipeline.stages", f"be 1 {alone}")
        if self.moe.expert_parallel is not None:
            refuse(self, "moe.expert_parallel", f"be left out {alone}")
        if self.gradients.reduce == "q8":
            refuse(self, "gradients.reduce", f"be native or left out with local_steps = {steps}: none is averaged")
        if self.zip == "on":
            refuse(self, "zip", f"be auto or off with local_steps = {steps}: differences travel as outer.bits says")
        if self.plan is not None:
            refuse(self, "plan", f"be left out with local_steps = {steps}, whose common point it does not count")
        if outer.fragments > steps:
            refuse(self, "outer.fragments", f"be at most local_steps ({steps}): one is synchronized in a step")
        if outer.delay >= steps:
            refuse(self, "outer.delay", f"be below local_steps ({steps}): a fragment is merged before it is sent again")

    def _check_updates_in_backward(self) -> None:
        alone = "with optimizer.update_in_backward"
        if self.pipeline.stages > 1:
            refuse(self, "pipeline.stages", f"be 1 {alone}: gradients add up over the micro-batches of a pipeline")
        if self.accumulation > 1:
            refuse(self, "accumulation", f"be 1 {alone}: no gradient is left for the next micro-batch to add to")
        if self.gradients.bits < 32:
            refuse(self, "gradients.bits", f"be 32 {alone}: codes hold all gradients until backward is over")
        if self.local_steps:
            apart = "a process cannot leave out a step whose gradients are not finite any more"
            refuse(self, "local_steps", f"be 0 {alone}: {apart}")
        if self.moe.expert_parallel is not None:
            refuse(self, "moe.expert_parallel", f"be left out {alone}: experts' gradients are averaged after backward")

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
        """`gradients.reduce`, or its default for this run when it is left out."""
        if self.gradients.reduce is not None:
            return self.gradients.reduce
        return "q8" if self.gradients.bits < 32 and self.parallel == "ddp" else "native"
