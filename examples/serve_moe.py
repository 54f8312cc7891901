"""Serve a mixture of experts whose experts are in a process of their own, and ask it something. About 40 seconds.

    pip install 'laconic[serve]'
    python examples/serve_moe.py

The model is new, so its answer means nothing. Prints the answer, which comes in pieces, and stops the server.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM


def write_model(folder: Path) -> None:
    """A small model and a tokenizer of bytes, as Hugging Face writes them."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen3MoeConfig(
        vocab_size=258, num_experts=8, num_experts_per_tok=2, bos_token_id=256, eos_token_id=257, **shape
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    words = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


def wait_until_ready(server: subprocess.Popen[bytes], url: str) -> None:
    """Ask for its health until it answers."""
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health"):
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"the server ended with {server.returncode}")


def main() -> None:
    """Serve, ask, stop."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name))
        command = [sys.executable, "-m", "laconic", "serve", "--model", name, "--name", "tiny", "--experts", "1"]
        server = subprocess.Popen([*command, "--port", str(port)])
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(server, url)
            body = {"model": "tiny", "prompt": "Hello", "max_tokens": 12, "seed": 1, "stream": True}
            request = urllib.request.Request(
                f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request) as answer:
                for line in answer:
                    if line.startswith(b"data: {"):
                        print(repr(json.loads(line[6:])["choices"][0]["text"]))
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
