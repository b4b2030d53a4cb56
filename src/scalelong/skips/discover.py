"""The joins of a recorded forward pass: where a value meets a later one that was made from the same origin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from math import inf, prod
from operator import and_

from .record import Call, Part, Record
from .site import Channels

PLAIN = ("clone", "_to_copy", "mul", "div", "slice", "alias")


@dataclass(frozen=True)
class Join:
    """Where a value meets a later one that was made from the same origin, the latest that both were made from.

    `scope` is the innermost call around the join that contains the trunk's whole way from the origin: a residual block
    for its own sum, the UNet for a long skip.
    """

    origin: int
    skip: int
    trunk: int
    result: int
    channels: Channels | None
    scope: Call
    part: int
    """Which of the joined tensors the skip is, from 0."""
    source: int
    """The tensor that was kept for the join: the skip before it was only copied, cropped or multiplied by a number."""


def all_joins(record: Record) -> Iterator[Join]:
    for result, value in enumerate(record.values):
        if len(value.parts) < 2:
            continue
        parts = [part.value for part in value.parts]
        shared = reduce(and_, map(record.lineage, parts))
        trunk = max(parts, key=lambda part: trunk_likeness(record, part, shared))
        for part in value.parts:
            origin = latest_common(record, part.value, trunk)
            if part.value != trunk and origin is not None:
                yield make_join(record, part, origin, trunk, result)


def make_join(record: Record, part: Part, origin: int, trunk: int, result: int) -> Join:
    first = next(record.way_between(origin, trunk), origin)
    scope = next(outer for outer in record.call_of(result).outward() if outer.start <= first)
    return Join(
        origin, part.value, trunk, result, part.channels, scope, part.number, source_of(record, part.value, origin)
    )


def joined_with_itself(record: Record, like: Join) -> Iterator[Join]:
    """Concatenations of one value with itself, as the skip of a network without a middle, made as another join is."""
    parts, kind = len(record.values[like.result].parts), type(record.call_of(like.result).module)
    for result, value in enumerate(record.values):
        alone = len({part.value for part in value.parts}) == 1 and len(value.parts) == parts > 1
        if alone and type(record.call_of(result).module) is kind:
            part = next(part for part in value.parts if part.number == like.part)
            yield make_join(record, part, part.value, part.value, result)


def source_of(record: Record, number: int, origin: int) -> int:
    """The value that this one is a plain copy of, cropped or multiplied by a number; not before the origin."""
    value = record.values[number]
    while number != origin and len(value.inputs) == 1 and value.operation in PLAIN:
        number = value.inputs[0]
        value = record.values[number]
    return number


def trunk_likeness(record: Record, part: int, shared: int) -> tuple[float, int]:
    """How much a part looks like the trunk: it came through the lowest resolution, else more has happened to it.

    `shared` is what all parts were made from. A skip may be projected, gated or refined on its way, but keeps its size.
    """
    lineage, dims = record.lineage(part), len(record.values[part].shape)
    own = (record.values[n].shape for n in range(part + 1) if (lineage & ~shared) >> n & 1)
    sizes = [prod(shape[2:]) for shape in own if len(shape) == dims > 3 and prod(shape[2:]) > 1]
    return -min(sizes, default=inf), lineage.bit_count()


def latest_common(record: Record, skip: int, trunk: int) -> int | None:
    """The latest value that both were made from and that carries the model's main input."""
    common, main = record.lineage(skip) & record.lineage(trunk), main_input(record)
    # Skip and trunk may share an embedding of the time or a text as well; that is not what was skipped.
    shared = (n for n in reversed(range(common.bit_length())) if common >> n & 1 and record.depends(n, on=main))
    return next(shared, None)


def main_input(record: Record) -> int:
    """The input that is denoised, not a condition: the first of those that look most like the output."""

    def likeness(number: int) -> tuple[bool, int, int]:
        shape = record.values[number].shape
        equal = sum(size == other for size, other in zip(shape[::-1], record.output[::-1], strict=False))
        return len(shape) == len(record.output), len(shape), equal

    return max((n for n, value in enumerate(record.values) if value.operation == "input"), key=likeness)
