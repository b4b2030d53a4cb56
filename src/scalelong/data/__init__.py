"""Data: images decoded once to uint8 and kept in memory, and batches whose order is a function of seed and step."""

from .config import DataConfig
from .images import DataError, ImageData, ImageSet, Progress, load_images
from .loader import Batch, Batches, BatchOrder, keyed_generator

__all__ = [
    "Batch",
    "BatchOrder",
    "Batches",
    "DataConfig",
    "DataError",
    "ImageData",
    "ImageSet",
    "Progress",
    "keyed_generator",
    "load_images",
]
