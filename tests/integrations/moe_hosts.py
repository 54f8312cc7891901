"""Trains mixtures of experts in the loops of other packages, with the experts spread over processes.

Every cell of the table is one host, one model family and one case. A host trains a tiny model in float64 in one
process, as a script without laconic does, and again in two processes with one line more, `parallelize(model,
Grid(ep=2))`. The cell's number is the largest difference between the two runs' final weights. The global batch is the
same, and so is every hyperparameter.

`python -m tests.integrations.moe_hosts` measures all cells and writes the table of docs/moe_hosts.md; with names of
hosts, their rows.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.activations.models import VOCABULARY, make_model
from tests.distributed.processes import ROOT, free_port, rank_environment, run_ranks

FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")
CASES = ("plain", "to", "accumulation", "clipping", "resume", "lora", "lora first", "evaluation")
BY_VALUE = "clipping by value"
"""A case of Accelerate and Lightning that is not in the table."""
BATCH, LENGTH, STEPS, LR, EPS, DECAY, NORM = 4, 10, 4, 1e-2, 1e-3, 0.1, 0.05
STEPS_PER_EPOCH = 2
TARGETS = {
    "target_modules": ["q_proj", "q_a_proj", "o_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


@dataclass
class Job:
    """One training of a cell in this process, one of `world`."""

    family: str
    case: str
    rank: int
    world: int
    folder: Path
    done: Any = None
    """What `parallelize` returned."""

    @property
    def micro_batches(self) -> int:
        return 2 if self.case == "accumulation" else 1

    @property
    def max_norm(self) -> float | None:
        return {"clipping": NORM, BY_VALUE: NORM / 50}.get(self.case)

    @property
    def batch_size(self) -> int:
        """Rows of a micro-batch of this process."""
        return BATCH // self.world

    def rows(self) -> list[Tensor]:
        """All rows of an epoch."""
        generator = torch.Generator().manual_seed(1)
        count = BATCH * self.micro_batches * STEPS_PER_EPOCH
        return list(torch.randint(4, VOCABULARY, (count, LENGTH), generator=generator))

    def batches(self) -> list[Tensor]:
        """The micro-batches of this process in one epoch, [batch_size, LENGTH] each."""
        rows = torch.stack(self.rows()).split(BATCH)
        return [each.chunk(self.world)[self.rank] for each in rows]

    def made(self) -> Any:
        """A model of the family."""
        model: Any = make_model(self.family, experts_implementation="eager", use_cache=False)
        for router in model.modules():
            if type(router).__name__ == "DeepseekV3TopkRouter":
                router.forward = MethodType(_in_float64(type(router)), router)
        return model

    def model(self) -> Any:
        """A model of the family, as the case has it: the one line is here."""
        model = self.made()
        if self.case != "to":
            model = model.double()
        if self.case == "lora first":
            model = self._adapted(model)
        if self.world > 1:
            from laconic.moe import Grid, parallelize

            self.done = parallelize(model, Grid(ep=self.world))
        if self.case == "lora":
            model = self._adapted(model)
        return model.double()

    def _adapted(self, model: nn.Module) -> nn.Module:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(2)
        return get_peft_model(model, LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, **TARGETS))

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=LR, eps=EPS, weight_decay=DECAY)


def _in_float64(router: Any) -> Any:
    """DeepSeek's router without its cast to float32, whose rounding depends on the number of rows."""
    source = textwrap.dedent(inspect.getsource(router.forward)).replace("float32", "float64")
    names = dict(vars(sys.modules[router.__module__]))
    exec(source, names)
    return names["forward"]


Host = Callable[[Job], nn.Module]
"""Trains `job.model()` for STEPS steps and returns it."""


def weights(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, whole; every process calls it."""
    found = {}
    for name, parameter in model.named_parameters():
        whole = parameter.detach()
        found[name] = (whole.full_tensor() if isinstance(whole, DTensor) else whole).clone()
    return found


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def look(model: nn.Module, ids: Tensor) -> None:
    """An evaluation of other rows."""
    was = model.training
    with torch.no_grad():
        loss_of(model.eval(), ids.flip(1))
    model.train(was)


# transformers and TRL


def _arguments(job: Job, kind: Any, **changes: Any) -> Any:
    usual: dict[str, Any] = {
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "per_device_train_batch_size": job.batch_size,
        "per_device_eval_batch_size": job.batch_size,
        "gradient_accumulation_steps": job.micro_batches,
        "max_steps": STEPS,
        "learning_rate": LR,
        "adam_epsilon": EPS,
        "weight_decay": DECAY,
        "lr_scheduler_type": "constant",
        "max_grad_norm": job.max_norm or 0.0,
        "gradient_checkpointing": False,
        "remove_unused_columns": False,
        "ddp_backend": "gloo" if job.world > 1 else None,
    }
    if job.case == "evaluation":
        usual |= {"eval_strategy": "steps", "eval_steps": 1}
    return kind(str(job.folder / "out"), **(usual | changes))


def _trained(job: Job, arguments: Callable[..., Any], make: Callable[[Any, Any], Any]) -> nn.Module:
    """Train, from the middle of an earlier training where the case says so."""
    if job.case != "resume" or job.world == 1:
        trainer = make(job.model(), arguments())
        trainer.train()
        found: nn.Module = trainer.model
        return found
    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    make(job.model(), arguments(**saving, max_steps=STEPS // 2)).train()
    trainer = make(job.model(), arguments(**saving))
    trainer.train(resume_from_checkpoint=str(job.folder / "out" / f"checkpoint-{STEPS // 2}"))
    trained: nn.Module = trainer.model
    return trained


def _trainer(job: Job, kind: Any, **options: Any) -> nn.Module:
    from transformers import TrainingArguments

    rows = [{"input_ids": ids, "labels": ids} for ids in job.rows()]

    def make(model: Any, arguments: Any) -> Any:
        return kind(model, arguments, train_dataset=rows, eval_dataset=rows, **options)

    return _trained(job, lambda **changes: _arguments(job, TrainingArguments, **changes), make)


def trainer(job: Job) -> nn.Module:
    """transformers' Trainer as it is."""
    from transformers import Trainer

    return _trainer(job, Trainer)


def laconic_trainer(job: Job) -> nn.Module:
    """LaconicTrainer."""
    if job.world == 1:
        return trainer(job)
    from laconic.integrations.huggingface import LaconicConfig, LaconicTrainer

    return _trainer(job, LaconicTrainer, laconic=LaconicConfig(activations=16))


def _of_trl(job: Job, kind: Any) -> tuple[Any, dict[str, Any]]:
    if job.world == 1:
        return kind, {}
    from laconic.integrations.huggingface import LaconicConfig, LaconicTrainerMixin

    return type("Mine", (LaconicTrainerMixin, kind), {}), {"laconic": LaconicConfig(activations=16)}


def _words() -> Any:
    from tests.integrations.test_huggingface import words

    return words()


def _freeze_head(model: Any) -> None:
    """TRL sums gradients of the head in float32, whose rounding depends on the number of rows."""
    model.get_output_embeddings().requires_grad_(False)


def sft(job: Job) -> nn.Module:
    """TRL's SFTTrainer."""
    import trl
    from datasets import Dataset

    data = Dataset.from_list([{"input_ids": ids.tolist(), "labels": ids.tolist()} for ids in job.rows()])
    kind, own = _of_trl(job, trl.SFTTrainer)

    def make(model: Any, arguments: Any) -> Any:
        _freeze_head(model)
        return kind(model, arguments, train_dataset=data, eval_dataset=data, processing_class=_words(), **own)

    return _trained(job, lambda **changes: _arguments(job, trl.SFTConfig, router_aux_loss_coef=0.0, **changes), make)


def dpo(job: Job) -> nn.Module:
    """TRL's DPOTrainer."""
    import trl
    from datasets import Dataset

    def text(ids: Tensor) -> str:
        return " " + " ".join(map(str, ids.tolist()))

    names = {"prompt": slice(2), "chosen": slice(2, 6), "rejected": slice(6, 10)}
    data = Dataset.from_list([{name: text(ids[part]) for name, part in names.items()} for ids in job.rows()])
    kind, own = _of_trl(job, trl.DPOTrainer)

    def make(model: Any, arguments: Any) -> Any:
        if "lora" not in job.case:
            own["ref_model"] = job.model()
        _freeze_head(model)
        return kind(model, args=arguments, train_dataset=data, eval_dataset=data, processing_class=_words(), **own)

    return _trained(job, lambda **changes: _arguments(job, trl.DPOConfig, router_aux_loss_coef=0.0, **changes), make)


# Accelerate


def accelerate(job: Job) -> nn.Module:
    """A loop over Accelerate's Accelerator."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    def run(first: int, last: int, resume: Path | None, save: Path | None) -> nn.Module:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=job.micro_batches)
        model = job.model()
        if job.world > 1:
            from laconic.integrations.accelerate import LaconicConfig, attach

            attach(accelerator, model, LaconicConfig(activations=16))
        model, optimizer = accelerator.prepare(model, job.optimizer(model.parameters()))
        if resume is not None:
            accelerator.load_state(str(resume))
        batches = job.batches() * (STEPS // STEPS_PER_EPOCH)
        for ids in batches[first * job.micro_batches : last * job.micro_batches]:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, ids))
                if accelerator.sync_gradients and job.max_norm is not None:
                    by_value = job.case == BY_VALUE
                    clip = accelerator.clip_grad_value_ if by_value else accelerator.clip_grad_norm_
                    clip(model.parameters(), job.max_norm)
                optimizer.step()
                optimizer.zero_grad()
            if job.case == "evaluation":
                look(model, ids)
        if save is not None:
            accelerator.save_state(str(save))
        found: nn.Module = accelerator.unwrap_model(model)
        return found

    if job.case != "resume" or job.world == 1:
        return run(0, STEPS, None, None)
    run(0, STEPS // 2, None, job.folder / "state")
    return run(STEPS // 2, STEPS, job.folder / "state", None)


# Lightning


def lightning(job: Job) -> nn.Module:
    """Lightning's Trainer."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model: Any = None

        def configure_model(self) -> None:
            if self.model is None:
                self.model = job.model()

        def training_step(self, ids: Tensor, number: int) -> Tensor:
            return loss_of(self.model, ids)

        def validation_step(self, ids: Tensor, number: int) -> Tensor:
            return loss_of(self.model, ids.flip(1))

        def configure_optimizers(self) -> Any:
            return job.optimizer(self.parameters())

    def run(steps: int, resume: Path | None, save: Path | None) -> nn.Module:
        callbacks: list[Any] = []
        if job.world > 1:
            from laconic.integrations.lightning import LaconicCallback, LaconicConfig

            callbacks = [LaconicCallback(LaconicConfig(activations=16))]
        validates = job.case == "evaluation"
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=job.world,
            strategy=pl.strategies.DDPStrategy(process_group_backend="gloo") if job.world > 1 else "auto",
            max_steps=steps,
            accumulate_grad_batches=job.micro_batches,
            gradient_clip_val=job.max_norm,
            gradient_clip_algorithm="value" if job.case == BY_VALUE else None,
            limit_val_batches=1 if validates else 0,
            val_check_interval=1 if validates else None,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=job.folder,
            callbacks=callbacks,
        )
        module = Module()
        rows: Any = job.rows()
        order = torch.utils.data.DistributedSampler(rows, job.world, job.rank, shuffle=False)
        data = torch.utils.data.DataLoader(rows, batch_size=job.batch_size, sampler=order)
        trainer.fit(module, data, data if validates else None, ckpt_path=resume)
        if save is not None:
            trainer.save_checkpoint(save)
        found: nn.Module = module.model
        return found

    if job.case != "resume":
        return run(STEPS, None, None)
    # Lightning itself leaves a batch out after a checkpoint at the end of an epoch: one process resumes, too.
    run(STEPS // 2, None, job.folder / "half.ckpt")
    return run(STEPS, job.folder / "half.ckpt", None)


# Loops of one's own


def _loop(job: Job, wrap: Callable[[Any], tuple[Any, Any]]) -> nn.Module:
    from laconic.moe.huggingface import load_sharded, save_sharded

    def run(first: int, last: int, resume: Path | None, save: Path | None) -> nn.Module:
        model = job.model()
        wrapped, clip = wrap(model)
        optimizer = job.optimizer([p for p in model.parameters() if p.requires_grad])
        if resume is not None:
            load_sharded(resume, model, optimizer)
        batches = job.batches() * (STEPS // STEPS_PER_EPOCH)
        for number, ids in enumerate(batches[first * job.micro_batches : last * job.micro_batches]):
            (loss_of(wrapped, ids) / job.micro_batches).backward()
            if (number + 1) % job.micro_batches == 0:
                if job.max_norm is not None:
                    clip(model, job.max_norm)
                optimizer.step()
                optimizer.zero_grad()
            if job.case == "evaluation":
                look(wrapped, ids)
        if save is not None:
            save_sharded(save, model, optimizer)
        found: nn.Module = model
        return found

    if job.case != "resume" or job.world == 1:
        return run(0, STEPS, None, None)
    run(0, STEPS // 2, None, job.folder / "half")
    return run(STEPS // 2, STEPS, job.folder / "half", None)


def _clip(model: nn.Module, max_norm: float) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def _clip_experts(job: Job) -> Callable[[nn.Module, float], object]:
    return lambda model, max_norm: job.done.clip_gradients(max_norm)


def ddp(job: Job) -> nn.Module:
    """A loop of one's own with DistributedDataParallel."""

    def wrap(model: Any) -> tuple[Any, Any]:
        if job.world == 1:
            return model, _clip
        return nn.parallel.DistributedDataParallel(model), _clip_experts(job)

    return _loop(job, wrap)


def fsdp2(job: Job) -> nn.Module:
    """A loop of one's own with FSDP2."""

    def wrap(model: Any) -> tuple[Any, Any]:
        if job.world == 1:
            return model, _clip
        job.done.fully_shard(_decoder_layers(model))
        return model, _clip_experts(job)

    return _loop(job, wrap)


def torchtitan(job: Job) -> nn.Module:
    """torchtitan's Trainer, with a parallelize_fn of one's own."""
    from tests.integrations import titan

    def parallelize_fn(model: Any, *, parallel_dims: Any, **_: Any) -> Any:
        if parallel_dims.ep_enabled:
            from laconic.moe import Grid, parallelize

            done = parallelize(model, Grid(ep=parallel_dims.ep, device_type="cpu"))
            done.fully_shard(_decoder_layers(model), gradient_divide_factor=1.0)
        return model

    def run(load_step: int) -> nn.Module:
        config = titan.hosted(job, parallelize_fn)
        config.training.steps, config.checkpoint.load_step = STEPS, load_step
        return titan.run(config)

    if job.world == 1:
        os.environ.update(rank_environment(0, 1, free_port()))
    try:
        trained = run(-1)
        # From the middle of a whole training: the rate depends on the number of its last step.
        return run(STEPS // 2) if job.case == "resume" and job.world > 1 else trained
    finally:
        if job.world == 1:
            dist.destroy_process_group()


def _decoder_layers(model: nn.Module) -> Sequence[nn.Module]:
    return next(list(m) for n, m in model.named_modules() if n.endswith("layers") and isinstance(m, nn.ModuleList))


HOSTS: dict[str, Host] = {
    "Trainer": trainer,
    "LaconicTrainer": laconic_trainer,
    "TRL SFT": sft,
    "TRL DPO": dpo,
    "Accelerate": accelerate,
    "Lightning": lightning,
    "DDP": ddp,
    "FSDP2": fsdp2,
}

if find_spec("torchtitan") is not None:  # in the environment of `make hosts`
    HOSTS["torchtitan"] = torchtitan
LEFT_OUT = {"torchtitan": ("to", "lora", "lora first", "evaluation")}
"""Cases that a host does not know."""

Cell = tuple[str, str, str]
"""Host, family, case."""


def measure(cells: Sequence[Cell], folder: Path) -> list[float | str]:
    """Run cells in one and in two processes; their numbers, or the message of the error that refuses them."""
    for world in (1, 2):
        run_ranks(_work, (world, tuple(cells), str(folder), free_port()), world)
    return json.loads((folder / "found.json").read_text())


def _work(rank: int, world: int, cells: Sequence[Cell], folder: str, port: int) -> None:
    from laconic.errors import LaconicError
    from laconic.train.launch.worker import leave

    torch.set_num_threads(1)
    if world > 1:
        os.environ.update(rank_environment(rank, world, port))
        dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    warnings.simplefilter("ignore")
    found: list[float | str] = []
    for host, family, case in cells:
        place = Path(folder) / "-".join((host, family, case)).replace(" ", "_")
        (place / f"{world}").mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        try:
            trained = weights(HOSTS[host](Job(family, case, rank, world, place / f"{world}")))
        except LaconicError as error:
            found.append(f"{type(error).__name__}: {error}")
            continue
        if world == 1:
            torch.save(trained, place / "one.pt")
            continue
        expected = torch.load(place / "one.pt")
        assert trained.keys() == expected.keys(), trained.keys() ^ expected.keys()
        if os.environ.get("SHOW") and rank == 0:
            for name in expected:
                print(name, float((trained[name] - expected[name]).abs().max()))
        worst = torch.tensor(max(float((trained[name] - expected[name]).abs().max()) for name in expected))
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        found.append(float(worst))
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    leave(0)


def table(found: dict[Cell, float | str]) -> list[str]:
    """The rows of the page's table."""
    lines = [f"| host | case | {' | '.join(FAMILIES)} |", "|" + "---|" * (2 + len(FAMILIES))]
    for host in dict.fromkeys(cell[0] for cell in found):
        for case in cases_of(host):
            cells = [found[host, family, case] for family in FAMILIES]
            shown = " | ".join(f"{cell:.0e}" if isinstance(cell, float) else "refused" for cell in cells)
            lines.append(f"| {host} | {case} | {shown} |")
    return lines


def cases_of(host: str) -> list[str]:
    return [case for case in CASES if case not in LEFT_OUT.get(host, ())]


def main(hosts: Sequence[str]) -> None:
    """Measure hosts and write their rows into the page's table."""
    found: dict[Cell, float | str] = {}
    for host in hosts:
        for family in FAMILIES:
            cells = [(host, family, case) for case in cases_of(host)]
            with tempfile.TemporaryDirectory() as folder:
                found |= zip(cells, measure(cells, Path(folder)), strict=True)
            print(host, family, [found[cell] for cell in cells], flush=True)
    page = ROOT / "docs" / "moe_hosts.md"
    before, marker, rest = page.read_text().partition("<!-- table -->\n")
    rows, _, after = rest.partition("<!-- end of table -->")
    others = [row for row in rows.split("\n")[3:] if row and row.split(" | ")[0].removeprefix("| ") not in hosts]
    head, own = table(found)[:2], table(found)[2:]
    page.write_text("\n".join([before + marker, *head, *others, *own, "", "<!-- end of table -->"]) + after)


if __name__ == "__main__":
    main(sys.argv[1:] or [*HOSTS])
