"""`laconic generate`: greedy text from a model on attention workers and expert workers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.cli.arguments import Parser, add_json
from laconic.cli.engine_flags import add_engine_flags, serve_if_not_first, start_engine
from laconic.cli.output import json_only
from laconic.errors import ConfigError

if TYPE_CHECKING:
    from laconic.infer.tokenizer import TextTokenizer


def run(args: Sequence[str]) -> int:
    """Run `laconic generate` with `args`."""
    options = make_parser().parse_args(args)
    prompts = _prompts(options)
    from laconic.infer.tokenizer import load_text_tokenizer
    from laconic.infer.transformers_seam import check_transformers

    serve_if_not_first(options)
    check_transformers()
    with json_only(options.json) as emit:
        _generate(options, prompts, load_text_tokenizer(options.model), emit)
    return 0


def _generate(
    options: argparse.Namespace, prompts: Sequence[str], tokenizer: TextTokenizer, emit: Callable[[Any], None]
) -> None:
    from laconic.infer.tokenizer import begun_text

    if options.plan == "auto":
        _expect(options, [len(tokenizer.encode(prompt)) for prompt in prompts])
    found = []
    with start_engine(options) as engine:
        described = str(engine)
        if not options.json:
            print(f"{described}\n")
        encoded = [tokenizer.encode(prompt) for prompt in prompts]
        generations = [engine.submit(tokens, options.max_new_tokens) for tokens in encoded]
        for prompt, before, generation in zip(prompts, encoded, generations, strict=True):
            tokens, (begun, shown) = generation.result(), begun_text(tokenizer, before)
            text = tokenizer.decode([*begun, *tokens]).removeprefix(shown)
            found.append({"prompt": prompt, "text": text, "tokens": tokens})
            if not options.json:
                print(f"{prompt}{text}\n")
        if engine.split.experts and not options.json:
            a2e, e2a = engine.traffic
            print(f"to experts: {a2e}\nfrom experts: {e2a}")
    if engine.recording is not None:
        print(f"{engine.recording.trace.summary}\nwrote {options.trace}")
    if options.json:
        emit({"engine": described, "generations": found, "trace": options.trace})


def make_parser() -> Parser:
    """Make the parser of the command's arguments."""
    parser = Parser(
        prog="laconic generate",
        description="Generate greedily with a Hugging Face model whose experts are in processes of their own.",
    )
    add_engine_flags(parser, prompt="the longest prompt's", output="--max-new-tokens", requests="the number of prompts")
    parser.add_argument("--prompt", metavar="TEXT", action="append", default=[], help="a prompt; may be repeated")
    parser.add_argument("--prompts", metavar="FILE", help="text file with one prompt a line; empty lines are skipped")
    parser.add_argument("--max-new-tokens", type=int, default=32, metavar="N", help="of each prompt (default: 32)")
    parser.add_argument("--trace", metavar="FILE", help="write what ran when, for Perfetto, and print its summary")
    add_json(parser, "print prompts, texts and tokens as one JSON document")
    return parser


def _expect(options: argparse.Namespace, lengths: Sequence[int]) -> None:
    """Tell the planner what is known, unless flags say otherwise."""
    known = {"prompt": max(lengths), "output": options.max_new_tokens, "requests": len(lengths)}
    for name, value in known.items():
        if getattr(options, f"expect_{name}") is None:
            setattr(options, f"expect_{name}", value)


def _prompts(options: argparse.Namespace) -> list[str]:
    prompts: list[str] = list(options.prompt)
    if options.prompts is not None:
        try:
            # Not splitlines, which also cuts at characters that a prompt may hold, such as U+2028
            lines = Path(options.prompts).read_text(encoding="utf-8-sig").split("\n")
        except UnicodeDecodeError as error:
            raise ConfigError(f"--prompts is {options.prompts!r}, which is not UTF-8 text: {error.reason}") from None
        prompts += [line for line in lines if line.strip()]
    if not prompts:
        raise ConfigError("there is no prompt; give --prompt TEXT, or --prompts FILE with at least one line")
    return prompts
