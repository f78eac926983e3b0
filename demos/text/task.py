"""English, byte by byte: a small causal transformer on the help texts that come with Python, in padded batches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import StackDataset

import edgesplit as es

PAD, SHORTEST = 0, 16  # a byte that no text holds; bytes of the shortest piece


def text(context: int = 48, pad_to: int = 0, dtype: str = "float32", lr: float = 3e-3, **sizes: Any) -> es.Task:
    """Build the task.

    Args:
        context: longest piece of text, in bytes.
        pad_to: pad every batch to at least this length; 0: to the longest piece in it.
        dtype, sizes: of the model, see :func:`transformer`.
        lr: reached after 50 steps; then it falls with the square root of the step.
    """
    return es.Task(
        model=lambda: transformer(context, **sizes).to(getattr(torch, dtype)),
        loss=lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD),
        weight=lambda target: (target != PAD).sum(),
        train=lambda shard: pieces("train", context, shard),
        test=lambda shard: pieces("test", context, shard),
        collate=lambda samples: collate(samples, pad_to),
        optimizer=lambda named: adamw(named, lr),
        lr=lambda step: min((step + 1) / 50, (50 / (step + 1)) ** 0.5),
        clip_norm=1.0,
        metrics={"token_accuracy": correct},
    )


def transformer(context: int, width: int = 32, heads: int = 2, depth: int = 2, dropout: float = 0.1) -> nn.Module:
    blocks = [(f"block{i + 1}", Block(width, heads, dropout)) for i in range(depth)]
    head = Head(OrderedDict(norm=nn.LayerNorm(width), linear=nn.Linear(width, 256)))
    return nn.Sequential(OrderedDict([("embed", Embed(width, context, dropout)), *blocks, ("head", head)]))


def adamw(named: list[tuple[str, nn.Parameter]], lr: float) -> torch.optim.Optimizer:
    """Decay weights, but neither biases nor norms."""
    groups: dict[float, list[nn.Parameter]] = {0.1: [], 0.0: []}
    for name, parameter in named:
        groups[0.0 if name.endswith("bias") or "norm" in name else 0.1].append(parameter)
    return torch.optim.AdamW([{"params": group, "weight_decay": decay} for decay, group in groups.items()], lr=lr)


class Embed(nn.Module):
    def __init__(self, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        places = torch.arange(x["tokens"].shape[1], device=x["tokens"].device)
        return {"hidden": self.dropout(self.token(x["tokens"]) + self.place(places)), "mask": x["mask"]}


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.rate, self.dropout1, self.dropout2 = dropout, nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        hidden = x["hidden"] + self.dropout1(self.attend(self.norm1(x["hidden"]), x["mask"]))
        return {"hidden": hidden + self.dropout2(self.mlp(self.norm2(hidden))), "mask": x["mask"]}

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril() & mask[:, None, None, :]
        mixed = F.scaled_dot_product_attention(q, k, v, seen, self.rate if self.training else 0.0)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Head(nn.Sequential):
    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return super().forward(x["hidden"])


def correct(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Count the bytes foretold: ``(right, all)``, without padding."""
    return ((logits.argmax(-1) == target) & (target != PAD)).sum(), (target != PAD).sum()


@cache
def cut(context: int) -> list[np.ndarray]:
    """Cut the texts, topic by topic, into pieces of at most ``context + 1`` bytes; none crosses a paragraph."""
    paragraphs = [part.split() for _, topic in sorted(topics.items()) for part in topic.split("\n\n")]
    letters = [np.frombuffer(" ".join(words).encode(), dtype=np.uint8).astype(np.int64) for words in paragraphs]
    return [row[at : at + context + 1] for row in letters for at in range(0, len(row) - SHORTEST, context)]


def pieces(part: str, context: int, shard: es.Shard) -> StackDataset:
    """Give a shard's pieces, each with itself one byte on. Every tenth is held out; devices hold different topics."""
    chosen = [torch.from_numpy(row) for i, row in enumerate(cut(context)) if (i % 10 == 0) == (part == "test")]
    bounds = np.linspace(0, len(chosen), shard.count + 1).astype(int)
    rows = chosen if shard.index < 0 else chosen[bounds[shard.index] : bounds[shard.index + 1]]
    return StackDataset([row[:-1] for row in rows], [row[1:] for row in rows])


def collate(samples: Sequence[tuple[Tensor, Tensor]], pad_to: int) -> tuple[dict[str, Tensor], Tensor]:
    """Pad: tokens and targets ``int64 [batch, length]``, and a mask that is true where a token is real."""
    short = (pad_sequence(list(rows), batch_first=True, padding_value=PAD) for rows in zip(*samples, strict=True))
    tokens, target = (F.pad(rows, (0, max(0, pad_to - rows.shape[1])), value=PAD) for rows in short)
    return {"tokens": tokens, "mask": tokens != PAD}, target
