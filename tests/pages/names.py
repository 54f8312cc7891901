"""What pages take for granted: a small model, a batch, a group of ranks, files in the current directory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

Names = dict[str, Any]
VOCABULARY = 97
SERVED_AT = "http://127.0.0.1:8000"
"""Where pages serve models; a page runs with `url`, a free port, in its place."""

_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@dataclass(frozen=True)
class Page:
    """How a page is run.

    Attributes:
        names: from the source of a block to the names that it takes for granted; the stack closes what is open.
        num_ranks: processes that run the page together.
        fresh: blocks are alternatives: each begins with `names` of its own, not only the first.
        slow: it takes more than a few seconds.
        in_ci: it takes seconds as well; CI runs it.
    """

    names: Callable[[str, ExitStack], Names]
    num_ranks: int = 1
    fresh: bool = False
    slow: bool = False
    in_ci: bool = False


def joined(backend: str = "gloo") -> dist.ProcessGroup:
    """The group of all ranks of this page."""
    if not dist.is_initialized():
        dist.init_process_group(backend)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def once(write: Callable[[], object]) -> None:
    """Let one rank write to the directory that all share."""
    if joined().rank() == 0:
        write()
    dist.barrier()


def llama() -> nn.Module:
    """Two layers with random weights, the same on all ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **shape, **_TOKENS))


def mixture(num_layers: int = 2) -> nn.Module:
    """Layers of eight experts of which a token takes two."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": num_layers, "max_position_embeddings": 256}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **shape, **experts, **_TOKENS))


def images_and_labels() -> Names:
    """Four small images."""
    return {"images": torch.randn(4, 3, 32, 32), "labels": torch.tensor([0, 1, 2, 3])}


def batch_of(rows: int = 2, columns: int = 32) -> dict[str, Tensor]:
    """Tokens and labels."""
    ids = torch.randint(0, VOCABULARY, (rows, columns))
    return {"input_ids": ids, "labels": ids}


# --- a page each, in the order of the menu ---


def _nothing(block: str, until_the_end: ExitStack) -> Names:
    return {}


def _readme(block: str, until_the_end: ExitStack) -> Names:
    return {"model": llama(), "batch": batch_of(), "group": joined()}


def _advise(block: str, until_the_end: ExitStack) -> Names:
    return {"model": llama(), "batch": batch_of()}


def _activations(block: str, until_the_end: ExitStack) -> Names:
    ids = batch_of()["input_ids"]
    text = {"ids": ids, "labels": ids, "batch": batch_of(), "lm_head": nn.Linear(64, VOCABULARY, bias=False)}
    rows = {"hidden": torch.randn(2, 32, 64, requires_grad=True), "tokens_of_the_batch": 62}
    if "images" not in block and "inputs=inputs" not in block:
        return text | rows | {"model": llama()}
    from laconic.vision import afi_resnet50

    named = images_and_labels()
    inputs = {"pixel_values": named["images"], "labels": named["labels"]}
    return named | {"inputs": inputs, "model": afi_resnet50(num_classes=4)}


def _gradients(block: str, until_the_end: ExitStack) -> Names:
    import laconic

    model, group = llama(), joined()
    torch.manual_seed(group.rank())  # each rank has batches of its own
    names = {
        "model": model,
        "group": group,
        "micro_batches": [batch_of() for _ in range(3)],
        "loss_of": lambda model, batch: model(**batch).loss,
        "optimizer": laconic.AdamW8bit(model.parameters()),
        "tensor": torch.randn(4096),
        "device": "cpu",
        "num_nodes": 1,
        "ranks_per_node": 2,
    }
    wrapped = nn.parallel.DistributedDataParallel(llama())
    names |= {"ddp_or_fsdp2_model": wrapped, "ddp_model": wrapped}
    return names | {"fsdp2_model": fully_shard(llama())}


def _optim(block: str, until_the_end: ExitStack) -> Names:
    model = llama()
    model(**batch_of()).loss.backward()
    loss = model(**batch_of()).loss
    names: Names = {"model": model, "loss": loss, "max_norm": 1.0}
    if "torch_adamw" in block:
        import laconic

        reference = llama()
        torch_adamw = torch.optim.AdamW(reference.parameters(), lr=3e-4)
        reference(**batch_of()).loss.backward()
        torch_adamw.step()
        return {"optimizer": laconic.AdamW8bit(llama().parameters(), lr=3e-4), "torch_adamw": torch_adamw}
    if "gradient_factor" in block:
        return {}
    return names


def _zip_collectives(block: str, until_the_end: ExitStack) -> Names:
    joined()
    return {"model": llama()}


def _process_group(block: str, until_the_end: ExitStack) -> Names:
    if dist.is_initialized():
        dist.destroy_process_group()
    return {}


def _collectives(block: str, until_the_end: ExitStack) -> Names:
    tensors = {"tensor": torch.randn(4096), "shard": torch.randn(4096), "output": torch.empty(8192)}
    return {"group": joined(), "layer": nn.Linear(8, 8), "hidden": torch.randn(2, 8), **tensors}


def _choosing(block: str, until_the_end: ExitStack) -> Names:
    once(lambda: wire_rates().save("cluster.json"))
    return {"group": joined(), "numel": 2**20}


def _zip(block: str, until_the_end: ExitStack) -> Names:
    from laconic.formats.archive import zip_path

    model = llama()
    model.save_pretrained("model")
    zip_path(Path("model"), Path("model.laconic"))
    model.save_pretrained("step-1000")
    zip_path(Path("model"), Path("step-2000.laconic"), base=Path("step-1000"))
    return {"model": model, "device": "cpu"}


def wire_rates() -> Any:
    """Made-up links of a cluster."""
    from laconic.cost.comm.rates import CodecRates, Line, LinkRates, WireRates

    operations = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
    links = {
        name: LinkRates(4, {operation: Line(1e-4, each) for operation in operations}, 1e-5, 1.0)
        for name, each in {"node": 1e-10, "across": 1e-8, "all": 2e-8}.items()
    }
    lossless = CodecRates(Line(1e-5, 1e-10), Line(1e-5, 1e-10), Line(1e-5, 1e-10), 1.5)
    return WireRates(links, {"bfloat16": {"tiered": lossless}, "float32": {"tiered": lossless}})


def moe_rates() -> Any:
    """The same for layers of experts."""
    from laconic.cost.comm.rates import Line
    from laconic.cost.moe import MoERates

    return MoERates(wire_rates(), Line(1e-5, 1e-12), copy=Line(1e-6, 1e-10), source="made up")


def _planning(block: str, until_the_end: ExitStack) -> Names:
    from laconic.activations import ActivationPlan, find_sites
    from laconic.cli.main import main

    model = llama()
    if "load_plan" not in block:
        from laconic import BlockFormat

        plan = ActivationPlan.make(find_sites(model), lambda site: BlockFormat("nf4"))
        Path("plan.json").write_text(plan.to_json())
        return {"model": model}
    sizes = ["--hidden-size", "64", "--intermediate-size", "160", "--num-layers", "4", "--num-heads", "4"]
    layout = ["--vocab-size", str(VOCABULARY), "--sequence-length", "8192", "--stages", "4", "--dp", "8"]
    assert main(["plan", *sizes, *layout, "--out", "plan.json"]) == 0
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336).save_pretrained("llama-3-8b")
    shape = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4}
    shape |= {"max_position_embeddings": 8192}
    return {"model": LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **shape, **_TOKENS))}


def _training(block: str, until_the_end: ExitStack) -> Names:
    Path("run.toml").write_text("steps = 10\n")
    return {}


def _integrations(block: str, until_the_end: ExitStack) -> Names:
    rows = [{name: row[0] for name, row in batch_of(1).items()} for _ in range(8)]
    return {"model": llama(), "dataset": rows, "loader": torch.utils.data.DataLoader(rows, batch_size=2)}


def _inference(block: str, until_the_end: ExitStack) -> Names:
    from laconic.cost.comm.rates import Line
    from laconic.cost.infer import InferenceRates
    from laconic.cost.infer.rates import LinkPair
    from laconic.infer import control
    from tests.distributed.forked import forked_programs

    if not Path("path").exists():
        until_the_end.enter_context(forked_programs(control))
        mixture().save_pretrained("path/to/model")
    link = LinkPair(Line(2e-5, 2.5e-11), Line(2e-5, 2.5e-11))
    rates = InferenceRates(Line(1e-5, 2e-15), Line(5e-6, 4e-15), link, read_seconds_per_byte=4e-13, grouped=False)
    rates.save("infer_rates.json")
    return {}


def _serving(block: str, until_the_end: ExitStack) -> Names:
    import uvicorn

    from laconic.infer import control
    from laconic.infer.server import ServerSettings, create_app, load_text_tokenizer
    from tests.distributed.forked import forked_programs
    from tests.infer.serving import FakeEngine, running

    mixture().save_pretrained("path/to/model")
    chat_tokenizer().save_pretrained("path/to/model")
    engine = FakeEngine()
    until_the_end.callback(engine.close)
    app = create_app(engine, load_text_tokenizer("path/to/model"), ServerSettings("my-model"))
    until_the_end.enter_context(forked_programs(control))

    def answers_once(app: Any, host: str, port: int) -> None:
        import httpx

        with running(app) as url:
            found = httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer secret"}, trust_env=False)
            assert found.json()["data"][0]["id"] == "my-model"

    until_the_end.enter_context(pytest.MonkeyPatch.context()).setattr(uvicorn, "run", answers_once)
    return {"url": until_the_end.enter_context(running(app))}


def chat_tokenizer() -> Any:
    """Bytes as tokens, with a template for chats."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="!")
    made.chat_template = "{{ tools or '' }}{% for message in messages %}{{ message.content }}{% endfor %}"
    return made


def _moe_hierarchy(block: str, until_the_end: ExitStack) -> Names:
    from laconic.moe import GatedExperts, SoftmaxGate

    once(lambda: moe_rates().save("rates.json"))
    torch.manual_seed(0)
    gate = SoftmaxGate(8, 64, top_k=2)
    experts = GatedExperts(4, 64, 128)
    return {
        "num_nodes": 2,
        "gate": gate,
        "experts": experts,
        "optimizer": torch.optim.AdamW(experts.parameters()),
        "data": [torch.randn(16, 64) for _ in range(2)],
        "save": lambda layer, optimizer: None,
    }


def _moe_costs(block: str, until_the_end: ExitStack) -> Names:
    moe_rates().save("moe_rates.json")
    return {}


def _moe_huggingface(block: str, until_the_end: ExitStack) -> Names:
    joined()
    if "from_pretrained" in block:
        once(lambda: mixture().save_pretrained("path/to/model"))
    elif "load_sharded" in block:
        from laconic.moe import Grid, parallelize

        model = mixture()
        optimizer = torch.optim.AdamW(parallelize(model, Grid(ep=8)).parameter_groups())
        return {"model": model, "optimizer": optimizer}
    return {"model": mixture(), "batches": [batch_of() for _ in range(2)], "batch": batch_of()}


def _moe_autotune(block: str, until_the_end: ExitStack) -> Names:
    from laconic.moe import Grid

    joined()
    return {"model": mixture(), "grid": Grid(ep=2), "input_ids": batch_of()["input_ids"]}


def _moe_pipeline(block: str, until_the_end: ExitStack) -> Names:
    from laconic.moe import Grid
    from laconic.schedule.moe_gradients import fill_slots
    from tests.moe.test_windows import Line, batch, dense, model_of, parts_of

    joined()
    grid = Grid()
    model = model_of(grid)
    names = {"grid": grid, "layer": model[0].moe, "model": model, "blocks": list(model), "parts": parts_of(model)}
    names |= {
        "reduction": Line(),
        "dense_parts": [each.dense for each in model],
        "plan": fill_slots(parts_of(model), Line()),
    }
    names |= {"batch": batch(), "loss_of": lambda model, batch: model(batch).square().mean()}
    return names | {"dense_parameters": list(dense(model).values())}


def _schedules(block: str, until_the_end: ExitStack) -> Names:
    if "send_first" in block:
        return {f"{verb}_{which}": (lambda: None) for verb in ("send", "use") for which in ("first", "second")}
    if "fill_slots" in block:
        from laconic.cost.comm.rates import Line

        return {"line": Line(1e-4, 1e-9)}
    return {}


def _vision(block: str, until_the_end: ExitStack) -> Names:
    layers = nn.ModuleList(nn.Conv2d(64, 64, 3, padding=1) for _ in range(3))
    return images_and_labels() | {"layers": layers, "x": torch.randn(2, 64, 8, 8)}


def _formats(block: str, until_the_end: ExitStack) -> Names:
    return {"tensor": torch.randn(64, 64)}


PAGES = {
    "README.md": Page(_readme, num_ranks=2),
    "getting_started.md": Page(_nothing, in_ci=True),
    "advise.md": Page(_advise, fresh=True, slow=True),
    "activations.md": Page(_activations, fresh=True, in_ci=True),
    "integrations.md": Page(_integrations, fresh=True, in_ci=True),
    "gradients.md": Page(_gradients, num_ranks=2, fresh=True),
    "optim.md": Page(_optim, fresh=True),
    "zip_collectives.md": Page(_zip_collectives, num_ranks=2),
    "process_group.md": Page(_process_group, fresh=True),
    "collectives.md": Page(_collectives, num_ranks=2),
    "choosing.md": Page(_choosing, num_ranks=2),
    "training.md": Page(_training),
    "planning.md": Page(_planning, fresh=True, in_ci=True),
    "zip.md": Page(_zip),
    "vision.md": Page(_vision, in_ci=True),
    "formats.md": Page(_formats),
    "moe.md": Page(_nothing),
    "moe_huggingface.md": Page(_moe_huggingface, num_ranks=8, fresh=True, slow=True),
    "moe_autotune.md": Page(_moe_autotune, num_ranks=2, slow=True),
    "moe_hierarchy.md": Page(_moe_hierarchy, num_ranks=2),
    "moe_parallel.md": Page(_nothing, num_ranks=4),
    "moe_pipeline.md": Page(_moe_pipeline, num_ranks=2, fresh=True),
    "moe_costs.md": Page(_moe_costs),
    "schedules.md": Page(_schedules, fresh=True),
    "inference.md": Page(_inference, in_ci=True),
    "inference_planning.md": Page(_inference),
    "inference_schedule.md": Page(_nothing),
    "serving.md": Page(_serving, in_ci=True),
    "reliability.md": Page(_nothing),
}
"""Every page with Python that is run."""
