"""The paper's laws (`theory.laws`), checked numerically on the UNet of Eq. 3."""

from .input_norms import InputNorms, measure_inputs
from .unet import TheoryUNet
from .verify import verify_theory

__all__ = ["InputNorms", "TheoryUNet", "measure_inputs", "verify_theory"]
