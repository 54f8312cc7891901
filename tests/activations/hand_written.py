"""Modules as people write them: functions where libraries have modules, attention spelled out, mixers of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, VOCABULARY = 64, 4, 97


class Norm(nn.Module):
    """Layer norm with an optional bias, as nanoGPT has it."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(WIDTH))
        self.bias = nn.Parameter(0.3 * torch.randn(WIDTH)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    """Causal attention by torch's function, or spelled out with a softmax."""

    def __init__(self, rate: float, eager: bool = False) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.resid_dropout, self.rate = nn.Dropout(rate), rate

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rate = self.rate if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.c_attn(x).split(width, dim=2)
        q, k, v = (y.view(batch, tokens, HEADS, -1).transpose(1, 2) for y in (q, k, v))
        y = self.attend(q, k, v).transpose(1, 2).contiguous().view(batch, tokens, width)
        out: Tensor = self.resid_dropout(self.c_proj(y))
        return out


class EagerAttention(Attention):
    """The same with matrix products and a softmax."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(scores.new_ones(scores.shape[-2:]).tril() == 0, float("-inf"))
        return F.dropout(F.softmax(scores, dim=-1), self.rate, self.training) @ v


class FunctionsOnly(nn.Module):
    """Gated feed-forward (kind: a function of torch, or a square) without modules for what is not linear."""

    def __init__(self, kind: str, rate: float) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.kind, self.rate = kind, rate

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.into(x).chunk(2, dim=-1)
        gate = F.relu(gate) if self.kind == "relu" else F.gelu(gate) if self.kind == "gelu" else F.silu(gate)
        return F.dropout(self.out(gate * up), self.rate, self.training)


class Plain(nn.Module):
    """nanoGPT's feed-forward block."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.c_fc, self.gelu, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.c_proj(self.gelu(self.c_fc(x))))
        return out


class Recurrent(nn.Module):
    """A gated recurrence over tokens with a decay of its own, as state-space mixers have it."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.into, self.out, self.rate = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH), rate
        self.decay = nn.Parameter(torch.linspace(-2, 2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.into(x).chunk(2, dim=-1)
        state, states = torch.zeros_like(value[:, 0]), []
        for token in range(x.shape[1]):
            state = state * torch.sigmoid(self.decay) + value[:, token]
            states.append(state)
        y = torch.stack(states, dim=1) * torch.sigmoid(gate)
        return F.dropout(self.out(y), self.rate, self.training)


class Layer(nn.Module):
    """Mixes tokens, then features."""

    def __init__(self, mixer: nn.Module, feedforward: nn.Module) -> None:
        super().__init__()
        self.ln_1, self.mixer, self.ln_2, self.mlp = Norm(), mixer, Norm(bias=True), feedforward

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class Language(nn.Module):
    """A small language model; `mixer` and `feedforward` name the modules of its two layers."""

    def __init__(self, mixer: str = "function", feedforward: str = "plain", rate: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        mixers = {"function": Attention, "eager": EagerAttention, "recurrent": Recurrent}
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.drop = nn.Dropout(rate)
        self.h = nn.ModuleList(
            Layer(mixers[mixer](rate), Plain(rate) if feedforward == "plain" else FunctionsOnly(feedforward, rate))
            for _ in range(2)
        )
        self.ln_f, self.lm_head = Norm(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.drop(self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device)))
        for layer in self.h:
            x = layer(x)
        out: Tensor = self.ln_f(x)
        return out

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.lm_head(self.hidden(ids))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
