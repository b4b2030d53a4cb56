"""Try scaling on public networks that others wrote, each against an oracle of its own, and write the table of the docs.

python tools/try_real_models.py --repos DIR                   # every network of tools/real_models/networks.yaml
python tools/try_real_models.py --repos DIR --only UViT edm   # those whose name or repository contains one of these
python tools/try_real_models.py --repos DIR --write           # also write the table of docs/models.md, and results.json

DIR holds checkouts that you made, as `owner+name`, `owner/name` or `name`, at the commits of the list; `pypi:` networks
come from installed packages. None of their code is part of this project. What is not there is marked and not counted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from real_models.load import folder_of  # noqa: E402

NETWORKS = ROOT / "tools" / "real_models" / "networks.yaml"
RESULTS = ROOT / "tools" / "real_models" / "results.json"
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- real models -->", "<!-- end of real models -->"
SECONDS = 900

Entry = dict[str, Any]


def main() -> None:
    options = arguments()
    entries = chosen(yaml.safe_load(options.networks.read_text()), options.only)
    outcomes: list[Entry] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(lambda entry: outcome_of(entry, options.repos, options.check), entries):
            outcomes.append(outcome)
            print(row(outcome), flush=True)
    print(summary(outcomes))
    if options.results is not None or options.write:
        (options.results or RESULTS).write_text(json.dumps(outcomes, indent=1, ensure_ascii=False) + "\n")
    if options.write:
        write_page(PAGE, outcomes)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--repos", type=Path, metavar="DIR", help="the folder of your checkouts; packages from PyPI need none")
    add("--only", nargs="*", default=[], metavar="NAME", help="only networks with this in their name or repository")
    add("--networks", type=Path, default=NETWORKS, metavar="YAML", help="the list of networks")
    add("--results", type=Path, metavar="JSON", help="write the results to this file")
    add("--write", action="store_true", help="write the table of docs/models.md, and the results beside the list")
    add("--check", action="store_true", help="only build the networks and check the joins of the list")
    add("--jobs", type=int, default=1, metavar="N", help="networks tried at a time")
    return parser.parse_args()


def chosen(entries: list[Entry], only: list[str]) -> list[Entry]:
    texts = [f"{entry['name']} {entry['repository']}".lower() for entry in entries]
    wanted = [not only or any(part.lower() in text for part in only) for text in texts]
    return [entry for entry, take in zip(entries, wanted, strict=True) if take]


def outcome_of(entry: Entry, repos: Path | None, check: bool = False) -> Entry:
    """What became of the network, tried in a process of its own: checkouts share names such as `models`."""
    known = {key: entry[key] for key in ("name", "repository", "commit", "heldout", "first", "note") if key in entry}
    if (why := cannot_be_had(entry, repos)) is not None:
        return known | {"verdict": "not had", "reason": why}
    request = {"entry": entry, "repos": None if repos is None else str(repos.resolve()), "check": check}
    command = [sys.executable, "-m", "real_models.trial"]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": SECONDS, "cwd": ROOT / "tools"}
    try:
        done = subprocess.run(command, input=json.dumps(request), **options)
        outcome = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return known | {"verdict": "broken", "reason": f"not done after {SECONDS} s"}
    except json.JSONDecodeError:
        return known | {"verdict": "broken", "reason": done.stderr[-300:]}
    if outcome["verdict"] == "refused" and "refusal" in entry:
        outcome |= {"verdict": "rightly refused", "said": outcome["reason"], "reason": entry["refusal"]}
    return known | outcome


def cannot_be_had(entry: Entry, repos: Path | None) -> str | None:
    """Why the network is not here, in the version of the list; None if it is."""
    source, wanted = entry["repository"], str(entry["commit"])
    if source.startswith("pypi:"):
        try:
            found = version(source.removeprefix("pypi:"))
        except PackageNotFoundError:
            return "not installed"
        return None if found == wanted else f"version {found} is installed, not {wanted}"
    folder = None if repos is None else folder_of(source, repos)
    if folder is None:
        return "no checkout"
    git = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return None if head == wanted else f"the checkout is at {head[:10] or 'no commit'}, not {wanted[:10]}"


def row(outcome: Entry) -> str:
    """The network's line of the table."""
    source, commit = outcome["repository"], str(outcome["commit"])
    where = f"{source.removeprefix('pypi:')} {commit}" if source.startswith("pypi:") else f"{source} @ {commit[:7]}"
    cells = [outcome["name"] + (" ¹" if "heldout" in outcome else ""), where, found(outcome), result(outcome)]
    folds = outcome.get("folds", "")
    return f"| {' | '.join([*cells, 'no' if folds.startswith('no') else folds])} |"


def found(outcome: Entry) -> str:
    if not outcome.get("expected"):
        return "none" if "expected" in outcome else ""
    how = f", {outcome['how']}" if outcome["found"] else ""
    return f"{outcome['found']} of {outcome['expected']}{how}"


def result(outcome: Entry) -> str:
    verdict = outcome["verdict"]
    if verdict == "right":
        return "right, to the bit" if all(outcome["exact"].values()) else "right"
    return f"{verdict}: {' '.join(outcome['reason'].split())[:200]}" if outcome.get("reason") else verdict


def summary(outcomes: list[Entry]) -> str:
    counts = Counter(outcome["verdict"] for outcome in outcomes)
    tried = len(outcomes) - counts["not had"]
    return f"{tried} tried: " + ", ".join(f"{number} {verdict}" for verdict, number in counts.most_common())


def write_page(page: Path, outcomes: list[Entry]) -> None:
    """Put the table between its comments in the page."""
    before, rest = page.read_text().split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n\n{table(outcomes)}\n\n{END}{after}")


def table(outcomes: list[Entry]) -> str:
    head = ["| network | version | skips found | result | a constant folds |", "| --- | --- | --- | --- | --- |"]
    held = [outcome for outcome in outcomes if "heldout" in outcome]
    first = Counter(outcome.get("first", "not recorded") for outcome in held)
    parts = [f"{summary(outcomes)}.", "\n".join([*head, *map(row, outcomes)])]
    if held:
        told = ", ".join(f"{number} {verdict}" for verdict, number in first.most_common())
        parts.append(f"¹ Held out: written down before it was tried. The first results of these {len(held)}: {told}.")
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
