"""What a recipe says about the frozen networks that turn captions into features and images into latents."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class TextConfig(BaseModel):
    """The `text:` block of a recipe: the encoder of the captions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    encoder: str = Field(min_length=1)
    """A text encoder that transformers can load: a folder, `owner/name` on the Hugging Face hub (`owner/name/folder`
    if it lies deeper), or `package:NAME` for one that an installed Python package carries."""
    max_length: int = Field(default=77, gt=1)
    """Tokens per caption: shorter ones are padded, longer ones cut."""


class LatentConfig(BaseModel):
    """The `latents:` block of a recipe: the autoencoder whose latents are denoised instead of pixels."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    autoencoder: str = Field(min_length=1)
    """diffusers' AutoencoderKL, named in the same ways as a text encoder."""
    scale: float = Field(default=0.23010, gt=0)
    """What latents are multiplied by, so that their spread is about 1."""
    channels: int = Field(default=4, gt=0)
    factor: int = Field(default=8, gt=0)
    """How many pixels, in each direction, become one latent."""
