"""Networks that know nothing of scaling: U-ViT and the presets of the paper's settings."""

from .presets import Preset, example_inputs, preset, preset_names
from .uvit import UViT

__all__ = ["Preset", "UViT", "example_inputs", "preset", "preset_names"]
