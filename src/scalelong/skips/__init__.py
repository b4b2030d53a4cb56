"""The core: find the long skip connections of a model and scale them. Needs torch only."""

from .apply import fuse_skips, scale_skips, unscale_skips
from .block_outputs import scale_blocks, unscale_blocks
from .find import find_skips
from .methods import METHODS, SkipScaling, constant_coefficients
from .readers import AbsorbedScalingWarning, surviving_share
from .self_conditioning import condition_on_self, uncondition_on_self
from .site import Argument, Channels, Inline, SkipSite

__all__ = [
    "METHODS",
    "AbsorbedScalingWarning",
    "Argument",
    "Channels",
    "Inline",
    "SkipScaling",
    "SkipSite",
    "condition_on_self",
    "constant_coefficients",
    "find_skips",
    "fuse_skips",
    "scale_blocks",
    "scale_skips",
    "surviving_share",
    "uncondition_on_self",
    "unscale_blocks",
    "unscale_skips",
]
