"""How good samples are: Fréchet and kernel distance, precision and recall, on features of a named network."""

from .evaluate import Evaluator, Plan, evaluate_network, evaluate_run
from .features import FeatureNetwork
from .metrics import Figure
from .networks import load_features
from .reference import Reference, build_reference, load_reference
from .results import Evaluation, NotComparable, compare, read_evaluations

__all__ = [
    "Evaluation",
    "Evaluator",
    "FeatureNetwork",
    "Figure",
    "NotComparable",
    "Plan",
    "Reference",
    "build_reference",
    "compare",
    "evaluate_network",
    "evaluate_run",
    "load_features",
    "load_reference",
    "read_evaluations",
]
