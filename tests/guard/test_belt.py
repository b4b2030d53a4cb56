"""The seat belt in a loop of anyone's: what it puts back, what it leaves alone, and what it says."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, OneCycleLR

from scalelong import SeatBelt
from scalelong.guard import LossWatch, TrainingDiverged, snapshots
from scalelong.guard.belt import KEEP, REPEATS
from scalelong.guard.losses import WINDOW
from scalelong.training import EMA

GOOD, BAD = 0.2, 0.95


class Loop:
    """Anyone's loop: a small model, AdamW, an average of the weights, noise from torch's own generator."""

    def __init__(self, *, belted: bool = True, rate: float = 1e-2, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 4), nn.BatchNorm1d(4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)
        self.ema = EMA(self.model, decay=0.9)
        self.belt = SeatBelt(self.model, self.optimizer, self.ema, nothing=1.0, **options) if belted else None
        self.events: list[Any] = []

    def train(self, losses: Iterable[float]) -> Loop:
        """A step for each loss that the belt is told, whatever it really was."""
        for told in losses:
            noise = torch.randn(16, 4)
            loss = (self.model(noise) - noise).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.ema.update(self.model)
            if self.belt is not None:
                self.events.append(self.belt.step(told))
        return self

    def state(self) -> list[Tensor]:
        """Everything that training changes, copied."""
        moments = [value for slots in self.optimizer.state.values() for value in slots.values()]
        found = [*self.model.state_dict().values(), *self.ema.state_dict().values(), *moments, torch.get_rng_state()]
        return [tensor.detach().clone() for tensor in found]

    @property
    def restorations(self) -> list[Any]:
        return [event for event in self.events if event is not None]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def test_a_loop_in_which_it_never_acts_is_that_without_it_to_the_bit() -> None:
    assert same(Loop().train(100 * [GOOD]).state(), Loop(belted=False).train(100 * [GOOD]).state())


def test_a_collapse_brings_the_oldest_of_four_snapshots_back_to_the_bit() -> None:
    loop = Loop().train(100 * [GOOD])
    assert [snapshot.step for snapshot in loop.belt.ring] == [40, 60, 80, 100]
    loop.train(20 * [BAD])
    (event,) = loop.restorations
    assert (event.step, event.back_to, event.factor) == (120, 40, 0.7)
    assert same(loop.state(), Loop(belted=False).train(40 * [GOOD]).state())
    assert loop.ema.step == 40


def test_a_collapse_before_the_first_snapshots_brings_the_untrained_weights_back() -> None:
    loop = Loop().train(20 * [GOOD] + 20 * [BAD])
    assert loop.restorations[0].back_to == 0
    assert not any(loop.optimizer.state.values())
    assert same([*loop.model.parameters()], [*Loop().model.parameters()])


def test_parameters_and_moments_stay_the_tensors_that_they_are() -> None:
    loop = Loop().train(60 * [GOOD])
    before = [id(weight) for weight in loop.model.parameters()]
    slots = [id(value) for kept in loop.optimizer.state.values() for value in kept.values()]
    loop.train(20 * [GOOD] + 20 * [BAD])
    assert [id(weight) for weight in loop.model.parameters()] == before
    loop = Loop().train(100 * [GOOD])
    slots = [id(value) for kept in loop.optimizer.state.values() for value in kept.values()]
    loop.train(20 * [BAD])
    assert [id(value) for kept in loop.optimizer.state.values() for value in kept.values()] == slots


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "set from the first rate": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "multiplied": lambda optimizer: ExponentialLR(optimizer, 0.9),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.5, total_steps=200),
}


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULERS.values(), ids=SCHEDULERS)
def test_rates_are_lower_by_its_factor_under_every_scheduler_which_sees_nothing(schedule: Any, as_tensor: bool) -> None:
    def rates(told: list[float]) -> tuple[list[float], list[float]]:
        weight = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(weight.weight)
        rate: Any = torch.tensor(0.5, dtype=torch.float64) if as_tensor else 0.5
        optimizer = torch.optim.SGD(weight.parameters(), lr=rate, momentum=0.0)
        scheduler, belt = schedule(optimizer), SeatBelt(weight, optimizer, nothing=1.0)
        seen, moved = [], []
        for loss in told:
            optimizer.param_groups[0]["momentum"] = 0.0
            seen.append(float(optimizer.param_groups[0]["lr"]))
            before = weight.weight.item()
            weight.weight.grad = -torch.ones(1, 1, dtype=torch.float64)
            optimizer.step()
            moved.append(weight.weight.item() - before)
            scheduler.step()
            belt.step(loss)
        return seen, moved

    told = 20 * [GOOD] + 20 * [BAD]
    calm, caught = rates(60 * [GOOD]), rates([*told, *20 * [GOOD]])
    assert caught[0] == calm[0]
    assert caught[1][:40] == calm[1][:40]
    # 1e-9: differences of float64 weights.
    assert caught[1][40:] == pytest.approx([0.7 * move for move in calm[1][40:]], rel=1e-9)


def test_returns_to_the_same_snapshot_lower_the_rate_more_and_more_and_the_fourth_ends_the_run() -> None:
    loop = Loop().train(100 * [GOOD])
    with pytest.raises(TrainingDiverged, match="after 3 returns to step 40, .* at step 180 the loss"):
        loop.train(4 * 20 * [BAD])
    factors = [event.factor for event in loop.restorations]
    assert factors == pytest.approx([0.7, 0.7**3, 0.7**6]) and len(factors) == REPEATS


def test_a_run_that_goes_on_in_between_may_be_caught_as_often_as_it_takes() -> None:
    loop = Loop().train(100 * [GOOD])
    for _ in range(6):
        loop.train(20 * [BAD] + 100 * [GOOD])
    assert [event.factor for event in loop.restorations] == pytest.approx([0.7**k for k in range(1, 7)])


def test_the_sentence_says_what_was_seen_and_what_was_done() -> None:
    loop = Loop().train(100 * [GOOD] + 20 * [BAD])
    said = str(loop.restorations[0])
    assert said.startswith(
        "step 120: the loss was 0.95 over 20 steps, 94% of the way from its best, 0.2, to 1, that of predicting "
        "nothing, so weights, optimiser and EMA are those of step 40 again, and rates are × 0.7"
    )
    assert "\n" not in said


def test_it_names_the_first_block_that_grew_in_time_and_then_in_the_network() -> None:
    model = nn.ModuleDict({"embed": nn.Linear(4, 4), "blocks": nn.ModuleList(nn.Linear(4, 4) for _ in range(3))})
    growth = {"blocks.1": 1.0, "blocks.2": 1.0}

    def forward(x: Tensor) -> Tensor:
        x = model["embed"](x)
        for block in model["blocks"]:
            x = block(x)
        return x

    for name in growth:
        block = model.get_submodule(name)
        block.register_forward_hook(lambda module, args, output, name=name: output * growth[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    belt, event = SeatBelt(model, optimizer, nothing=1.0), None
    for step in range(140):
        if step >= 110:
            growth["blocks.1"] = 40.0
        forward(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        event = belt.step(BAD if step >= 120 else GOOD)
    assert event is not None
    # What grows makes all that follows grow, too.
    assert (event.block, round(event.growth)) == ("blocks.1", 40)
    assert "the first block to grow was blocks.1, × 40" in str(event)


def test_losses_stay_on_their_device_until_a_window_is_full() -> None:
    belt, optimizer = bare()
    for _ in range(WINDOW - 1):
        optimizer.step()
        belt.step(torch.ones((), device="meta"))  # Of which nothing can be fetched.
    optimizer.step()
    with pytest.raises(RuntimeError, match="meta"):
        belt.step(torch.ones((), device="meta"))


def bare(**options: Any) -> tuple[SeatBelt, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return SeatBelt(model, optimizer, **options), optimizer


def test_the_first_losses_stand_for_predicting_nothing_unless_it_is_given() -> None:
    belt, optimizer = bare()
    losses = 5 * [2.0] + 35 * [0.4] + 20 * [1.5]
    events = []
    for loss in losses:
        optimizer.step()
        events.append(belt.step(loss))
    assert belt.watch.nothing == 2.0
    assert events[-1] is not None and events[-1].nothing == 2.0


@pytest.mark.parametrize(
    ("loss", "seen"),
    [("0.5", "'0.5'"), (None, "None"), (torch.ones(3), r"shape \(3,\)"), (torch.tensor(1), "torch.int64")],
)
def test_a_loss_that_is_no_number_is_refused_in_one_line(loss: Any, seen: str) -> None:
    belt, optimizer = bare()
    optimizer.step()
    with pytest.raises(TypeError, match=f"^SeatBelt.step needs the loss of the step, .*{seen}.*$"):
        belt.step(loss)


def test_an_optimiser_of_another_model_and_what_is_no_optimiser_are_refused() -> None:
    model, other = nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="of another model: 2 of its weights are not in Linear"):
        SeatBelt(model, other)
    with pytest.raises(TypeError, match="needs a torch.optim.Optimizer, got Linear"):
        SeatBelt(model, model)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="nothing is the loss of predicting nothing, a number above 0, got nan"):
        SeatBelt(model, torch.optim.SGD(model.parameters(), lr=0.1), nothing=math.nan)


def test_no_memory_for_four_snapshots_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "free_memory", lambda: 100.0)
    model = nn.Linear(10, 10)
    # 110 weights in float32 with Adam's two moments, four times.
    with pytest.raises(MemoryError, match=r"4 snapshots of Linear .* take .*, .* are free: train without"):
        SeatBelt(model, torch.optim.AdamW(model.parameters()))


def test_two_calls_for_one_step_of_the_optimiser_are_refused_unless_the_loop_left_it_out() -> None:
    belt, optimizer = bare()
    optimizer.step()
    belt.step(GOOD)
    with pytest.raises(RuntimeError, match="called twice for one step of its optimiser: call it once after"):
        belt.step(GOOD)
    assert belt.step(GOOD, updated=False) is None
    assert belt.count == 2


def test_a_scaler_may_leave_steps_out_and_its_scale_is_put_back() -> None:
    torch.manual_seed(0)
    model, scaler = nn.Linear(2, 1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    belt = SeatBelt(model, optimizer, nothing=1.0, scaler=scaler)
    event = None
    for step in range(120):
        optimizer.zero_grad()
        factor = math.inf if step in (3, 101, 102) else 1.0
        scaler.scale(model(torch.ones(4, 2)).mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        event = belt.step(BAD if step >= 100 else GOOD)
    assert event is not None and event.back_to == 40
    assert scaler.get_scale() == 512.0


def test_micro_batches_are_one_step() -> None:
    loop = Loop(belted=False)
    belt = SeatBelt(loop.model, loop.optimizer, nothing=1.0)
    for step in range(40):
        for _ in range(3):
            (loop.model(torch.randn(4, 4)).square().mean() / 3).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        belt.step(BAD if step >= 20 else GOOD)
    assert belt.factor == 0.7 and belt.count == 40


@pytest.mark.parametrize("kind", ["module", "list of averages"])
def test_any_average_of_the_weights_is_put_back(kind: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shadow = copy.deepcopy(model)
    ema = shadow if kind == "module" else SimpleNamespace(shadow_params=list(shadow.parameters()), updates=0)
    belt = SeatBelt(model, optimizer, ema, nothing=1.0)
    before = [weight.detach().clone() for weight in shadow.parameters()]
    for loss in 20 * [GOOD] + 20 * [BAD]:
        optimizer.step()
        for weight in shadow.parameters():
            weight.data.add_(1.0)
        if not isinstance(ema, nn.Module):
            ema.updates += 1
        belt.step(loss)
    assert same([weight.detach() for weight in shadow.parameters()], before)
    assert isinstance(ema, nn.Module) or ema.updates == 0


def test_a_loop_that_was_killed_and_resumed_ends_as_one_that_never_was_to_the_bit() -> None:
    told = 90 * [GOOD] + 40 * [BAD] + 50 * [GOOD]
    whole = Loop().train(told)
    stopped = Loop().train(told[:107])
    file = io.BytesIO()
    parts = stopped.model, stopped.optimizer, stopped.belt
    saved = [part.state_dict() for part in parts], stopped.ema.state_dict(), stopped.ema.step, torch.get_rng_state()
    torch.save(saved, file)
    resumed = Loop()
    states, ema, updates, random = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    for part, state in zip((resumed.model, resumed.optimizer, resumed.belt), states, strict=True):
        part.load_state_dict(state)
    resumed.ema.load_state_dict(ema, step=updates)
    torch.set_rng_state(random)
    resumed.train(told[107:])
    assert same(resumed.state(), whole.state())
    assert [str(event) for event in stopped.restorations + resumed.restorations] == list(map(str, whole.restorations))
    assert resumed.belt.factor == whole.belt.factor < 1


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda loop: pickle.loads(pickle.dumps(loop))], ids=["deep", "pickle"]
)
@pytest.mark.parametrize("steps", [0, 30, 39])
def test_a_copy_with_its_model_and_optimiser_acts_on_them_and_the_original_on_its_own(copied: Any, steps: int) -> None:
    loop = Loop().train(steps * [GOOD])
    other = copied(loop)
    untouched = loop.state()
    other.train((60 - steps) * [GOOD] + 20 * [BAD])
    assert other.restorations[0].back_to == 0
    assert same(loop.state()[:-1], untouched[:-1])
    assert loop.belt.factor == 1.0


def test_a_second_belt_takes_the_place_of_the_first_and_a_removed_one_leaves_nothing_behind() -> None:
    loop = Loop()
    before = [len(module._forward_hooks) for module in Loop(belted=False).model.modules()]
    first, loop.belt = loop.belt, SeatBelt(loop.model, loop.optimizer, loop.ema, nothing=1.0)
    loop.train(40 * [GOOD])
    assert len(loop.optimizer._optimizer_step_pre_hooks) == 1
    with pytest.raises(RuntimeError, match="was removed, or its optimiser was given another one"):
        first.step(GOOD)
    loop.belt.remove()
    loop.belt.remove()
    assert not loop.optimizer._optimizer_step_pre_hooks and not loop.optimizer._optimizer_step_post_hooks
    assert [len(module._forward_hooks) for module in loop.model.modules()] == before


def test_a_step_that_fails_leaves_the_rate_as_the_scheduler_set_it() -> None:
    loop = Loop().train(20 * [GOOD] + 20 * [BAD])
    loop.model[0].weight.grad = torch.zeros(8, 4).to_sparse()  # Which AdamW refuses.
    with pytest.raises(RuntimeError):
        loop.optimizer.step()
    loop.train([GOOD])
    assert loop.optimizer.param_groups[0]["lr"] == 1e-2


def test_snapshots_lie_further_apart_the_longer_a_run_is() -> None:
    loop = Loop(belted=False)
    belt = SeatBelt(loop.model, loop.optimizer, nothing=1.0)
    for number in range(9_990, 11_011):
        loop.optimizer.step()
        belt.step(GOOD, number=number)
    steps = [snapshot.step for snapshot in belt.ring]
    assert len(steps) == KEEP
    assert {later - earlier for earlier, later in zip(steps, steps[1:], strict=False)} == {160}


def test_a_rebase_forgets_what_a_checkpoint_now_holds_but_not_while_the_loss_rises() -> None:
    loop = Loop().train(90 * [GOOD])
    loop.belt.rebase()
    assert [snapshot.step for snapshot in loop.belt.ring] == [90]
    loop.train(50 * [GOOD])
    ring = [snapshot.step for snapshot in loop.belt.ring]
    loop.train(5 * [BAD])
    loop.belt.rebase()
    assert [snapshot.step for snapshot in loop.belt.ring] == ring and len(ring) > 1


def test_accelerates_optimizer_is_seen_through() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belt = SeatBelt(model, SimpleNamespace(optimizer=optimizer))  # pyright: ignore[reportArgumentType]
    assert belt.subject.optimizer is optimizer
    assert isinstance(belt.watch, LossWatch)
