"""The protocol between calls and ranks over random interleavings: right as it is, and planted faults are found."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.support.protocol_model import (
    ABORTED,
    BAD_IDS,
    EXPERTS,
    OVERFLOW,
    REFUSED,
    SIGNATURE,
    TIMEOUT,
    Call,
    Machine,
    ModelError,
    Protocol,
    random_calls,
)

Made = list[list[list[str]]]


def judge(machine: Machine, made: Made) -> Made:
    """Nothing wrong was returned; a rank that returned NaN tells its host why, and all is right after `reset`."""
    parts = {p for mine in made for call in mine for p in call}
    if "bad" in parts:
        raise ModelError("a sum over rows that were not there, and not NaN")
    for rank, mine in enumerate(made):
        if not machine.reports[rank] and any(p == "nan" for call in mine for p in call):
            raise ModelError(f"NaN on rank {rank} and no word to its host")
    if "nan" in parts:
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


def impatient_rank(seed: int, protocol: Protocol) -> Made:
    """Any wait's time may be up on rank 0 only; the others have to hear of it."""
    rng = random.Random(seed)
    machine = Machine(rng.choice((2, 3)), rng.choice((1, 2)), protocol, seed)
    return judge(machine, machine.run(random_calls(rng, machine.ranks, 4), expire=0.01, who=(0,)))


def given_up_at_the_end(seed: int, protocol: Protocol) -> Made:
    """The time of those who wait for the last rows may be up."""
    rng = random.Random(seed)
    slots = tuple(tuple(rng.randrange(3 * EXPERTS) for _ in range(3)) for _ in range(3))
    machine = Machine(3, 1, protocol, seed)
    return judge(machine, machine.run([Call(slots, capacity=4)], expire=0.03, where=("HOME",)))


def replayed(seed: int, protocol: Protocol) -> Made:
    """Any wait's time may be up, and all ranks go on making calls, as graphs are replayed."""
    rng = random.Random(seed)
    machine = Machine(rng.choice((2, 3)), rng.choice((1, 2)), protocol, seed)
    made = judge(machine, machine.run(random_calls(rng, machine.ranks, 5), expire=0.003, replayed=True))
    for mine in made:
        failed = ["nan" in call for call in mine]
        if any(early and not late for early, late in zip(failed, failed[1:], strict=False)):
            raise ModelError("a result behind a call that had been given up")
    return made


def differing(seed: int, protocol: Protocol) -> Made:
    """Two ranks make different calls: of other shapes, or one of them with the plan given."""
    rng = random.Random(seed)
    machine = Machine(2, rng.choice((1, 2)), protocol, seed)
    slots = tuple(tuple(rng.randrange(2 * EXPERTS) for _ in range(3)) for _ in range(2))
    given = rng.choice((False, True, (False, True), (True, False)))
    signatures = (0, rng.randrange(2)) if isinstance(given, tuple) else (0, 1)
    made = machine.run([Call(slots), Call(slots, plan_given=given, signatures=signatures), Call(slots)])
    for rank, mine in enumerate(made):
        if "right" in mine[1] or len(mine) > 2:
            raise ModelError("a result of different calls")
        if machine.reports[rank] not in (SIGNATURE, ABORTED):  # the record may be later than a patient reader waits
            raise ModelError(f"rank {rank} hears {machine.reports[rank]}")
    if SIGNATURE not in machine.reports:
        raise ModelError("nobody hears what differs")
    return judge(machine, made)


def ended_alike(seed: int, protocol: Protocol) -> Made:
    """Calls that all ranks end because of what the headers say: the next call is right without a reset."""
    rng = random.Random(seed)
    machine = Machine(rng.choice((2, 3)), rng.choice((1, 2)), protocol, seed)
    calls: list[Call] = []
    for call in random_calls(rng, machine.ranks, 3):
        who = (rng.randrange(machine.ranks),)
        wrong = Call(call.slots, plan_given=call.plan_given, refuse=who)
        if rng.random() < 0.3:
            wrong = Call(call.slots, bad_ids=who)
        calls += [call, wrong]
    calls += random_calls(rng, machine.ranks, 2)
    made = machine.run(calls)
    for rank, mine in enumerate(made):
        if len(mine) < len(calls):
            raise ModelError(f"rank {rank} makes no call after call {len(mine)}")
        for call, parts in zip(calls, mine, strict=True):
            want = set() if rank in call.refuse else {"nan"} if call.refuse or call.bad_ids else {"right"}
            if set(parts) != want:
                raise ModelError(f"{parts} of {call}")
        if any("nan" in parts for parts in mine) and machine.reports[rank] not in (REFUSED, BAD_IDS):
            raise ModelError(f"rank {rank} hears {machine.reports[rank]}")
    return judge(machine, made)


@pytest.mark.parametrize("protocol", [Protocol(), Protocol(home_of="exchanged")], ids=["as it is", "HOME of partners"])
@pytest.mark.parametrize(("scenario", "seeds"), [(mixed, 60), (strangers, 100)])
def test_every_interleaving_is_right(scenario, seeds, protocol):
    for seed in range(seeds):
        made = scenario(seed, protocol)
        assert len({len(mine) for mine in made}) == 1
        assert {p for mine in made for call in mine for p in call} == {"right"}


@pytest.mark.parametrize(
    ("scenario", "seeds"), [(impatient, 60), (impatient_rank, 60), (given_up_at_the_end, 200), (replayed, 80)]
)
def test_expired_waits_end_the_call_everywhere_and_nothing_wrong_is_returned(scenario, seeds):
    made = [scenario(seed, Protocol()) for seed in range(seeds)]
    assert {p for one in made for mine in one for call in mine for p in call} == {"right", "nan"}


@pytest.mark.parametrize("scenario", [differing, ended_alike])
def test_what_headers_say_ends_the_call_on_all_ranks(scenario):
    for seed in range(80):
        scenario(seed, Protocol())


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
        assert machine.reports[0] in (TIMEOUT, ABORTED) and machine.reports[2] in (TIMEOUT, ABORTED)
        judge(machine, made)


def test_overflow_is_decided_alike():
    for seed in range(60):
        machine = Machine(2, 2, Protocol(), seed)
        full = Call(((0, 0, 0, 1), (0, 0)), capacity=2)
        fits = Call(((0, 2), (1, 3)), capacity=2)
        made = machine.run([fits, full, fits, full, fits])
        assert all([set(parts) for parts in mine] == [{"right"}, {"nan"}] * 2 + [{"right"}] for mine in made)
        assert machine.reports == [OVERFLOW] * 2
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
    "who gives up adds to HOME all the same": (given_up_at_the_end, Protocol(signs="all")),
    "only its own rank hears of an error": (impatient_rank, Protocol(aborts="own")),
    "an abort word ends one call only": (replayed, Protocol(abort_ends="one")),
    "a launch does not look for an abort word": (replayed, Protocol(looks_first=False)),
    "signatures are not compared": (differing, Protocol(compares=False)),
    "a call with the plan given does not announce its signature": (differing, Protocol(lists=False)),
    "the signature is written behind the header's release": (mixed, Protocol(words_first=False)),
    "nobody heeds a status": (ended_alike, Protocol(heeds=False)),
    "a rank that refuses does not add to HOME": (ended_alike, Protocol(refusal_signs=False)),
    "CTA 0 alone reports": (impatient, Protocol(reports="first")),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name):
    scenario, protocol = FAULTS[name]
    with pytest.raises(ModelError):
        for seed in range(500):
            scenario(seed, protocol)
