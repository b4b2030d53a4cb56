"""Networks that know nothing of scaling: U-ViT, the UNet of Eq. 3, and the presets of the paper's settings."""

from .presets import Preset, example_inputs, preset, preset_names
from .theory_unet import TheoryUNet
from .uvit import UViT

__all__ = ["Preset", "TheoryUNet", "UViT", "example_inputs", "preset", "preset_names"]
