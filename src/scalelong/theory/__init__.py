"""The paper's laws, checked numerically on the UNet of Eq. 3."""

from .input_norms import InputNorms, measure_inputs
from .laws import (
    band_probability,
    feature_band,
    feature_norm,
    feature_spread,
    gradient_norm,
    input_norm,
    robustness_bound,
    robustness_order,
    sum_of_squares,
)
from .unet import TheoryUNet
from .verify import Check, Verification, verify_theory

__all__ = [
    "Check",
    "InputNorms",
    "TheoryUNet",
    "Verification",
    "band_probability",
    "feature_band",
    "feature_norm",
    "feature_spread",
    "gradient_norm",
    "input_norm",
    "measure_inputs",
    "robustness_bound",
    "robustness_order",
    "sum_of_squares",
    "verify_theory",
]
