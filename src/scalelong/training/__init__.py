"""The training loop and what it stands on: checkpoints that lose nothing, averaged weights, and a guard."""

from .build import RecipeSummary, build_model, build_process, recipe_summaries, summarise
from .checkpoint import Checkpoint, CheckpointError, CheckpointStore
from .config import Config
from .display import Display
from .ema import EMA
from .guard import Guard, SpikeDetector, TrainingDiverged
from .metrics import read_metrics
from .recipes import RecipeError, load_recipe, parse_recipe, recipe_names, to_yaml
from .resume import find_start
from .run import Run, RunError
from .sampling import Wish, sample_run
from .trainer import Result, Trainer, train

__all__ = [
    "EMA",
    "Checkpoint",
    "CheckpointError",
    "CheckpointStore",
    "Config",
    "Display",
    "Guard",
    "RecipeError",
    "RecipeSummary",
    "Result",
    "Run",
    "RunError",
    "SpikeDetector",
    "Trainer",
    "TrainingDiverged",
    "Wish",
    "build_model",
    "build_process",
    "find_start",
    "load_recipe",
    "parse_recipe",
    "read_metrics",
    "recipe_names",
    "recipe_summaries",
    "sample_run",
    "summarise",
    "to_yaml",
    "train",
]
