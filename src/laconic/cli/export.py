"""`laconic export`: a run's model as a directory that Hugging Face loads."""

from __future__ import annotations

from collections.abc import Sequence

from laconic.cli.arguments import Parser, add_json
from laconic.cli.output import json_only
from laconic.cli.progress import working


def run(args: Sequence[str]) -> int:
    """Run `laconic export` with `args`."""
    options = make_parser().parse_args(args)
    from laconic.train.checkpoint.export import export

    with json_only(options.json) as emit, working(f"exporting {options.run_dir}"):
        written = export(options.run_dir, options.out_dir, options.checkpoint, options.zip, options.merge)
        if options.json:
            emit({"path": written})
        else:
            print(f"wrote {written}")
    return 0


def make_parser() -> Parser:
    """Make the parser of the command's arguments."""
    parser = Parser(
        prog="laconic export",
        description="Write the model of a run as a Hugging Face directory (config.json, safetensors) that "
        "AutoModelForCausalLM.from_pretrained loads; of a run with --lora its adapters, for PeftModel.from_pretrained.",
    )
    parser.add_argument("run_dir", metavar="RUN", help="run directory")
    parser.add_argument("out_dir", metavar="DIR", help="directory to write; must not hold a model yet")
    parser.add_argument("--checkpoint", metavar="NAME", help="checkpoint inside RUN/checkpoints (default: the latest)")
    parser.add_argument("--zip", action="store_true", help="as `laconic zip` would write it; `laconic unzip` undoes it")
    parser.add_argument(
        "--merge", action="store_true", help="of a run with --lora: the whole model, with the adapters in its weights"
    )
    add_json(parser)
    return parser
