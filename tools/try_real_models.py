"""Try scaling on public networks that others wrote, each against an oracle of its own, and write the table of the docs.

python tools/try_real_models.py --repos DIR                     # every network of tools/real_models/networks.yaml
python tools/try_real_models.py --repos DIR --only UViT EDM     # those whose name or repository contains one of these
python tools/try_real_models.py --repos DIR --write             # and write docs/models.md and a JSON of the results

DIR holds checkouts that you made, as `owner+name`, `owner/name` or `name`. None of their code is part of this project.
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
TIMEOUT = 300


def main() -> None:
    options = arguments()
    entries = chosen(yaml.safe_load(options.networks.read_text()), options.only)
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = []
        for outcome in pool.map(lambda entry: outcome_of(entry, options.repos, options.check), entries):
            print(row(outcome), flush=True)
            outcomes.append(outcome)
    print(summary(outcomes))
    if options.results is not None or options.write:
        (options.results or RESULTS).write_text(json.dumps(outcomes, indent=1, ensure_ascii=False) + "\n")
    if options.write:
        write_page(PAGE, outcomes)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repos", type=Path, help="the folder of your checkouts; packages from PyPI need none")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="NAME", help="only networks with this in their name or repository"
    )
    parser.add_argument("--networks", type=Path, default=NETWORKS, help="the list of networks")
    parser.add_argument("--results", type=Path, help="write the results as JSON to this file")
    parser.add_argument(
        "--write", action="store_true", help="write the table of docs/models.md, and the JSON beside the list"
    )
    parser.add_argument("--check", action="store_true", help="only build the networks and check the joins of the list")
    parser.add_argument("--jobs", type=int, default=1, help="networks tried at a time")
    return parser.parse_args()


def chosen(entries: list[dict[str, Any]], only: list[str]) -> list[dict[str, Any]]:
    if not only:
        return entries
    texts = [(entry, f"{entry['name']} {entry['repository']}".lower()) for entry in entries]
    return [entry for entry, text in texts if any(part.lower() in text for part in only)]


def outcome_of(entry: dict[str, Any], repos: Path | None, check: bool = False) -> dict[str, Any]:
    """What became of the network, tried in a process of its own: checkouts share names such as `models`."""
    if (why := cannot_be_had(entry, repos)) is not None:
        return {
            "name": entry["name"],
            "repository": entry["repository"],
            "verdict": "not had",
            "reason": why,
        } | held_out(entry)
    request = json.dumps({"entry": entry, "repos": None if repos is None else str(repos), "check": check})
    command = [sys.executable, "-m", "real_models.trial"]
    try:
        done = subprocess.run(
            command, input=request, capture_output=True, text=True, timeout=TIMEOUT, cwd=ROOT / "tools"
        )
        outcome = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        reason = "took too long" if isinstance(error, subprocess.TimeoutExpired) else f"ended: {done.stderr[-300:]}"
        outcome = {"name": entry["name"], "repository": entry["repository"], "verdict": "broken", "reason": reason}
    if outcome["verdict"] == "refused" and "refusal" in entry:
        outcome["verdict"] = "rightly refused"
    return outcome | held_out(entry)


def held_out(entry: dict[str, Any]) -> dict[str, Any]:
    return {"heldout": entry["heldout"]} if "heldout" in entry else {}


def cannot_be_had(entry: dict[str, Any], repos: Path | None) -> str | None:
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
    head = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    return None if head == wanted else f"the checkout is at {head[:10] or 'no commit'}, not {wanted[:10]}"


def row(outcome: dict[str, Any]) -> str:
    """The network's line of the table."""
    name = outcome["name"] + (" ¹" if "heldout" in outcome else "")
    found = f"{outcome.get('found', 0)} of {outcome.get('expected', '?')}"
    exact = outcome.get("exact", {})
    bits = "to the bit" if outcome["verdict"] == "right" and all(exact.values()) else ""
    return f"| {name} | {outcome['repository']} | {found} | {outcome.get('how', '')} | {outcome['verdict']} {bits or outcome.get('reason', '')[:300]} | {outcome.get('folds', '')[:60]} |"


def summary(outcomes: list[dict[str, Any]]) -> str:
    counts = Counter(outcome["verdict"] for outcome in outcomes)
    tried = sum(counts.values()) - counts["not had"]
    return f"{tried} tried: " + ", ".join(f"{number} {verdict}" for verdict, number in counts.most_common())


def write_page(page: Path, outcomes: list[dict[str, Any]]) -> None:
    before, rest = page.read_text().split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{table(outcomes)}\n{END}{after}")


def table(outcomes: list[dict[str, Any]]) -> str:
    return "\n".join(row(outcome) for outcome in outcomes)


if __name__ == "__main__":
    main()
