"""The protocol between calls and ranks over random interleavings: right as it is, and planted faults are found."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.support.protocol_model import EXPERTS, Call, Machine, ModelError, Protocol, random_calls

Made = list[list[list[str]]]


def judge(machine: Machine, made: Made) -> Made:
    """Nothing wrong was returned; if a call was given up, somebody says why, and all is right after `reset`."""
    parts = {p for mine in made for call in mine for p in call}
    if "bad" in parts:
        raise ModelError("a sum over rows that were not there, and not NaN")
    if "nan" in parts:
        if not any(machine.errors):
            raise ModelError("NaN without a record of an error")
        machine.reset()
        again = machine.run(random_calls(machine.rng, machine.ranks, 2))
        if {p for mine in again for call in mine for p in call} != {"right"}:
            raise ModelError("wrong after reset")
    return made


def mixed(seed: int, protocol: Protocol) -> Made:
    """Changing T, routing and directions."""
    rng = random.Random(seed)
    machine = Machine(rng.choice((1, 2, 2, 3)), rng.choice((1, 2, 3)), protocol, seed)
    return judge(machine, machine.run(random_calls(rng, machine.ranks, 5, lonely=seed % 3 == 0)))


def strangers(seed: int, protocol: Protocol) -> Made:
    """Two ranks that never exchange a row."""
    call = Call(((0,), (EXPERTS,)) if seed % 2 else ((), ()), capacity=1)
    again = Call(call.slots, capacity=1, plan_given=True)
    machine = Machine(2, 1, protocol, seed)
    return judge(machine, machine.run([call, again, again] * 3))


def impatient(seed: int, protocol: Protocol) -> Made:
    """Any wait's time may be up."""
    rng = random.Random(seed)
    machine = Machine(rng.choice((1, 2, 3)), rng.choice((1, 2)), protocol, seed)
    return judge(machine, machine.run(random_calls(rng, machine.ranks, 4), expire=0.003))


def given_up_at_the_end(seed: int, protocol: Protocol) -> Made:
    """The time of those who wait for the last rows may be up."""
    rng = random.Random(seed)
    slots = tuple(tuple(rng.randrange(3 * EXPERTS) for _ in range(3)) for _ in range(3))
    machine = Machine(3, 1, protocol, seed)
    return judge(machine, machine.run([Call(slots, capacity=4)], expire=0.03, where=("HOME",)))


@pytest.mark.parametrize("protocol", [Protocol(), Protocol(home_of="exchanged")], ids=["as it is", "HOME of partners"])
@pytest.mark.parametrize(("scenario", "seeds"), [(mixed, 60), (strangers, 100)])
def test_every_interleaving_is_right(scenario, seeds, protocol):
    for seed in range(seeds):
        made = scenario(seed, protocol)
        assert len({len(mine) for mine in made}) == 1
        assert {p for mine in made for call in mine for p in call} == {"right"}


@pytest.mark.parametrize(("scenario", "seeds"), [(impatient, 100), (given_up_at_the_end, 500)])
def test_expired_waits_end_the_call_everywhere_and_nothing_wrong_is_returned(scenario, seeds):
    made = [scenario(seed, Protocol()) for seed in range(seeds)]
    assert {p for one in made for mine in one for call in mine for p in call} == {"right", "nan"}


@pytest.mark.parametrize("plan_given", [False, True])
def test_rank_that_never_launches(plan_given):
    slots = ((0, 3, 1), (2, -1), (4, 0))
    for seed in range(30):
        machine = Machine(3, 2, Protocol(), seed)
        calls = [Call(slots, plan_given=plan_given), Call(slots, plan_given=plan_given, launches=(0, 2))]
        made = machine.run(calls, expire=1e-9)  # time is up only where nothing else can go on
        assert [len(mine) for mine in made] == [2, 1, 2]
        assert all(set(mine[0]) == {"right"} for mine in made)
        assert set(made[0][1] + made[2][1]) == {"nan"}
        judge(machine, made)


def test_overflow_is_decided_alike():
    for seed in range(60):
        machine = Machine(2, 2, Protocol(), seed)
        full = Call(((0, 1, 0, 1), (0, 0)), capacity=1)
        made = machine.run([Call(((0, 2), (1, 3))), full])
        assert all(set(mine[0]) == {"right"} and set(mine[1]) == {"nan"} for mine in made)
        judge(machine, made)


FAULTS: dict[str, tuple[Callable[[int, Protocol], Made], Protocol]] = {
    "one copy of a header": (strangers, Protocol(header_copies=1, home_of="exchanged")),
    "calls end before all headers are there": (strangers, Protocol(headers_of="exchanged", home_of="exchanged")),
    "one set of counters": (mixed, Protocol(counter_sets=1)),
    "counters are never zeroed": (mixed, Protocol(clears=False)),
    "headers reach the GPU only": (mixed, Protocol(header_scope="gpu")),
    "rows of y reach the GPU only": (mixed, Protocol(home_scope="gpu")),
    "the first CTA advances the call": (mixed, Protocol(epoch_by="first")),
    "the first CTA announces the rank": (mixed, Protocol(announces="first")),
    "the sum does not look at the abort word": (impatient, Protocol(checks_abort=False)),
    "only its own rank hears of an error": (impatient, Protocol(aborts="own", passes_on=False)),
    "who gives up does not pass the abort on": (given_up_at_the_end, Protocol(passes_on=False)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name):
    scenario, protocol = FAULTS[name]
    with pytest.raises(ModelError):
        for seed in range(500):
            scenario(seed, protocol)
