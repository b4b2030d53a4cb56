"""How good drawn images are: Fréchet and kernel distance, precision and recall, on features of a named network."""

from .evaluate import Plan, evaluate_network, evaluate_run
from .feature_network import FeatureError, FeatureNetwork
from .features import load_features
from .metrics import Figure, frechet_distance, frechet_figure, kernel_distance, precision_recall
from .periodic import Evaluator
from .references import build_reference
from .results import Evaluation, NotComparable, compare, read_evaluations
from .statistics import Moments, Reference, Statistics, load_reference, save_reference, statistics_of

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
