"""The processes that a launcher started: what they wait for together, and how one that is lost is missed.

Each has a thread that tells the others by torch's store that it is alive, what it waits for and how it ended. So a wait
may last as long as somebody works, and ends, with a line that says why, when one has failed, when nothing was heard of
one for SCALELONG_TIMEOUT seconds, or when all of them wait.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any
from uuid import uuid4

from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from .atomic import Files, writing
from .runtime import POLL_SECONDS, Rank

TIMEOUT = "SCALELONG_TIMEOUT"
DEFAULT_SECONDS = 300.0
# One that has not said anything yet may still be importing.
START_SECONDS = 60.0
# Between looks at the store: while the others are awaited at a meeting, and while there is nothing to wait for.
MEETING_SECONDS, BEAT_SECONDS = 0.005, 1.0
# So long one that ends with an error stays, as the store may be in it, and others shall hear why.
LINGER_SECONDS = 2.0
# A file system of several hosts may show a new file so much later.
SEEN_SECONDS = 5.0

# In the last state is one that has heard of a failure.
WORKS, WAITS, DONE, FAILED, STOPS = "works", "waits", "done", "failed", "stops"
numbers = count()  # All processes open their teams in the same order.


class LostProcess(ValueError):
    """Another process of the command is missing; the message says which, why, and what was waited for."""


def patience() -> float:
    """After how many seconds a process that nothing is heard of counts as lost."""
    text = os.environ.get(TIMEOUT, str(DEFAULT_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{TIMEOUT} is a number of seconds above 0, such as 300, not {text!r}")
    return seconds


@contextmanager
def together(rank: Rank) -> Iterator[Rank]:
    """This process as one of its team, if a launcher started several."""
    if rank.world == 1:
        yield rank
        return
    wire = Wire(rank, PrefixStore(f"scalelong-{next(numbers)}", launcher_store()), patience())
    try:
        yield Team(rank.index, rank.world, wire)
    except BaseException as error:
        wire.leave(FAILED, " ".join((str(error) or type(error).__name__).split()))
        raise
    wire.leave(DONE)


@cache  # The first process may be where the others find it, until all end.
def launcher_store() -> Store:
    from torch.distributed.rendezvous import rendezvous

    where = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
    try:
        return next(rendezvous("env://", timeout=timedelta(seconds=max(patience(), START_SECONDS))))[0]
    except RuntimeError as error:
        raise LostProcess(
            f"the processes of this command did not find each other at {where}: {brief(error)}"
        ) from error


@dataclass(frozen=True)
class Team(Rank):
    """This process, and a wire to the others."""

    wire: Wire | None = None

    def wait(self, what: str, condition: Callable[[], bool], pause: float = POLL_SECONDS) -> None:
        assert self.wire is not None
        self.wire.say(pause, state=WAITS, what=what)
        try:
            while not condition():
                self.wire.check(what)
                time.sleep(pause)
        finally:
            self.wire.say(BEAT_SECONDS, state=WORKS, what="")

    def meet(self, what: str, said: str = "") -> list[str]:
        assert self.wire is not None
        wire, number = self.wire, self.wire.own["meetings"] + 1
        # One that is a meeting ahead has to be understood as well; none can be two ahead.
        wire.say(MEETING_SECONDS, meetings=number, said=[wire.own["said"][1], said])
        self.wait(what, lambda: all(word["meetings"] >= number for word in wire.words()), MEETING_SECONDS)
        return [word["said"][word["meetings"] == number] for word in wire.words()]

    def failure(self) -> str:
        assert self.wire is not None
        return self.wire.failure()


class Wire:
    """A thread that keeps what this process says of itself, and the others of themselves, up to date.

    It is the only one to use the store, in which a call may hang for a quarter of an hour if a network fails.
    """

    def __init__(self, rank: Rank, store: Store, patience: float) -> None:
        self.rank, self.store, self.patience = rank, store, patience
        self.own: dict[str, Any] = {"host": socket.gethostname(), "state": WORKS, "what": "", "meetings": 0}
        self.own["said"] = ["", ""]
        self.others = [number for number in range(rank.world) if number != rank.index]
        self.raw: dict[int, bytes] = {}
        self.heard = {number: {**self.own, "host": "", "meetings": -1} for number in self.others}
        self.times = dict.fromkeys(self.others, time.monotonic() + START_SECONDS)
        self.worked = time.monotonic()  # When one of the others last said that it works.
        self.pause, self.broken = BEAT_SECONDS, ""
        self.wake, self.closed = Event(), False
        self.thread = Thread(target=self._talk, daemon=True)
        self.thread.start()

    def say(self, pause: float, **changes: Any) -> None:
        """Let the others know; and look for what they say after so many seconds each."""
        # More processes ask for more at each look, of one store.
        self.own, self.pause = {**self.own, **changes}, max(pause, self.rank.world**2 * 1e-5)
        self.worked = time.monotonic()
        self.wake.set()

    def words(self) -> list[dict[str, Any]]:
        """What each process last said, by rank."""
        return [self.own if number == self.rank.index else self.heard[number] for number in range(self.rank.world)]

    def check(self, what: str) -> None:
        """Raise if waiting has no end."""
        if failure := self.failure():
            raise LostProcess(f"{failure}; this one waited for {what}")
        if time.monotonic() - self.worked > self.patience:
            others = ", ".join(f"{self.name(number)} {describe(word)}" for number, word in self.heard.items())
            raise LostProcess(
                f"nobody has worked for {self.patience:g} s ({TIMEOUT}): this one waits for {what}, {others}. "
                "Let all hosts see the same folder, then give the command again"
            )

    def failure(self) -> str:
        """How another process ended before its time, as far as is known; the first that is known to be the cause."""
        for number, word in self.heard.items():
            if word["state"] == FAILED:
                return f"{self.name(number)} failed: {word['what'].rstrip('.')}"
        for number in self.silent():
            lost = f"{self.name(number)} was not heard of for {self.patience:g} s ({TIMEOUT})"
            return f"{lost}: look at its host and at the network, then give the command again"
        return f"another process of this run has ended, or cannot be reached ({self.broken})" if self.broken else ""

    def name(self, number: int) -> str:
        host = self.heard[number]["host"]
        return f"another process of this run ({number}{host and f' on {host}'})"

    def leave(self, state: str, why: str = "") -> None:
        """Say how this process ends. The first one ends last if all is well: the store may be in it."""
        self.say(MEETING_SECONDS, state=state, what=why)
        until = time.monotonic() + LINGER_SECONDS
        is_last = state == DONE and self.rank.index == 0
        while self.thread.is_alive() and not (self.silent() if is_last else time.monotonic() > until):
            self.thread.join(MEETING_SECONDS)
        self.closed = True
        self.wake.set()

    def all_ended(self) -> bool:
        return not any(word["state"] in (WORKS, WAITS) for word in self.heard.values())

    def silent(self) -> list[int]:
        """The processes that have not ended, and of which nothing is heard any more."""
        since = time.monotonic() - self.patience
        lasting = [number for number, word in self.heard.items() if word["state"] in (WORKS, WAITS)]
        return [number for number in lasting if self.times[number] < since]

    def _talk(self) -> None:
        state = WORKS
        for beat in count():
            try:
                state = self._exchange(beat)
            except RuntimeError as error:
                self.broken = brief(error)
            stays = state == FAILED or (state == DONE and self.rank.index == 0)
            gone = state == STOPS or (state in (DONE, FAILED) and not (stays and not self.all_ended()))
            if self.broken or self.closed or gone:
                return
            self.wake.wait(min(self.pause, self.patience / 10))
            self.wake.clear()

    def _exchange(self, beat: int) -> str:
        """Tell and hear; returns in what state this process told that it is."""
        own = self.own
        if own["state"] in (WORKS, WAITS) and any(word["state"] == FAILED for word in self.heard.values()):
            own = {**own, "state": STOPS}  # Nobody needs to wait until it notices.
        self.store.set(str(self.rank.index), json.dumps({**own, "beat": beat}))
        there = [number for number in self.others if number in self.raw or self.store.check([str(number)])]
        found = self.store.multi_get(list(map(str, there))) if there else []
        for number, raw in zip(there, found, strict=True):
            if raw != self.raw.get(number):
                self.raw[number], self.heard[number] = raw, json.loads(raw)
                self.times[number] = time.monotonic()
        if any(self.heard[number]["state"] == WORKS for number in self.others):
            self.worked = time.monotonic()
        return own["state"]


def describe(word: dict[str, Any]) -> str:
    return f"waits for {word['what']}" if word["state"] == WAITS else "has done its part"


def brief(error: Exception) -> str:
    """The first line of what torch says, without where in its source."""
    return re.sub(r"^\[[^]]*\] ", "", str(error).strip().partition("\n")[0])[:300]


def check_shared(rank: Rank, folder: Path, name: str, found: str = "") -> None:
    """Raise in all processes unless each sees what the first writes into the folder; `found` is what it sees there."""
    if not isinstance(rank, Team):
        return
    what = f"a look into {folder}"
    with nullcontext("") if rank.index else token_in(folder) as token:
        token = rank.meet(what, token)[0]
        until = time.monotonic() + SEEN_SECONDS
        while not (seen := (folder / token).is_file()) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        host = socket.gethostname()
        looks = [json.loads(said) for said in rank.meet(what, json.dumps([seen, host, str(folder.absolute()), found]))]
    (_, first, place, has), *_ = looks
    for number, (seen, host, other, found) in enumerate(looks):
        if not seen:
            raise LostProcess(
                f"the {name} must be shared: process 0 on {first} wrote a file to {place}{has}, and process "
                f"{number} on {host} does not see it in {other}{found}. Choose a folder on a file system that all "
                "hosts have at the same place"
            )


@contextmanager
def token_in(folder: Path) -> Iterator[str]:
    """The name of a file that nobody has looked for yet; folders that were made for it go with it."""
    token, made = folder / f".shared-{uuid4().hex}", not folder.exists()
    with writing(token):
        Files().make_folder(folder)
        token.touch()
    try:
        yield token.name
    finally:
        token.unlink(missing_ok=True)
        if made:
            with suppress(OSError):
                folder.rmdir()
