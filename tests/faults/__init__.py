"""Faults of every kind, by the thousand: kills, damaged files, hostile input, full disks, signals and cut power.

    python -m faults --help           from the folder `tests`; `make test-faults` runs it

Each fault is a function that tries one case, whose every choice it draws from the random numbers that it is given. So
a case is known by the campaign's seed, the fault and a number, and can be tried again alone.
"""

import sys
from pathlib import Path

# Where helpers of other tests are.
sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("", "data", "compare")]
