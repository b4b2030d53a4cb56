"""scalelong: diffusion models train stably when their long skip connections are scaled.

>>> from scalelong import scale_skips
>>> from scalelong.models import UViT
>>> model = scale_skips(UViT(img_size=8, embed_dim=32, depth=4, num_heads=2), "cs", kappa=0.7)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compare.any_loop import find_edge
    from .guard import SeatBelt
    from .skips import (
        METHODS,
        AbsorbedScalingWarning,
        Argument,
        Channels,
        Inline,
        SkipScaling,
        SkipSite,
        condition_on_self,
        constant_coefficients,
        find_skips,
        fuse_skips,
        scale_blocks,
        scale_skips,
        surviving_share,
        uncondition_on_self,
        unscale_blocks,
        unscale_skips,
    )
    from .skips.pretrained import from_pretrained, save_pretrained

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "AbsorbedScalingWarning",
    "Argument",
    "Channels",
    "Inline",
    "SeatBelt",
    "SkipScaling",
    "SkipSite",
    "__version__",
    "condition_on_self",
    "constant_coefficients",
    "find_edge",
    "find_skips",
    "from_pretrained",
    "fuse_skips",
    "save_pretrained",
    "scale_blocks",
    "scale_skips",
    "surviving_share",
    "uncondition_on_self",
    "unscale_blocks",
    "unscale_skips",
]


# What is not of `.skips`, and needs more than torch.
LAZY = {
    "SeatBelt": ".guard",
    "find_edge": ".compare.any_loop",
    "from_pretrained": ".skips.pretrained",
    "save_pretrained": ".skips.pretrained",
}


def __getattr__(name: str) -> Any:
    """Imported when asked for: torch takes a second, in which Ctrl-C could not yet end a command in one line."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(LAZY.get(name, ".skips"), __name__), name)
    except ModuleNotFoundError as error:
        raise ImportError(f'{name} needs {error.name}: pip install "scalelong[train]"') from error
