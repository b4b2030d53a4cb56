"""Write the tables of docs/samplers.md: exact figures, for data whose score is known.

python docs/make_sampler_table.py        # replaces what stands between the comments of docs/samplers.md; half a minute
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from scalelong.diffusion import SAMPLERS, sample
from scalelong.diffusion.samplers import SPACINGS, Spacing

DOCS = Path(__file__).parent
sys.path.append(str(DOCS.parent / "tests" / "diffusion"))

from exact_moments import WEAK_ORDERS, bias, flow_to_data  # noqa: E402 (beside the tests, not installed)
from exact_scores import build, gaussian_predictor, seeded_noise  # noqa: E402

STEPS = 50
# Of the same rest as 50 by 3, so that the last step of dpm-solver-3 has the same order.
COARSE, FINE = 23, 92
ERROR_SPACINGS: tuple[Spacing, ...] = ("quadratic", "logsnr")


def main() -> None:
    page = DOCS / "samplers.md"
    text = page.read_text(encoding="utf-8")
    for name, table in tables().items():
        text = re.sub(rf"(<!-- {name} -->\n\n).*?(\n\n<!-- end -->)", rf"\g<1>{table}\g<2>", text, flags=re.DOTALL)
    page.write_text(text, encoding="utf-8")


def tables() -> dict[str, str]:
    return {
        "wide": make_table(SPACINGS, biases(0.5)),
        "narrow": make_table(SPACINGS, biases(0.2)),
        "errors": make_table(
            ERROR_SPACINGS, {name: list(map(partial(errors, name), ERROR_SPACINGS)) for name in SAMPLERS}
        ),
    }


def make_table(columns: Iterable[str], rows: dict[str, list[str]]) -> str:
    lines = [["sampler", *columns], ["---"] * (1 + len(list(columns)))]
    lines += [[f"`{name}`", *cells] for name, cells in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def biases(std: float) -> dict[str, list[str]]:
    """The error of the variance of N(0.3, std²) in 50 steps, for every sampler and spacing."""
    settings = {name: (name, "small") for name in SAMPLERS} | {"ddpm --variance large": ("ddpm", "large")}
    return {label: [show_bias(*given, spacing, std) for spacing in SPACINGS] for label, given in settings.items()}


def show_bias(sampler: str, variance: str, spacing: str, std: float) -> str:
    found = bias(build(), sampler, STEPS, std, timestep_spacing=spacing, variance=variance)
    return f"{100 * found:+.1f} %".replace("-", "−")


def errors(sampler: str, spacing: Spacing) -> str:
    """The distance to the end of the exact flow, or the error of the variance, for few and four times as many steps."""
    found = [error(sampler, spacing, steps) for steps in (COARSE, FINE)]
    return " → ".join(f"{100 * value:.2g} %" if sampler in WEAK_ORDERS else f"{value:.1e}" for value in found)


def error(sampler: str, spacing: Spacing, steps: int) -> float:
    process, std = build(("linear", "continuous")), 0.5
    if sampler in WEAK_ORDERS:
        return abs(bias(process, sampler, steps, std, timestep_spacing=spacing))
    noise = seeded_noise(range(4), 1, 8, 8)
    exact = flow_to_data(process, sampler, steps, noise, std, spacing)
    given = {"seeds": range(4), "steps": steps, "sampler": sampler, "timestep_spacing": spacing}
    found = sample(gaussian_predictor(process, std), process, noise, clip=False, **given)
    return (found - exact).abs().mean().item()


if __name__ == "__main__":
    main()
