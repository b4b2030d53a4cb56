"""What a recipe says about its images and the frozen networks that encode them, and the error where it is not so."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError


class DataError(ValueError):
    """The data is not there, or not as the recipe says."""


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def check_box(box: list[int]) -> list[int]:
    if len(box) != 4 or not (0 <= box[0] < box[2] and 0 <= box[1] < box[3]):
        raise PydanticCustomError(
            "box", "must be [left, top, right, bottom] with 0 ≤ left < right and 0 ≤ top < bottom"
        )
    return box


Box = Annotated[list[int], AfterValidator(check_box)]


class DataConfig(BaseModel):
    """The `data:` block of a recipe: where the images come from and how they become C×H×W."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    source: str = Field(min_length=1)
    """`sklearn:digits`, a dataset on the Hugging Face hub (`owner/name`), or a local path: a parquet file, a webdataset
    tar, a zip of images, a pattern such as `shards/*.tar`, or a folder of parquet files, of tars or of images. Folders
    of images inside a folder or a zip are classes. Relative paths start at the working directory."""
    config: str | None = Field(default=None, min_length=1)
    """Which configuration of a set on the hub, or of a folder whose README.md declares some; null = the only one, or
    the one that is called `default`."""
    image_size: int = Field(gt=0, le=65_536)
    channels: Literal[1, 3] = 3
    """3 = colour (grey images are repeated), 1 = grey (colour images lose their colour)."""
    box: Box | None = None
    """[left, top, right, bottom] in pixels: what is cut out of each upright image before it is fitted; null = nothing
    is cut. An image that does not contain it is an error."""
    fit: Literal["crop", "pad"] = "crop"
    """crop: the shorter side is resized to image_size and the centre kept; pad: a black frame, and no resizing."""
    flip: bool = False
    """Mirror half of the training images, chosen anew at each step."""
    image_column: str = "image"
    allow_paths: bool = False
    """Whether rows of a table may name files of this machine as their images, instead of holding the bytes: who wrote
    the table then says which files are read."""
    label_column: str | None = None
    """null = the labels, if there are any, are left out."""
    caption_column: str | None = None
    """A text in each row, or several, of which one is chosen at each step; null = no captions."""
    train_split: str = "train"
    validation_split: str | None = None
    """null = the validation images are taken out of the training split."""
    validation_count: int = Field(default=512, gt=0)
    """How many images the validation loss is measured on, spread evenly over their split."""
    memory_gb: float | None = Field(default=None, ge=0)
    """How large the decoded images may be to be held in memory; larger sets are decoded once into the image cache, a
    folder on the disk. null = half of the memory that is free, shared by the processes of the machine; 0 = always the
    cache."""
    workers: int = Field(default=4, gt=0, le=1024)
    """Threads that decode; the images and their order do not depend on it."""

    prepared: str | None = Field(default=None, min_length=1)
    """The folder that `scalelong prepare` fills with latents and text features; null = `prepared/<recipe>-<hash>` in
    the working directory, where the hash is that of everything the files depend on."""


class TextConfig(BaseModel):
    """The `text:` block of a recipe: the encoder of the captions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    encoder: str = Field(min_length=1)
    """A text encoder that transformers can load: a folder, `owner/name` on the Hugging Face hub (`owner/name/folder`
    if it lies deeper), or `package:NAME` for one that an installed Python package carries."""
    max_length: int = Field(default=77, gt=1, le=65_536)
    """Tokens per caption: shorter ones are padded, longer ones cut."""


class LatentConfig(BaseModel):
    """The `latents:` block of a recipe: the autoencoder whose latents are denoised instead of pixels."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    autoencoder: str = Field(min_length=1)
    """diffusers' AutoencoderKL, named in the same ways as a text encoder."""
    scale: float = Field(default=0.23010, gt=0)
    """What latents are multiplied by, so that their spread is about 1."""
    channels: int = Field(default=4, gt=0, le=65_536)
    factor: int = Field(default=8, gt=0)
    """How many pixels, in each direction, become one latent."""
