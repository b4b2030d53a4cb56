"""Write the tables and figures of docs/mup.md from the small files of docs/results/mup.

python docs/make_mup.py                                    # replaces what stands between the comments of the page
python docs/make_mup.py TRANSFER COORDCHECK COORDCHECK     # first takes files and figures from these commands' folders
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scalelong.report import read_content
from scalelong.report.figures import draw_figures

DOCS = Path(__file__).parent
PAGE, KEPT, FIGURES = DOCS / "mup.md", DOCS / "results" / "mup", DOCS / "figures"
DRAWN = {"transfer-1": "mup-transfer-standard", "transfer-2": "mup-transfer-mup"}

Found = Mapping[str, Any]


def keep(transfer: Path, *checks: Path) -> None:
    """What the page is about, of a transfer and of coordinate checks, with their figures."""
    results = json.loads((transfer / "results.json").read_text(encoding="utf-8"))
    runs = [run for arm in results["arms"] for run in arm["runs"]]
    begun = json.loads((transfer / runs[0]["folder"] / "environment.json").read_text(encoding="utf-8"))[0]
    what = {key: results[key] for key in ("recipe", "command", "steps", "runs_done", "runs_total", "updated")}
    # The places of images and runs are this machine's.
    what["command"] = re.sub(r"(data\.source=)\S+", r"\1PATH", re.sub(r" --out \S+", "", what["command"]))
    minutes = round(sum(run["seconds"] for run in runs) / 60, 1)
    write("transfer", {**what, "commit": begun["commit"], "minutes": minutes, "methods": results["transfer"]})
    with tempfile.TemporaryDirectory() as folder:
        for path in draw_figures(read_content([transfer]), Path(folder)):
            if path.suffix == ".png" and path.stem in DRAWN:
                shutil.copyfile(path, FIGURES / f"{DRAWN[path.stem]}.png")
    for check in checks:
        found = json.loads((check / "coordcheck.json").read_text(encoding="utf-8"))
        write(f"coordcheck-{found['parametrization']}", found)
        shutil.copyfile(check / "slope.png", FIGURES / f"mup-coordcheck-{found['parametrization']}.png")


def write(name: str, content: Found) -> None:
    KEPT.mkdir(parents=True, exist_ok=True)
    (KEPT / f"{name}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read(name: str) -> Any:
    return json.loads((KEPT / f"{name}.json").read_text(encoding="utf-8"))


def make_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *rows))


def slopes() -> str:
    """The slope of each block in both parametrizations."""
    checks = [read(f"coordcheck-{name}")["blocks"] for name in ("standard", "mup")]
    rows = [[f"`{pair[0]['block']}`", *(slope_cell(one) for one in pair)] for pair in zip(*checks, strict=True)]
    return make_table(["block", "standard", "μP"], rows)


def slope_cell(one: Found) -> str:
    slope = one["slope"]
    return f"{slope['value']:+.2f} ({slope['low']:+.2f} to {slope['high']:+.2f}), {one['verdict']}"


def losses(method: Found) -> str:
    """The mean loss of each width at each rate, and the best rate."""
    rates = sorted({rate for family in method["families"] for one in family["widths"] for rate in one["rates"]})
    rows = [
        [family["label"], str(one["width"]), *loss_cells(one, rates), rate_cell(one["best"])]
        for family in method["families"]
        for one in family["widths"]
    ]
    return make_table(["parametrization", "width", *(f"{rate:g}" for rate in rates), "best rate"], rows)


def loss_cells(one: Found, rates: Sequence[float]) -> list[str]:
    known = dict(zip(one["rates"], one["mean"], strict=True))
    return ["–" if known.get(rate) is None else f"{known[rate]:.4f}" for rate in rates]


def rate_cell(best: Found) -> str:
    interval = "" if best["low"] is None else f" ({best['low']:.2g} to {best['high']:.2g})"
    return f"{best['bound'] or ''} {best['value']:.2g}{interval}".strip()


def blocks() -> dict[str, str]:
    transfer = read("transfer")
    (method,) = transfer["methods"]
    said = [*(family["sentence"] for family in method["families"]), method["carried"]["sentence"]]
    return {
        "slopes": slopes(),
        "losses": losses(method),
        "said": "\n".join(f"- {sentence}" for sentence in said),
        "command": f"```console\n$ {transfer['command']}\n```",
    }


def filled(text: str) -> str:
    """The page with its blocks written anew."""
    for name, block in blocks().items():
        text = re.sub(rf"(<!-- {name} -->\n\n).*?(\n\n<!-- end -->)", rf"\g<1>{block}\g<2>", text, flags=re.DOTALL)
    return text


def main() -> None:
    if len(sys.argv) > 1:
        keep(*map(Path, sys.argv[1:]))
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
