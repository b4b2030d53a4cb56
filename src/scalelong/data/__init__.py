"""Data: images in memory or in a cache on the disk, in an order that is a function of seed and step."""

from .batches import Batch, Batches, BatchOrder, Examples, ImageSet, Picked, caption_of
from .config import DataConfig, DataError, LatentConfig, TextConfig
from .dataset import ImageData, load_images
from .decode import Progress

# fmt: off
__all__ = [
    "Batch", "BatchOrder", "Batches", "DataConfig", "DataError", "Examples", "ImageData", "ImageSet", "LatentConfig",
    "Picked", "Progress", "TextConfig", "caption_of", "load_images",
]
# fmt: on
