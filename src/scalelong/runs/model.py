"""The network of a run: which of its checkpoints is meant, and what is built from it."""

from __future__ import annotations

from torch import nn

from ..config.build import build_model, lay_out
from ..config.schema import Config
from ..config.sections import Weights
from ..utils.runtime import own_device
from .checkpoint import Checkpoint, CheckpointError
from .run_dir import Run, RunError, check_same_run

# The checkpoint's names for the weights.
GROUPS: dict[Weights, str] = {"ema": "ema", "raw": "model"}


def choose_checkpoint(run: Run, which: str | int = "last") -> Checkpoint:
    """The `last` checkpoint of a run, the `best` by validation loss, or that of a step; raises where there is none.

    Also where the recipe in the folder is no longer that of the checkpoint, of which it would make something else.
    """
    store = run.checkpoints()
    if not str(which).isdecimal() and which not in ("last", "best"):
        raise ValueError(f"--checkpoint is best, last, or the number of a step, not {which!r}")
    found = store.load(int(which)) if str(which).isdecimal() else store.latest() if which == "last" else store.best()
    if found is not None:
        if run.exists:
            check_same_run(run, run.config(allow_code=True), found)
        return found
    if which == "last":
        raise RunError(f"{run.folder} has no checkpoint yet")
    raise RunError(
        f"{run.folder} has no checkpoint with a validation loss, by which the best is known: use --checkpoint last, or "
        "train with training.validate_every at steps that are saved"
    )


def load_network(config: Config, checkpoint: Checkpoint, weights: Weights, *, compile: bool = False) -> nn.Module:
    """The network of a checkpoint, on this process's device and in the memory layout that it was trained in."""
    model = read_network(config, checkpoint, weights)
    lay_out(model, config.training, own_device())
    if compile:
        # For each size of batch by itself: code for any size would depend on the sizes that came before.
        model.compile(dynamic=False)
    return model


def read_network(config: Config, checkpoint: Checkpoint, weights: Weights) -> nn.Module:
    """The network of a checkpoint as it was built, in eval mode and on the CPU."""
    model = build_model(config, fresh=False)
    try:
        model.load_state_dict(checkpoint.tensors(GROUPS[weights]))
    except RuntimeError as error:
        if isinstance(error, CheckpointError):
            raise
        reason = " ".join(str(error).split())[:200]
        raise RunError(f"{checkpoint.path} holds the weights of another network than its recipe's: {reason}") from error
    return model.eval()


def weights_digest(checkpoint: Checkpoint, weights: Weights) -> str:
    """SHA-256 of the weights' file, which was compared with it when the checkpoint was opened."""
    return checkpoint.files[f"{GROUPS[weights]}.safetensors"][1]
