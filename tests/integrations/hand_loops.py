"""Two programs as people keep them in one file: a GPT of 2019's parts, and one of 2025's. The structure, in own words.

`Classic` has the parts of nanoGPT, `Modern` those of nanochat; the optimizers and loops of both are in the tests.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, LENGTH = 64, 64, 4, 32


class OptionalBias(nn.Module):
    """Layer norm with or without a bias, through the function."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class FusedAttention(nn.Module):
    """One projection to query, key and value, split; torch's function; two dropouts."""

    def __init__(self, bias: bool, rate: float) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH, bias), nn.Linear(WIDTH, WIDTH, bias)
        self.out, self.rate = nn.Dropout(rate), rate

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        q, k, v = (
            y.view(rows, tokens, HEADS, width // HEADS).transpose(1, 2) for y in self.c_attn(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=None, dropout_p=self.rate if self.training else 0, is_causal=True
        )
        return self.out(self.c_proj(y.transpose(1, 2).contiguous().view(rows, tokens, width)))


class WideBlock(nn.Module):
    def __init__(self, bias: bool, rate: float) -> None:
        super().__init__()
        self.c_fc, self.gelu, self.c_proj = (
            nn.Linear(WIDTH, 4 * WIDTH, bias),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH, bias),
        )
        self.out = nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.c_proj(self.gelu(self.c_fc(x))))


class ClassicLayer(nn.Module):
    def __init__(self, bias: bool, rate: float) -> None:
        super().__init__()
        self.ln_1, self.attn = OptionalBias(bias), FusedAttention(bias, rate)
        self.ln_2, self.mlp = OptionalBias(bias), WideBlock(bias, rate)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Classic(nn.Module):
    """Learned positions, tied head, its own cross entropy; without targets the logits of the last token."""

    def __init__(self, bias: bool = False, rate: float = 0.0, layers: int = 2) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "drop": nn.Dropout(rate),
                "h": nn.ModuleList([ClassicLayer(bias, rate) for _ in range(layers)]),
                "ln_f": OptionalBias(bias),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.05)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        parts = self.transformer
        x = parts["drop"](parts["wte"](idx) + parts["wpe"](torch.arange(idx.shape[1])))
        for layer in parts["h"]:
            x = layer(x)
        x = parts["ln_f"](x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def plain_norm(x: Tensor) -> Tensor:
    """RMS norm without weight and with torch's epsilon."""
    return F.rms_norm(x, (x.size(-1),))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1).to(x.dtype)


class RotaryAttention(nn.Module):
    """Grouped heads, rotary positions, normalized query and key."""

    def __init__(self) -> None:
        super().__init__()
        self.c_q, self.c_k, self.c_v = (nn.Linear(WIDTH, n * WIDTH // HEADS, bias=False) for n in (HEADS, 2, 2))
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        q, k, v = (project(x).view(rows, tokens, -1, WIDTH // HEADS) for project in (self.c_q, self.c_k, self.c_v))
        q, k = plain_norm(rotate(q, cos, sin)), plain_norm(rotate(k, cos, sin))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(rows, tokens, -1))


class SquaredBlock(nn.Module):
    """The square of a relu."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.relu(self.c_fc(x)).square())


class ModernLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = RotaryAttention(), SquaredBlock()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(plain_norm(x), cos, sin)
        return x + self.mlp(plain_norm(x))


class Modern(nn.Module):
    """Norms without weights, an untied head, logits capped by a tanh."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(VOCABULARY, WIDTH), "h": nn.ModuleList([ModernLayer() for _ in range(layers)])}
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        angles = torch.outer(torch.arange(LENGTH).float(), 100.0 ** -torch.linspace(0, 1, WIDTH // HEADS // 2))
        self.register_buffer("cos", angles.cos()[None, :, None], persistent=False)
        self.register_buffer("sin", angles.sin()[None, :, None], persistent=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        tokens = idx.shape[1]
        x = plain_norm(self.transformer["wte"](idx))
        for layer in self.transformer["h"]:
            x = layer(x, self.cos[:, :tokens], self.sin[:, :tokens])
        logits = 15 * torch.tanh(self.lm_head(plain_norm(x)) / 15)
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().view(-1, VOCABULARY), targets.view(-1), ignore_index=-1)
