"""The frozen networks: captions to features, images to latents and back."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .batches import to_float
from .config import LatentConfig, TextConfig
from .errors import DataError
from .pretrained import load_whole, locate, quietly

# Those that `AutoModel` would load together with what does not read text.
TEXT_PARTS = {
    "clip": "CLIPTextModel",
    "clip_text_model": "CLIPTextModel",
    "t5": "T5EncoderModel",
    "mt5": "MT5EncoderModel",
    "umt5": "UMT5EncoderModel",
}
# Decoding 256×256 pixels takes a good part of a GB per image.
DECODED_TOGETHER = 8


class TextEncoder:
    """A text encoder of transformers and its tokenizer: the last hidden state of every token.

    CLIP sees its own padding, as in Stable Diffusion and U-ViT; for others it is masked, and its features are zero.
    """

    def __init__(self, config: TextConfig, device: torch.device | str = "cpu") -> None:
        transformers = import_library("transformers", config.encoder)
        self.config, self.device = config, torch.device(device)
        folder = locate(config.encoder, "text.encoder")
        with quietly(transformers):
            kind = load_part(transformers.AutoConfig, folder).model_type
            self.tokenizer = load_part(transformers.AutoTokenizer, folder)
            # Features are padded at their end, so that a caption's first token is always the first.
            self.tokenizer.padding_side = "right"
            part = getattr(transformers, TEXT_PARTS.get(kind, "AutoModel"))
            # What pools a whole text into one vector is often left out of checkpoints, and is not used here.
            self.network = load_whole(part, folder, "text.encoder", spare="pooler").to(self.device)
        self.masked = not kind.startswith("clip")
        self._check()

    @property
    def shape(self) -> tuple[int, int]:
        """(L, D) of the features of one caption."""
        return self.config.max_length, self.network.config.hidden_size

    def encode(self, captions: Sequence[str]) -> Tensor:
        """Features of some captions, in float32. Shape: (B, L, D)."""
        length = self.config.max_length
        # What is masked need not be computed: short captions together are faster.
        padding = "longest" if self.masked else "max_length"
        tokens = self.tokenizer(
            list(captions), padding=padding, truncation=True, max_length=length, return_tensors="pt"
        ).to(self.device)
        with torch.inference_mode():
            if not self.masked:
                return self.network(input_ids=tokens["input_ids"]).last_hidden_state
            features = self.network(**tokens).last_hidden_state * tokens["attention_mask"].unsqueeze(-1)
            return F.pad(features, (0, 0, 0, length - features.shape[1]))

    def _check(self) -> None:
        longest, name = getattr(self.network.config, "max_position_embeddings", None), self.config.encoder
        if longest is not None and self.config.max_length > longest:
            raise DataError(
                f"text.max_length: {self.config.max_length} is more than the {longest} tokens {name!r} reads"
            )
        if self.tokenizer.pad_token is None:
            raise DataError(
                f"text.encoder: the tokenizer of {name!r} cannot pad; choose an encoder, such as CLIP or T5"
            )


class LatentEncoder:
    """An AutoencoderKL of diffusers."""

    def __init__(self, config: LatentConfig, device: torch.device | str = "cpu") -> None:
        diffusers = import_library("diffusers", config.autoencoder)
        self.config, self.device = config, torch.device(device)
        folder = locate(config.autoencoder, "latents.autoencoder")
        with quietly(diffusers):
            self.network = load_whole(diffusers.AutoencoderKL, folder, "latents.autoencoder").to(self.device)
        self._check()

    def encode(self, images: Tensor) -> Tensor:
        """Mean and standard deviation of the latents, unscaled. Shape: (B, 3, H, W), uint8 → (B, 2·C, h, w)."""
        with torch.inference_mode():
            posterior = self.network.encode(to_float(images.to(self.device))).latent_dist
            return torch.cat([posterior.mean, posterior.std], dim=1)

    def decode(self, latents: Tensor) -> Tensor:
        """Images between -1 and 1 from scaled latents. Shape: (B, C, h, w) → (B, 3, H, W)."""
        parts = (latents.to(self.device) / self.config.scale).split(DECODED_TOGETHER)
        with torch.inference_mode():
            return torch.cat([self.network.decode(part).sample.clamp(-1, 1) for part in parts])

    def _check(self) -> None:
        found = self.network.config
        factor = 2 ** (len(found.block_out_channels) - 1)
        for key, stated, seen in (
            ("channels", self.config.channels, found.latent_channels),
            ("factor", self.config.factor, factor),
        ):
            if stated != seen:
                raise DataError(f"latents.{key}: {self.config.autoencoder!r} has {seen}, the recipe says {stated}")


def latents_from(moments: Tensor, noise: Tensor, scale: float) -> Tensor:
    """z = (mean + std·noise)·scale. Shape: (B, 2·C, h, w), (B, C, h, w) → (B, C, h, w).

    >>> latents_from(torch.tensor([[[[3.0]], [[0.5]]]]), torch.tensor([[[[2.0]]]]), 0.25).item()
    1.0
    """
    mean, std = moments.chunk(2, dim=1)
    return (mean + std * noise) * scale


@contextmanager
def repeatable() -> Iterator[None]:
    """One thread and fixed kernels: what is computed depends neither on the number of cores nor on timings."""
    threads, cudnn = torch.get_num_threads(), torch.backends.cudnn
    torch.set_num_threads(1)
    try:
        with cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            yield
    finally:
        torch.set_num_threads(threads)


def load_part(kind: Any, folder: Path) -> Any:
    """A config or tokenizer of the text encoder."""
    try:
        return kind.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"text.encoder: {folder} has no {kind.__name__} that transformers can load: {error}") from error


def import_library(name: str, network: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"the encoder {network!r} needs {name}: pip install 'scalelong[train]'") from error
