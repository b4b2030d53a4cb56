"""The paper's laws, checked numerically on the UNet of Eq. 3."""

from .unet import TheoryUNet

__all__ = ["TheoryUNet"]
