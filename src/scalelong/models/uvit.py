"""U-ViT: a vision transformer with the long skip connections of a UNet.

Modules carry the names of the public U-ViT checkpoints, so that those load with `strict=True`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def timestep_embedding(timesteps: Tensor, dim: int, *, max_period: float = 10_000.0) -> Tensor:
    """Cosines, then sines, of t·max_period^(−j/half), j < half = dim // 2. Shape: (B,) → (B, dim), in float32.

    >>> timestep_embedding(torch.zeros(1), 4).tolist()
    [[1.0, 1.0, 0.0, 0.0]]
    """
    half = dim // 2
    exponents = torch.arange(half, dtype=torch.float32, device=timesteps.device) / half
    angles = timesteps.float().unsqueeze(1) * torch.exp(-math.log(max_period) * exponents)
    return F.pad(torch.cat([angles.cos(), angles.sin()], dim=1), (0, dim % 2))


class PatchEmbed(nn.Module):
    """One token for each patch, row by row. Shape: (B, C, H, W) → (B, H·W/p², D)."""

    def __init__(self, in_chans: int, embed_dim: int, patch_size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head self-attention; with `qk_norm`, of queries and keys that a LayerNorm per head keeps at unit variance.

    Shape: (B, L, D) → (B, L, D).
    """

    def __init__(self, dim: int, num_heads: int, *, qkv_bias: bool = False, qk_norm: bool = False) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(dim // num_heads) if qk_norm else None
        self.k_norm = nn.LayerNorm(dim // num_heads) if qk_norm else None
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        # sdpa reads strided heads and lays its output out as (B, L, H, d): between the projections all is views.
        heads = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        if self.q_norm is not None and self.k_norm is not None:
            query, key, value = heads
            # Autocast normalises in float32, which the product is not to be computed in.
            heads = torch.stack([self.q_norm(query).to(value.dtype), self.k_norm(key).to(value.dtype), value])
        return self.proj(attend(heads).transpose(1, 2).flatten(2))


SHORT = 128
"""Tokens up to which a CPU is faster without torch's fused kernel."""


def attend(heads: Tensor) -> Tensor:
    """softmax(q·kᵀ/√d)·v. Shape: (3, B, H, L, d) → (B, H, L, d)."""
    # On a CPU the fused kernel takes many small products one by one, and in bf16 its backward pass two to seven times
    # as long as this. The scores are rounded to bf16 either way; autocast would copy them to float32 for the softmax.
    if heads.is_cpu and (heads.dtype is torch.bfloat16 or heads.shape[-2] <= SHORT):
        query, key, value = heads.contiguous()
        with torch.autocast("cpu", enabled=False):
            scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
            return scores.softmax(dim=-1) @ value
    query, key, value = heads
    return F.scaled_dot_product_attention(query, key, value)


class MLP(nn.Module):
    """Two linear layers with a GELU between them. Shape: (B, L, D) → (B, L, D)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


def balance_factors(balance: float) -> tuple[float, float]:
    """The factors of trunk and skip in EDM2's concatenation of equal widths, which keeps their common magnitude.

    >>> balance_factors(0.5)
    (1.0, 1.0)
    """
    size = math.sqrt(2 / ((1 - balance) ** 2 + balance**2))
    return size * (1 - balance), size * balance


class Block(nn.Module):
    """Pre-norm transformer block; with `skip=True` a linear layer first joins a long skip.

    `skip_norm` puts a LayerNorm before that layer, `concat_balance` is the skip's share of what it reads.
    Shape: x (B, L, D), skip (B, L, D) → (B, L, D).
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        mlp_ratio: float,
        qkv_bias: bool,
        skip: bool = False,
        qk_norm: bool = False,
        skip_norm: bool = False,
        concat_balance: float = 0.5,
    ) -> None:
        super().__init__()
        self.concat_balance = concat_balance
        self.skip_norm = nn.LayerNorm(2 * dim) if skip and skip_norm else None
        self.skip_linear = nn.Linear(2 * dim, dim) if skip else None
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, num_heads, qkv_bias=qkv_bias, qk_norm=qk_norm)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = MLP(dim, int(dim * mlp_ratio))

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        if self.skip_linear is not None:
            if skip is None:
                raise ValueError("this block joins a long skip connection and got none: call it as block(x, skip)")
            x = self.skip_linear(self.join(x, skip))
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    def join(self, x: Tensor, skip: Tensor) -> Tensor:
        """What the linear layer reads. Shape: x (B, L, D), skip (B, L, D) → (B, L, 2·D)."""
        if self.concat_balance != 0.5:
            trunk, share = balance_factors(self.concat_balance)
            x, skip = x * trunk, skip * share
        joined = torch.cat([x, skip], dim=-1)
        return joined if self.skip_norm is None else self.skip_norm(joined)


class UViT(nn.Module):
    """Noise predictor: depth/2 blocks in, one in the middle, depth/2 blocks out, each joined to its twin by a skip.

    `img_size` (a number or (height, width)) is the training size; other sizes interpolate the position embeddings.
    `num_classes > 0` asks for labels `y`; `clip_dim` and `num_clip_token` ask for text features `context`.
    `init_std` is the standard deviation of the linear layers' weights at the start.
    `qk_norm` normalises queries and keys, `skip_norm` trunk and skip where they are joined (as Hunyuan-DiT does), and
    `concat_balance` weighs them there as EDM2 does; with their defaults the network is the public one.
    Shape: x (B, C, H, W), timesteps (B,), y (B,), context (B, num_clip_token, clip_dim) → (B, C, H, W).

    >>> model = UViT(8, 2, embed_dim=16, depth=4, num_heads=2)
    >>> model(torch.zeros(1, 3, 8, 8), torch.tensor([500.0])).shape
    torch.Size([1, 3, 8, 8])
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 32,
        patch_size: int = 2,
        *,
        in_chans: int = 3,
        embed_dim: int = 512,
        depth: int = 12,
        num_heads: int = 8,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = False,
        mlp_time_embed: bool = False,
        num_classes: int = -1,
        conv: bool = True,
        use_checkpoint: bool = False,
        clip_dim: int | None = None,
        num_clip_token: int | None = None,
        init_std: float = 0.02,
        qk_norm: bool = False,
        skip_norm: bool = False,
        concat_balance: float = 0.5,
    ) -> None:
        super().__init__()
        _check_architecture(embed_dim, depth, num_heads, clip_dim, num_clip_token)
        if not 0 < concat_balance < 1:
            raise ValueError(f"concat_balance is the skip's share of the join, between 0 and 1, got {concat_balance}")
        height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
        self.patch_size = patch_size
        self.in_chans = in_chans
        self.embed_dim = embed_dim
        self.use_checkpoint = use_checkpoint
        self.context_shape = None if clip_dim is None or num_clip_token is None else (num_clip_token, clip_dim)
        self.grid = self._grid_of(height, width)
        self.num_patches = self.grid[0] * self.grid[1]
        self.extras = 1 + (num_classes > 0) + (num_clip_token or 0)
        self.num_tokens = self.extras + self.num_patches

        self.time_embed = nn.Identity()
        if mlp_time_embed:
            wide = 4 * embed_dim
            self.time_embed = nn.Sequential(nn.Linear(embed_dim, wide), nn.SiLU(), nn.Linear(wide, embed_dim))
        self.label_emb = nn.Embedding(num_classes, embed_dim) if num_classes > 0 else None
        self.context_embed = nn.Linear(clip_dim, embed_dim) if clip_dim is not None else None
        self.patch_embed = PatchEmbed(in_chans, embed_dim, patch_size)
        self.pos_embed = nn.Parameter(torch.empty(1, self.num_tokens, embed_dim))

        options: dict[str, Any] = {"mlp_ratio": mlp_ratio, "qkv_bias": qkv_bias, "qk_norm": qk_norm}
        block = partial(Block, embed_dim, num_heads, **options)
        join = partial(block, skip=True, skip_norm=skip_norm, concat_balance=concat_balance)
        self.in_blocks = nn.ModuleList(block() for _ in range(depth // 2))
        self.mid_block = block()
        self.out_blocks = nn.ModuleList(join() for _ in range(depth // 2))
        self.norm = nn.LayerNorm(embed_dim)
        self.decoder_pred = nn.Linear(embed_dim, patch_size**2 * in_chans)
        self.final_layer = nn.Conv2d(in_chans, in_chans, kernel_size=3, padding=1) if conv else nn.Identity()
        self._initialise(init_std)

    def forward(self, x: Tensor, timesteps: Tensor, y: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        self._check_inputs(x, timesteps, y, context)
        grid = self._grid_of(x.shape[-2], x.shape[-1])
        tokens = self._embed(x, timesteps, y, context) + self._positions(grid)

        skips = []
        for block in self.in_blocks:
            tokens = self._run(block, tokens)
            skips.append(tokens)
        tokens = self._run(self.mid_block, tokens)
        for block in self.out_blocks:
            tokens = self._run(block, tokens, skips.pop())

        pixels = self.decoder_pred(self.norm(tokens))[:, self.extras :]
        return self.final_layer(self._unpatchify(pixels, grid))

    def _run(self, block: nn.Module, *inputs: Tensor) -> Tensor:
        """Call the block itself, so that its hooks fire when activations are recomputed too."""
        if self.use_checkpoint and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False)
        return block(*inputs)

    def _embed(self, x: Tensor, timesteps: Tensor, y: Tensor | None, context: Tensor | None) -> Tensor:
        """The sequence of the public checkpoints: label, time, text, patches. Shape: (B, extras + patches, D)."""
        # The dtype of the parameters, not of the patches: under autocast that is a half, which would round the time.
        time = timestep_embedding(timesteps, self.embed_dim).to(self.pos_embed.dtype)
        sequence = [self.time_embed(time).unsqueeze(1)]
        if self.label_emb is not None and y is not None:
            sequence.insert(0, self.label_emb(y).unsqueeze(1))
        if self.context_embed is not None and context is not None:
            sequence.append(self.context_embed(context))
        return torch.cat([*sequence, self.patch_embed(x)], dim=1)

    def _positions(self, grid: tuple[int, int]) -> Tensor:
        """Position embeddings, those of the patches resized to the grid. Shape: (1, extras + patches, D)."""
        if grid == self.grid:
            return self.pos_embed
        extras, patches = self.pos_embed.split([self.extras, self.num_patches], dim=1)
        image = patches.transpose(1, 2).unflatten(2, self.grid).float()
        resized = F.interpolate(image, size=grid, mode="bicubic", align_corners=False, antialias=False)
        return torch.cat([extras, resized.flatten(2).transpose(1, 2).to(extras.dtype)], dim=1)

    def _unpatchify(self, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
        """Put patches back into an image, channels varying fastest. Shape: (B, h·w, p·p·C) → (B, C, h·p, w·p)."""
        patches = pixels.unflatten(2, (self.patch_size, self.patch_size, self.in_chans)).unflatten(1, grid)
        return patches.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)

    def _grid_of(self, height: int, width: int) -> tuple[int, int]:
        if height % self.patch_size or width % self.patch_size:
            raise ValueError(
                f"an image of {height}×{width} cannot be cut into patches of {self.patch_size}×{self.patch_size}. "
                f"Crop or resize it so that both sides are multiples of {self.patch_size}."
            )
        return height // self.patch_size, width // self.patch_size

    def _check_inputs(self, x: Tensor, timesteps: Tensor, y: Tensor | None, context: Tensor | None) -> None:
        if x.ndim != 4 or x.shape[1] != self.in_chans:
            raise ValueError(f"x must have shape (batch, {self.in_chans}, height, width), got {tuple(x.shape)}")
        batch = x.shape[0]
        if timesteps.shape != (batch,):
            raise ValueError(
                f"timesteps must have shape ({batch},), one per image, got {tuple(timesteps.shape)}. "
                "Use timesteps.expand(batch) if all images share one."
            )
        _check_condition("y", y, None if self.label_emb is None else (batch,), option="num_classes=")
        expected = None if self.context_shape is None else (batch, *self.context_shape)
        _check_condition("context", context, expected, option="clip_dim= and num_clip_token=")

    def _initialise(self, std: float) -> None:
        # Labels and convolutions keep torch's own initialisation, as in the public training code.
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)


def _check_architecture(
    embed_dim: int, depth: int, num_heads: int, clip_dim: int | None, num_clip_token: int | None
) -> None:
    if embed_dim % num_heads:
        raise ValueError(f"embed_dim must be a multiple of num_heads, got embed_dim={embed_dim}, num_heads={num_heads}")
    if depth < 2 or depth % 2:
        raise ValueError(
            f"depth counts the blocks on both sides of the middle one and must be even and at least 2, got {depth}"
        )
    if (clip_dim is None) != (num_clip_token is None):
        raise ValueError(
            "text conditioning needs both clip_dim and num_clip_token, "
            f"got clip_dim={clip_dim}, num_clip_token={num_clip_token}"
        )


def _check_condition(name: str, value: Tensor | None, expected: tuple[int, ...] | None, *, option: str) -> None:
    """A condition must be given exactly when the model was built for it, in the expected shape."""
    if expected is None and value is not None:
        raise ValueError(f"this UViT takes no {name}: build it with {option}, or call it without {name}")
    if expected is not None and value is None:
        raise ValueError(f"this UViT was built with {option} and needs {name}, a tensor of shape {expected}")
    if expected is not None and value is not None and value.shape != expected:
        raise ValueError(f"{name} must have shape {expected}, got {tuple(value.shape)}")
