"""Recipes that were changed at random: each is refused in one line, or is a recipe. None is a traceback, none hangs."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable, Sequence

from scalelong.config.load import recipe_folder

from .cases import RECOVERED, Case, Outcome, wrong
from .children import command

SECONDS = 20
# A recipe is checked in little memory, whatever it says.
MEMORY = 6 << 30
# Larger networks take seconds to count.
SMALL = ("digits", "cifar10-tiny-uvit", "cifar10-tiny-unet", "cifar10-tiny-class", "flickr-tiny")

VALUES = (
    *("0", "-1", "1", "2", "3", "7", "1000000", "10000000000", "-9223372036854775809", "1" + "0" * 400, "1e309", "-1e-300"),
    *(".nan", ".inf", "nan", "inf", "0.0", "1e-3", "0x10", "1_000", "true", "no", "null", "~", '""', "''", "[]", "{}"),
    *("[1]", "[1, 2, 3, 4]", "{a: 1}", "[[[[]]]]", "[null]", "[true, false]", "!!python/object:os.system x", "!!bool x"),
    *("!!int x", "!!float []", "!!set {a, b}", "!!binary x", "!!timestamp x", "!x y", "&a [*a]", "*a", "&a x", "<<: 1"),
    *("../escaped", "/etc/passwd", "a\\nb", '"a\\nb"', '"\\0"', '"\\x1b[2J"', "'" + "x" * 5000 + "'", "ä", "🦊", "\x85", "- 1"),
    *("cs", "ls", "none", "uvit", "unet", "digits", "ema", "ddim", "cuda", "auto", "file:///etc", "http://127.0.0.1:9/x"),
    *("2001-01-01", "1:30", "@x", "%x", "`x`", "|", ">", "? x", "#", "text", "pandas", "sklearn:digits", "sklearn:x"),
)


def changed_value(lines: list[str], chance: random.Random) -> None:
    row = chance.randrange(len(lines))
    key, colon, _ = lines[row].partition(":")
    lines[row] = f"{key}{colon or ':'} {chance.choice(VALUES)}"


def changed_bytes(lines: list[str], chance: random.Random) -> None:
    text = list("\n".join(lines))
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


def mutate_recipe(case: Case) -> Outcome:
    """A recipe of the package, changed in a few places, as `--dry-run` reads it."""
    chance = case.chance
    name = chance.choice(SMALL)
    lines = (recipe_folder() / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    for _ in range(chance.choice((1, 1, 2, 3))):
        (chance.choice((nested, laughing)) if chance.random() < 0.02 else chance.choice(MUTATIONS))(lines, chance)
        lines = lines or [""]
    file = case.place / "recipe.yaml"
    file.write_bytes("\n".join(lines).encode("utf-8", errors="surrogatepass"))
    return checked(case, ["train", file, "--dry-run"])


def override_recipe(case: Case) -> Outcome:
    """A recipe with overrides of any kind."""
    chance = case.chance
    keys = ("optim.lr", "model.depth", "scaling.method", "scaling.kappa", "training.steps", "data.source", "x.y", "model")
    overrides = [f"{chance.choice(keys)}={chance.choice(VALUES)}" for _ in range(chance.randint(1, 3))]
    if chance.random() < 0.2:
        overrides.append(chance.choice(("", "=", "a", "..=1", "optim.=1", "a.b.c.d=1", "optim.lr", "=1", "optim.lr.x=1")))
    usable = [override for override in overrides if "\0" not in override]
    return checked(case, ["train", chance.choice(SMALL), "--dry-run", *(part for one in usable for part in ("--set", one))])


def checked(case: Case, arguments: Sequence[object]) -> Outcome:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        command(*arguments)()

    end = case.call(limited, seconds=SECONDS)
    if end.refused and len(end.err.strip().splitlines()) == 1 and end.err.isprintable() is False:
        controls = [letter for letter in end.err if ord(letter) < 32 and letter != "\n"]
        return wrong(f"control characters reach the terminal: {end}") if controls else Outcome("refused")
    if end.refused:
        return wrong(f"more than a line: {end}")
    return RECOVERED if end.code == 0 and not end.traced else wrong(end)


