"""Data: images in memory, in an order that is a function of seed and step, or streamed and resumed exactly."""

from .config import DataConfig
from .examples import BatchSource, Examples, Picked, caption_of
from .images import DataError, ImageData, ImageSet, Progress, load_images
from .loader import Batch, BatchDraws, Batches, BatchOrder
from .stream_data import StreamData, load_stream, open_batches
from .streaming import StreamBatches
from .streams import ImageStream

__all__ = [
    "Batch",
    "BatchDraws",
    "BatchOrder",
    "BatchSource",
    "Batches",
    "DataConfig",
    "DataError",
    "Examples",
    "ImageData",
    "ImageSet",
    "ImageStream",
    "Picked",
    "Progress",
    "StreamBatches",
    "StreamData",
    "caption_of",
    "load_images",
    "load_stream",
    "open_batches",
]
