"""One network, tried: find → scale → compare with the oracle → undo → copy → fuse. Run in a process of its own."""

from __future__ import annotations

import copy
import json
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scalelong import find_skips, fuse_skips, scale_skips, unscale_skips

from .load import build, folder_of, load, prepare_imports, set_up, with_placeholders
from .oracle import Join, scaled_at

METHODS: dict[str, dict[str, Any]] = {"uniform": {"value": 0.5}, "cs": {"kappa": 0.7}, "ls": {}}
TOLERANCE = 1e-4
"""Of the largest change that scaling makes: float32, through networks of many layers. Most agree to the bit."""


@dataclass
class Outcome:
    """What became of one network. `verdict` is right, refused, partial, wrong, or broken (our description of it)."""

    name: str
    repository: str = ""
    commit: str = ""
    verdict: str = "right"
    reason: str = ""
    how: str = ""
    expected: int = 0
    found: int = 0
    sites: list[str] = field(default_factory=list)
    exact: dict[str, bool] = field(default_factory=dict)
    difference: dict[str, float] = field(default_factory=dict)
    folds: str = ""
    parameters: int = 0


class Wrong(Exception):
    """A result that is not what it should be."""


class Broken(Exception):
    """The description in the list does not fit the network: nothing was learned about scalelong."""


def attempt(entry: dict[str, Any], repos: Path | None, check: bool = False) -> Outcome:
    """Try one network of the list; with `check`, see only that it can be built and is joined as the list says."""
    outcome = Outcome(entry["name"], entry["repository"], str(entry["commit"]), expected=entry["skips"])
    try:
        folder = None if repos is None else folder_of(entry["repository"], repos)
        if folder is not None:
            prepare_imports(folder, entry.get("paths", []))
        set_up(entry.get("settings", {}))
        trial = Trial(entry, outcome)
        trial.check_the_oracle()
    except Exception as error:
        return failed(outcome, "broken", error)
    if check:
        outcome.verdict = "checked"
        return outcome
    try:
        trial.run_all()
    except Broken as error:
        return failed(outcome, "broken", error)
    except Refused as error:
        return failed(outcome, "refused", error.__cause__ or error)
    except Exception as error:
        return failed(outcome, "wrong", error)
    return outcome


def failed(outcome: Outcome, verdict: str, error: BaseException) -> Outcome:
    traceback.print_exception(error, file=sys.stderr)
    partial = verdict == "wrong" and 0 < outcome.found < outcome.expected
    kind = "" if isinstance(error, (Wrong, Broken, ValueError)) else f"{type(error).__name__}: "
    outcome.verdict, outcome.reason = "partial" if partial else verdict, f"{kind}{error}"
    return outcome


class Refused(Exception):
    """scalelong said no, with a reason."""


@contextmanager
def may_refuse() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise Refused from error


class Trial:
    """One network with the inputs it is tried on, and a second one of the same weights for the oracle."""

    def __init__(self, entry: dict[str, Any], outcome: Outcome) -> None:
        self.entry, self.outcome = entry, outcome
        self.ways = [[Join.read(text) for text in entry[key]] for key in ("joins", "or") if key in entry]
        self.network, self.reference = self.built(), self.built()
        self.reference.load_state_dict(self.network.state_dict())
        with torch.random.fork_rng():
            torch.manual_seed(1)
            inputs = load(entry["inputs"])
        self.inputs = inputs if isinstance(inputs, dict) else tuple(inputs)
        outcome.parameters = sum(parameter.numel() for parameter in self.network.parameters())
        self.plain = self.run(self.network)
        if not self.plain.isfinite().all():
            raise Broken("the network's own output is not finite")

    def built(self) -> nn.Module:
        network = with_placeholders(self.seeded_build, self.entry["new"].partition(":")[0]).eval()
        wake(network, fill=self.entry.get("fill", False))
        return network

    def seeded_build(self) -> nn.Module:
        seed()
        return build(self.entry)

    def run(self, network: nn.Module, gradients: bool = False) -> Tensor:
        """All that the network puts out, as one vector."""
        seed()
        with torch.set_grad_enabled(gradients):
            output = network(**self.inputs) if isinstance(self.inputs, dict) else network(*self.inputs)
        return torch.cat([tensor.flatten().double() for tensor in tensors_of(output)])

    def run_all(self) -> None:
        sites = self.find()
        self.outcome.sites = [f"{site.consumer} {site.entry}" for site in sites]
        self.outcome.found = len(sites)
        if len(sites) != self.outcome.expected:
            raise Wrong(f"{len(sites)} skips found of {self.outcome.expected}")
        for method, options in METHODS.items():
            self.compare(method, options)
        self.check_gradients()
        self.check_copies()
        self.outcome.folds = self.fold()

    def check_the_oracle(self) -> None:
        """The joins are those of the list, in number, and doing nothing at each leaves the output as it is."""
        for joins in self.ways:
            with scaled_at(self.reference, joins, lambda _, skip: skip) as skips:
                output = self.run(self.reference)
            if len(skips) != self.outcome.expected:
                raise Broken(f"the joins of the list ran {len(skips)} times, not {self.outcome.expected}")
            if not torch.equal(output, self.plain):
                raise Broken("two builds of the network differ, or its forward is not repeatable")

    def find(self) -> list[Any]:
        try:
            sites = find_skips(self.network)
            self.example = {}
            self.outcome.how = "known"
        except ValueError:
            self.example = {"example_inputs": self.inputs}
            self.outcome.how = "traced"
            with may_refuse():
                sites = find_skips(self.network, **self.example)
        return sites

    def scale(self, network: nn.Module, method: str, options: dict[str, Any]) -> None:
        with may_refuse():
            scale_skips(network, method, **self.example, **options)

    def compare(self, method: str, options: dict[str, Any]) -> None:
        """Scaled as the oracle has it, and undone to the bit."""
        state = {name: value.clone() for name, value in self.network.state_dict().items()}
        seed()
        self.scale(self.network, method, options)
        stir(self.network)
        scaled = self.run(self.network)
        tries = {id(joins): self.expected(method, options, joins) for joins in self.ways}
        differences = {key: relative(scaled, expected, self.plain) for key, expected in tries.items()}
        # A skip that is changed on its way may be scaled before or after that, but always there.
        best = min(differences, key=lambda key: differences[key])
        self.ways = [joins for joins in self.ways if differences[id(joins)] <= TOLERANCE or id(joins) == best]
        self.outcome.exact[method] = torch.equal(scaled, tries[best])
        self.outcome.difference[method] = off = differences[best]
        unscale_skips(self.network)
        if not torch.equal(self.run(self.network), self.plain):
            raise Wrong(f"{method}: undone, the network computes something else")
        after = self.network.state_dict()
        if list(state) != list(after) or not all(torch.equal(state[name], after[name]) for name in state):
            raise Wrong(f"{method}: undone, the weights are not what they were")
        if not off <= TOLERANCE:
            raise Wrong(f"{method}: off by {off:.2g} of the scaling's own effect")

    def expected(self, method: str, options: dict[str, Any], joins: list[Join], gradients: bool = False) -> Tensor:
        """The reference network's output with every skip multiplied where the list says that it is joined."""
        num_skips = self.outcome.expected
        scaling = None
        if method == "ls":
            scaling = next(module.skip_scaling for module in self.network.modules() if hasattr(module, "skip_scaling"))

        def scale(number: int, skip: Tensor) -> Tensor:
            index = num_skips - number
            if scaling is not None:
                return skip * scaling(index, skip).to(skip.dtype)
            return skip * (options["value"] if method == "uniform" else options["kappa"] ** (index - 1))

        with scaled_at(self.reference, joins, scale):
            return self.run(self.reference, gradients)

    def check_gradients(self) -> None:
        """The gradients of every parameter are those of the oracle."""
        self.scale(self.network, "cs", METHODS["cs"])
        wanted = gradients_of(self.reference, lambda: self.expected("cs", METHODS["cs"], self.ways[0], gradients=True))
        got = gradients_of(self.network, lambda: self.run(self.network, gradients=True))
        unscale_skips(self.network)
        off = (got - wanted).norm() / wanted.norm().clamp_min(1e-30)
        if not off <= 1e-3:
            raise Wrong(f"the gradients are off by {off:.2g}")

    def check_copies(self) -> None:
        """A deep copy is scaled, can be undone and scaled again by itself, and leaves the original alone."""
        self.scale(self.network, "cs", METHODS["cs"])
        scaled = self.run(self.network)
        twin = copy.deepcopy(self.network)
        steps: list[tuple[str, Callable[[], Any], Tensor]] = [
            ("a deep copy computes", lambda: None, scaled),
            ("a copy, undone, computes", lambda: unscale_skips(twin), self.plain),
            (
                "a copy, scaled again, computes",
                lambda: scale_skips(twin, "cs", **self.example, **METHODS["cs"]),
                scaled,
            ),
        ]
        for words, act, wanted in steps:
            act()
            if not torch.equal(self.run(twin), wanted):
                raise Wrong(f"{words} something else")
            if not torch.equal(self.run(self.network), scaled):
                raise Wrong("the original changed with its copy")
        self.twin, self.scaled = twin, scaled

    def fold(self) -> str:
        """`folds`, or why the constants do not go into the weights; exact where they do."""
        for where in ("input", "after-norm"):
            try:
                wanted = self.scaled
                if where != "input":
                    scale_skips(self.twin, "cs", where=where, **self.example, **METHODS["cs"])
                    wanted = self.run(self.twin)
                fuse_skips(self.twin)
            except ValueError as error:
                reason = str(error)
                continue
            off = relative(self.run(self.twin), wanted, self.plain)
            if not off <= 1e-3:
                raise Wrong(f"fused ({where}), it computes something else, off by {off:.2g}")
            if list(self.twin.state_dict()) != list(self.reference.state_dict()):
                raise Wrong("fused, it is no plain checkpoint")
            return "yes" if where == "input" else "after the norm"
        unscale_skips(self.twin)
        return f"no: {reason}"


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


@torch.no_grad()
def wake(network: nn.Module, fill: bool = False) -> None:
    """Give values to parameters that start constant (zero-initialised outputs), or scaling would change nothing."""
    for parameter in filter(lambda parameter: parameter.requires_grad, network.parameters()):
        if fill:
            parameter.normal_(0, 0.1)
        elif parameter.is_floating_point() and parameter.numel() and bool((parameter == parameter.flatten()[0]).all()):
            parameter.add_(0.1 * torch.randn_like(parameter))


@torch.no_grad()
def stir(network: nn.Module) -> None:
    """Make the gates of LS depend strongly on what they see."""
    for name, parameter in network.named_parameters():
        if "skip_scaling" in name:
            parameter.add_(torch.randn_like(parameter))


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors of an output of any shape."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
        elif value.is_complex():
            yield torch.view_as_real(value)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif hasattr(value, "__dict__"):
        yield from tensors_of(vars(value))


def relative(got: Tensor, wanted: Tensor, plain: Tensor) -> float:
    """The difference as a share of what scaling changes; it has to change something."""
    effect = (wanted - plain).abs().max()
    if not effect > 1e-6 * plain.abs().max():
        raise Broken("scaling these joins changes nothing")
    return float((got - wanted).abs().max() / effect)


def gradients_of(network: nn.Module, run: Callable[[], Tensor]) -> Tensor:
    """The gradient of the mean square of the output, for all parameters together."""
    network.zero_grad(set_to_none=True)
    run().square().mean().backward()
    parameters = dict(network.named_parameters()).items()
    found = [p.grad.flatten() for name, p in parameters if p.grad is not None and "skip_scaling" not in name]
    network.zero_grad(set_to_none=True)
    return torch.cat(found)


def main() -> None:
    """Read an entry of the list and the folder of the checkouts from the standard input; write the outcome."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    request = json.load(sys.stdin)
    shown, sys.stdout = sys.stdout, sys.stderr
    repos = None if request["repos"] is None else Path(request["repos"])
    outcome = attempt(request["entry"], repos, request.get("check", False))
    print(json.dumps(asdict(outcome)), file=shown)


if __name__ == "__main__":
    main()
