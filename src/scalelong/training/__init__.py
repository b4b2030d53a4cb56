"""The training loop and what it stands on: checkpoints that lose nothing, averaged weights, and a guard."""
