"""`laconic export`: a run's model as a directory that Hugging Face loads."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

__all__ = ["run"]


def run(args: Sequence[str]) -> int:
    """Run `laconic export` with `args`."""
    parser = argparse.ArgumentParser(
        prog="laconic export",
        description="Write the model of a run as a Hugging Face directory (config.json, safetensors) that "
        "AutoModelForCausalLM.from_pretrained loads.",
    )
    parser.add_argument("run_dir", metavar="RUN", help="run directory")
    parser.add_argument("out_dir", metavar="DIR", help="directory to write; must not hold a model yet")
    parser.add_argument("--checkpoint", metavar="NAME", help="checkpoint inside RUN/checkpoints (default: the latest)")
    parser.add_argument("--zip", action="store_true", help="as `laconic zip` would write it; `laconic unzip` undoes it")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(args)
    from laconic.train.checkpoint.export import export

    written = export(options.run_dir, options.out_dir, options.checkpoint, options.zip)
    print(json.dumps({"path": str(written)}) if options.json else f"wrote {written}")
    return 0
