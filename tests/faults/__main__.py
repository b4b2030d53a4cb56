"""The command of the campaign: `python -m faults --seed 7`, or `--replay '7/kill run/12'` for one of its cases."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

# Read by huggingface_hub when it is first imported.
os.environ["HF_HUB_OFFLINE"] = "1"

from .campaign import PLAN, SIZES, Campaign, prepare_process, replay, table  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--size", choices=SIZES, default="sample")
    parser.add_argument("--only", action="append", choices=[planned.name for planned in PLAN], default=[])
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further case then")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--file", type=Path, help="keep the results here; the same seed goes on where it stopped")
    parser.add_argument("--replay", metavar="CASE", help="try one case again, by the name that was printed")
    asked = parser.parse_args()
    prepare_process()
    folder = Path(tempfile.mkdtemp(prefix="scalelong-faults-"))
    os.environ["SCALELONG_CACHE"] = str(folder / "cache")
    if asked.replay:
        print(*replay(asked.replay, folder, quick=asked.size == SIZES[0]), f"in {folder}", sep="\n")
        return
    print(f"seed {asked.seed}", flush=True)
    try:
        campaign = Campaign(asked.seed, SIZES.index(asked.size), folder, jobs=asked.jobs, file=asked.file)
        campaign.run(asked.only, time.monotonic() + 60 * asked.minutes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(*table(campaign.rows), sep="\n")
    found = [line for row in campaign.rows.values() for line in row.found]
    for line in found:
        print(f"wrong: {line}", file=sys.stderr)
    if found:
        sys.exit("try one again: python -m faults --replay 'SEED/FAULT/NUMBER'")


if __name__ == "__main__":
    main()
