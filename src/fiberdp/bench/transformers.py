"""Three transformers of the sizes that private fine-tuning meets.

Positions and the class token are embeddings looked up for every example: as bare parameters of a module they would reach no layer, and
neither Opacus's hooks nor a layer-wise engine could say what one example contributes to them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Self-attention, [b, T, d] to [b, T, d]."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query_key_value(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a feed-forward part, each with its LayerNorm before it (ViT, GPT-2) or, with post=True, after it (RoBERTa)."""

    def __init__(self, width: int, heads: int, *, causal: bool = False, post: bool = False) -> None:
        super().__init__()
        self.post = post
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, causal=causal)
        self.norm2, self.feed = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            x = self.norm1(x + self.attention(x))
            return self.norm2(x + self.feed(x))
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Positions(nn.Module):
    """x [b, T, d] plus one learned vector a position."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(length, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.embedding(torch.arange(x.shape[1], device=x.device).repeat(x.shape[0], 1))  # Opacus needs it contiguous


class ViT(nn.Module):
    """Images [b, 3, size, size] to logits, from the class token."""

    def __init__(self, size: int, patch: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Embedding(1, width)
        self.positions = Positions((size // patch) ** 2 + 1, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        token = self.token(torch.zeros(len(images), 1, dtype=torch.int64, device=images.device))
        return self.head(self.norm(self.blocks(self.positions(torch.cat([token, patches], 1))))[:, 0])


class Encoder(nn.Module):
    """Tokens [b, T] to the logits of two classes, from the first token."""

    def __init__(self, vocabulary: int, length: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.words, self.positions, self.norm = nn.Embedding(vocabulary, width), Positions(length, width), nn.LayerNorm(width)
        self.blocks = nn.Sequential(*(Block(width, heads, post=True) for _ in range(depth)))
        self.head = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.norm(self.positions(self.words(tokens))))[:, 0])


class Decoder(nn.Module):
    """Tokens [b, T] to the logits of each next token; the head is the word embedding, tied."""

    def __init__(self, vocabulary: int, length: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), Positions(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.words.weight, std=0.02)  # torch's own, of std 1, is no start for a head
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.positions(self.words(tokens)))))


def vit(size: int = 32, patch: int = 4, width: int = 192, depth: int = 12, heads: int = 3) -> nn.Module:
    return ViT(size, patch, width, depth, heads)


def roberta_like(vocabulary: int = 50265, length: int = 128, width: int = 768, depth: int = 4, heads: int = 12) -> nn.Module:
    return Encoder(vocabulary, length, width, depth, heads)


def gpt2_like(vocabulary: int = 50257, length: int = 128, width: int = 768, depth: int = 4, heads: int = 12) -> nn.Module:
    return Decoder(vocabulary, length, width, depth, heads)
