"""Recipes that were changed at random: each is refused in one line, or is a recipe. None is a traceback, none hangs."""

from __future__ import annotations

import json
import random
import resource
import signal
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from io import StringIO
from pathlib import Path

from scalelong.config.load import recipe_folder

from .cases import RECOVERED, Case, Outcome, wrong
from .children import End, command, exit_code, sets

TOGETHER = 20
SECONDS = 30
# A recipe is checked in little memory, whatever it says.
MEMORY = 6 << 30
# Larger networks take seconds to count.
SMALL = ("digits", "cifar10-tiny-uvit", "cifar10-tiny-unet", "cifar10-tiny-class", "flickr-tiny")

VALUES = (
    *("0", "-1", "1", "2", "3", "7", "1000000", "10000000000", "-9223372036854775809", "1" + "0" * 400, "1e309"),
    *("-1e-300", "🦊", "\x85", "- 1"),
    *(".nan", ".inf", "nan", "inf", "0.0", "1e-3", "0x10", "1_000", "true", "no", "null", "~", '""', "''", "[]", "{}"),
    *("[1]", "[1, 2, 3, 4]", "{a: 1}", "[[[[]]]]", "[null]", "[true, false]", "!!bool x"),
    *(
        "!!python/object:os.system x",
        "file:///etc",
        "http://127.0.0.1:9/x",
        "2001-01-01",
        "1:30",
        "@x",
        "%x",
        "`x`",
        "|",
    ),
    *("!!int x", "!!float []", "!!set {a, b}", "!!binary x", "!!timestamp x", "!x y", "&a [*a]", "*a", "&a x", "<<: 1"),
    *("../escaped", "/etc/passwd", "a\\nb", '"a\\nb"', '"\\0"', '"\\x1b[2J"', "'" + "x" * 5000 + "'", "ä"),
    *("cs", "ls", "none", "uvit", "unet", "digits", "ema", "ddim", "cuda", "auto"),
    *(">", "? x", "#", "text", "pandas", "sklearn:digits", "sklearn:x"),
)

KEYS = ("optim.lr", "model.depth", "scaling.method", "scaling.kappa", "training.steps", "data.source", "x.y", "model")
NO_OVERRIDES = ("", "=", "a", "..=1", "optim.=1", "a.b.c.d=1", "optim.lr", "=1", "optim.lr.x=1")


def changed_value(lines: list[str], chance: random.Random) -> None:
    row = chance.randrange(len(lines))
    key, colon, _ = lines[row].partition(":")
    lines[row] = f"{key}{colon or ':'} {chance.choice(VALUES)}"


def changed_bytes(lines: list[str], chance: random.Random) -> None:
    text = list("\n".join(lines)) or [" "]  # Another change may have left nothing.
    for _ in range(chance.choice((1, 1, 2, 10))):
        letter = chance.choice("\x00\t\n :-[]{}#&*!|>'\"%@`,?01e\x7fäx")
        place = chance.randrange(len(text))
        if chance.random() < 0.5:
            text.insert(place, letter)
        else:
            text[place] = letter
    lines[:] = "".join(text).split("\n")


def dropped(lines: list[str], chance: random.Random) -> None:
    del lines[chance.randrange(len(lines))]


def doubled(lines: list[str], chance: random.Random) -> None:
    lines.insert(chance.randrange(len(lines) + 1), chance.choice(lines))


def moved(lines: list[str], chance: random.Random) -> None:
    row = chance.randrange(len(lines))
    lines[row] = chance.choice(("", " ", "  ", "      ", "\t", "- ")) + lines[row].lstrip()


def new_key(lines: list[str], chance: random.Random) -> None:
    name = chance.choice(("x", "lr", "kappa", "1", "null", "? [a]", "*a", "<<", "model", "__class__", "steps", "true"))
    lines.insert(chance.randrange(len(lines) + 1), f"{chance.choice(('', '  '))}{name}: {chance.choice(VALUES)}")


def nested(lines: list[str], chance: random.Random) -> None:
    depth, kind = chance.choice((10, 100, 1000, 5000, 100_000)), chance.choice(("[", "{a: ", "- ", "? "))
    lines.append("name: " + kind * depth if chance.random() < 0.5 else kind * depth)


def laughing(lines: list[str], chance: random.Random) -> None:
    """Aliases that double with each line."""
    depth = chance.randint(3, 30)
    lines.append("x0: &x0 [a, a]")
    lines += [f"x{level}: &x{level} [*x{level - 1}, *x{level - 1}, *x{level - 1}]" for level in range(1, depth)]


def sliced(lines: list[str], chance: random.Random) -> None:
    del lines[chance.randrange(len(lines)) :]
    lines[:] = lines or [""]


MUTATIONS: Sequence[Callable[[list[str], random.Random], None]] = (
    *(changed_value,) * 6,
    *(changed_bytes,) * 2,
    *(dropped, doubled, moved, new_key, new_key, sliced),
)


def mutate_recipes(case: Case) -> list[Outcome]:
    """Recipes of the package, each changed in a few places, as `--dry-run` reads them."""
    return try_all(case, [mutated(case.chance, case.place / f"recipe-{number}.yaml") for number in range(TOGETHER)])


def mutated(chance: random.Random, file: Path) -> list[str]:
    lines = (recipe_folder() / f"{chance.choice(SMALL)}.yaml").read_text(encoding="utf-8").splitlines()
    for _ in range(chance.choice((1, 1, 2, 3))):
        (chance.choice((nested, laughing)) if chance.random() < 0.02 else chance.choice(MUTATIONS))(lines, chance)
        lines = lines or [""]
    file.write_bytes("\n".join(lines).encode("utf-8", errors="surrogatepass"))
    return ["train", str(file), "--dry-run"]


def override_recipes(case: Case) -> list[Outcome]:
    """Recipes with overrides of any kind."""
    return try_all(case, [overridden(case.chance) for _ in range(TOGETHER)])


def overridden(chance: random.Random) -> list[str]:
    overrides = [f"{chance.choice(KEYS)}={chance.choice(VALUES)}" for _ in range(chance.randint(1, 3))]
    if chance.random() < 0.2:
        overrides.append(chance.choice(NO_OVERRIDES))
    # The system hands no zero to a program.
    return ["train", chance.choice(SMALL), "--dry-run", *sets([one for one in overrides if "\0" not in one])]


def try_all(case: Case, commands: list[list[str]]) -> list[Outcome]:
    """Several commands in one process; of one that hangs or takes too much memory the process ends."""
    file = case.place / "outcomes.jsonl"

    def run() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        for arguments in commands:
            signal.alarm(SECONDS)
            outcome = check(arguments)
            signal.alarm(0)
            with file.open("a") as log:
                log.write(json.dumps(asdict(outcome)) + "\n")

    end = case.call(run, seconds=SECONDS * len(commands))
    found = [Outcome(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
    return found if len(found) == len(commands) else [*found, wrong(f"{shown(commands[len(found)])}: {end}")]


def check(arguments: list[str]) -> Outcome:
    """A command in this process: it prints a recipe, or refuses in one line without controls of a terminal."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = exit_code(command(*arguments))
    end = End(code if isinstance(code, int) else 1, out.getvalue(), err.getvalue())
    if end.code == 0 and not end.traced and not end.err:
        return RECOVERED
    plain = all(letter == "\n" or letter >= " " for letter in end.err)
    if end.refused and len(end.err.splitlines()) == 1 and plain:
        return Outcome("refused")
    return wrong(f"{shown(arguments)}: {end}")


def shown(arguments: list[str]) -> str:
    """The command, with the text of its recipe."""
    file = Path(arguments[1])
    return repr(file.read_bytes()[:3000] if file.exists() else arguments)
