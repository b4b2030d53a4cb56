"""What a recipe says about its images."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class DataConfig(BaseModel):
    """The `data:` block of a recipe: where the images come from and how they become C×H×W."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    source: str = Field(min_length=1)
    """`sklearn:digits`, a dataset on the Hugging Face hub (`owner/name`), or a local path: a parquet file, a folder of
    parquet files, or a folder of images. Relative paths start at the working directory."""
    image_size: int = Field(gt=0)
    channels: Literal[1, 3] = 3
    """3 = colour (grey images are repeated), 1 = grey (colour images lose their colour)."""
    fit: Literal["crop", "pad"] = "crop"
    """crop: the shorter side is resized to image_size and the centre kept; pad: a black frame, and no resizing."""
    flip: bool = False
    """Mirror half of the training images, drawn anew at each step."""
    image_column: str = "image"
    label_column: str | None = None
    """null = the labels, if there are any, are left out."""
    train_split: str = "train"
    heldout_split: str | None = None
    """null = the held-out images are taken out of the training split."""
    heldout_count: int = Field(default=512, gt=0)
    """How many images the held-out loss is measured on, spread evenly over their split."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of every image."""
        return self.channels, self.image_size, self.image_size
