"""scalelong: diffusion models train stably when their long skip connections are scaled.

>>> from scalelong.models import UViT
>>> model = scale_skips(UViT(img_size=8, embed_dim=32, depth=4, num_heads=2), "cs", kappa=0.7)
"""

from .skips import (
    METHODS,
    AbsorbedScalingWarning,
    Argument,
    Channels,
    SkipScaling,
    SkipSite,
    constant_coefficients,
    find_skips,
    fuse_skips,
    scale_blocks,
    scale_skips,
    surviving_share,
    unscale_blocks,
    unscale_skips,
)

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "AbsorbedScalingWarning",
    "Argument",
    "Channels",
    "SkipScaling",
    "SkipSite",
    "__version__",
    "constant_coefficients",
    "find_skips",
    "fuse_skips",
    "scale_blocks",
    "scale_skips",
    "surviving_share",
    "unscale_blocks",
    "unscale_skips",
]
