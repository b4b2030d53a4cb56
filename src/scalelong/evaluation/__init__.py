"""How good samples are: Fréchet and kernel distance, precision and recall, on features of a named network."""

from .during_training import Evaluator
from .evaluate import Plan, evaluate_network, evaluate_run
from .feature_network import FeatureError, FeatureNetwork
from .features import load_features
from .metrics import (
    Figure,
    Moments,
    Statistics,
    frechet_distance,
    frechet_figure,
    kernel_distance,
    precision_recall,
    statistics_of,
)
from .reference import Reference, build_reference, load_reference, save_reference
from .results import Evaluation, NotComparable, compare, read_evaluations

__all__ = [
    "Evaluation",
    "Evaluator",
    "FeatureError",
    "FeatureNetwork",
    "Figure",
    "Moments",
    "NotComparable",
    "Plan",
    "Reference",
    "Statistics",
    "build_reference",
    "compare",
    "evaluate_network",
    "evaluate_run",
    "frechet_distance",
    "frechet_figure",
    "kernel_distance",
    "load_features",
    "load_reference",
    "precision_recall",
    "read_evaluations",
    "save_reference",
    "statistics_of",
]
