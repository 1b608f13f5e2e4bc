"""The fused kernel's protocol between CTAs, ranks and calls as a state machine, run over random interleavings.

Every flag operation and every access to shared data is one step; which thread takes the next one is drawn. Flags carry
what was released into them: an acquire takes over only what its scope reaches ("gpu" not across ranks), so data read
without an order behind its write counts as bad, even where its value happens to be right. Bad data stays bad on its way
(xq -> pool -> h -> y); a call fails the model if it sums a bad y and does not say NaN, if nothing can go on, or if a
launch that finds its call given up touches a peer's memory.

Each step names the function of cute_kernels that it stands for. Left out: what happens inside a CTA (mbarriers,
proxies, the loader's pauses) and the arithmetic.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Generator, Iterator

BLOCK_ROWS = 4  # of a block, where the kernel has 128
EXPERTS = 2  # of a rank
N1, N2 = 2, 1  # GEMM-1 and GEMM-2 tiles of a block
IDLE, ABORTED, TIMEOUT, OVERFLOW, BAD_IDS, REFUSED, SIGNATURE = 0, 1, 2, 4, 8, 16, 32

Steps = Generator["Wait | None", bool, None]
Verdict = Generator["Wait | None", bool, bool]
Clock = dict[tuple, int]


@dataclasses.dataclass(frozen=True)
class Protocol:
    """What the kernel does; every other value is a fault to be found.

    Attributes:
        header_copies: of each header, used by calls in turn. counter_sets: of each counter, likewise.
        clears: calls zero the set of the next call.
        headers_of: where the plan is given, "all" headers are acquired, or only those of "exchanged" rows.
        home_of: "all" ranks add to a rank's HOME, or only those that "exchanged" rows with it. Not a fault by itself.
        header_scope, home_scope: of the stores and adds that other ranks acquire.
        epoch_by: which CTA at PLACED advances the number of the call.
        announces: the header is written by the "last" CTA at PLACED, or by the "first" one that comes there.
        aborts: on whose blobs an error raises the abort word.
        signs: which CTAs add to HOME: those that "finished" their tiles, or "all".
        abort_ends: which calls an abort word n ends: n and "later" ones, or "one".
        looks_first: a launch looks at the abort word before it touches a peer.
        compares, heeds: the signatures, the status in the headers of all ranks.
        words_first: status and signature are written before the header is released.
        lists: where the plan is given, the header's word LISTED is written as well.
        refusal_signs: a rank that refuses adds to HOME of all ranks.
        reports: which CTAs whose sum failed report to the host, "any" or "first" (CTA 0).
    """

    header_copies: int = 2
    counter_sets: int = 2
    clears: bool = True
    headers_of: str = "all"
    home_of: str = "all"
    header_scope: str = "sys"
    home_scope: str = "sys"
    epoch_by: str = "last"
    announces: str = "last"
    aborts: str = "all"
    signs: str = "finished"
    abort_ends: str = "later"
    looks_first: bool = True
    compares: bool = True
    heeds: bool = True
    words_first: bool = True
    lists: bool = True
    refusal_signs: bool = True
    reports: str = "any"


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of all ranks.

    Attributes:
        slots: for each rank the expert of each of its slots (one a token), -1: none.
        capacity: blocks of a rank's pool.
        plan_given: offsets and row order come from the caller (the backward, a repeated forward), of all or each.
        launches: which ranks make the call.
        signatures: of each rank; (): alike.
        bad_ids: ranks with an id out of range. refuse: ranks whose host finds an error.
    """

    slots: tuple[tuple[int, ...], ...]
    capacity: int = 8
    plan_given: bool | tuple[bool, ...] = False
    launches: tuple[int, ...] | None = None
    signatures: tuple[int, ...] = ()
    bad_ids: tuple[int, ...] = ()
    refuse: tuple[int, ...] = ()

    def given(self, rank: int) -> bool:
        return self.plan_given if isinstance(self.plan_given, bool) else self.plan_given[rank]

    def signature(self, rank: int) -> tuple[int, bool]:
        return (self.signatures[rank] if self.signatures else 0, self.given(rank))


class ModelError(AssertionError):
    """The protocol let something wrong happen."""


@dataclasses.dataclass
class Wait:
    """A thread that may go on once the flag equals the target, the abort word its call, or its time is up."""

    rank: int
    flag: tuple
    target: int
    epoch: int


class Thread:
    """Steps of one role of one CTA, with what it has seen: the latest step of every thread that is ordered before."""

    def __init__(self, name: tuple, clock: Clock, steps: Callable[[Thread], Steps]):
        self.name, self.rank = name, name[0]
        self.clock = {**clock, name: clock.get(name, 0) + 1}
        self.steps = steps(self)
        self.waiting: Wait | None = None
        self.weight = 1.0
        self.is_late = False  # began when its call had been given up: peers are out of bounds


@dataclasses.dataclass
class Launch:
    """A call on one rank while it runs. parts: what each CTA wrote to out, "right", "nan" or "bad"."""

    number: int
    call: Call
    threads: set[tuple] = dataclasses.field(default_factory=set)
    parts: list[str] = dataclasses.field(default_factory=list)


class Machine:
    """Ranks that make calls on their workspaces."""

    def __init__(self, num_ranks: int, num_ctas: int, protocol: Protocol | None = None, seed: int = 0):
        self.ranks, self.ctas, self.protocol = num_ranks, num_ctas, protocol or Protocol()
        self.rng = random.Random(seed)
        self.change = 10.0 ** -self.rng.uniform(1.5, 3.5)  # how often speeds change
        self.speeds: dict[tuple, float] = {}
        self.threads: dict[tuple, Thread] = {}
        self.stream: list[Clock] = [{} for _ in range(num_ranks)]
        self.reset()

    def reset(self) -> None:
        """Workspace.reset of all ranks: flags, headers and counters are zero; data stay as they are."""
        assert not self.threads
        self.flags: dict[tuple, int] = {}
        self.released: dict[tuple, list[tuple[int, str, Clock]]] = {}
        self.data: dict[tuple, tuple[int, bool, tuple, int]] = getattr(self, "data", {})
        self.reports: list[int] = [IDLE] * self.ranks  # what the host of each rank reads
        self.lines: dict[tuple[int, int], tuple[int, int]] = {}  # (rank, origin): (call, code)
        self.claimed = [0] * self.ranks
        self.words: dict[tuple, tuple] = {}  # status and signature of headers
        self.serial = getattr(self, "serial", 0) + 1000  # no data of before may pass for those of a later call
        merged: Clock = {}
        for clock in self.stream:
            join(merged, clock)
        self.stream = [dict(merged) for _ in range(self.ranks)]

    # ------------------------------------------------------------ running

    def run(
        self,
        calls: list[Call],
        expire: float = 0.0,
        where: tuple[str, ...] = (),
        who: tuple[int, ...] = (),
        replayed: bool = False,
    ) -> list[list[list[str]]]:
        """Makes these calls; each rank's next one begins once its last one has ended, unless a reset is needed.

        Args:
            expire: share of the steps at which a waiting thread's time is up. If nothing can go on, one's time is up
                where expire > 0; otherwise that is an error.
            where: only at flags of these names, while anything can go on; (): at all.
            who: only on these ranks; (): on all.
            replayed: the next one begins in any case, as the replay of a graph does.

        Returns: for each rank and call made, what each CTA wrote.
        """
        made: list[list[Launch]] = [[] for _ in range(self.ranks)]
        for _ in range(200_000):
            self.begin_launches(made, calls, replayed)
            if not self.threads:
                return [[launch.parts for launch in mine] for mine in made]
            ready = [t for t in self.threads.values() if self.may_go_on(t)]
            late = [t for t in self.threads.values() if t.waiting is not None and not self.may_go_on(t)]
            if self.rng.random() < self.change:
                self.change_speeds()
            due = [t for t in late if t.waiting and (not ready or not where or t.waiting.flag[0] in where)]
            due = [t for t in due if not who or t.rank in who]
            if due and expire and (not ready or self.rng.random() < expire):
                self.step(self.rng.choice(due), expired=True, made=made)
            elif ready:
                self.step(self.rng.choices(ready, [t.weight for t in ready])[0], expired=False, made=made)
            else:
                waits = {(t.name, t.waiting.flag, t.waiting.target) for t in late if t.waiting}
                raise ModelError(f"nothing can go on: {sorted(map(str, waits))[:4]}")
        raise ModelError("no end")

    def begin_launches(self, made: list[list[Launch]], calls: list[Call], replayed: bool) -> None:
        for rank in range(self.ranks):
            mine = made[rank]
            running = bool(mine and mine[-1].threads)
            dead = self.reports[rank] in (ABORTED, TIMEOUT, SIGNATURE) and not replayed
            if running or dead or len(mine) == len(calls):
                continue
            launches = calls[len(mine)].launches
            if launches is not None and rank not in launches:
                continue
            launch = Launch(len(mine) + 1, calls[len(mine)])
            mine.append(launch)
            if rank in launch.call.refuse:
                name = (rank, 0, "refusal")
                self.spawn(launch, name, self.stream[rank], lambda t, n=launch: Cta(self, t, n).refusal())
                continue
            for cta in range(self.ctas):
                self.spawn(launch, (rank, cta, "main"), self.stream[rank], lambda t, n=launch: Cta(self, t, n).main())

    def spawn(self, launch: Launch, name: tuple, clock: Clock, steps: Callable[[Thread], Steps]) -> None:
        self.threads[name] = Thread(name, clock, steps)
        self.weigh(self.threads[name])
        launch.threads.add(name)

    def weigh(self, t: Thread) -> None:
        """How fast a thread is, by orders of magnitude: its rank, its role there, itself."""
        for key in (t.name[:1], (t.name[0], t.name[2]), t.name):
            t.weight *= self.speeds.setdefault(key, 10.0 ** -self.rng.uniform(0, 4))

    def change_speeds(self) -> None:
        self.speeds.clear()
        for t in self.threads.values():
            t.weight = 1.0
            self.weigh(t)

    def may_go_on(self, t: Thread) -> bool:
        w = t.waiting
        return w is None or self.value(w.rank, w.flag) == w.target or self.is_over(w.rank, w.epoch)

    def is_over(self, rank: int, epoch: int) -> bool:
        """flags.is_aborted"""
        aborted = self.value(rank, ("ABORT",))
        return aborted != 0 and (aborted == epoch or (aborted < epoch and self.protocol.abort_ends == "later"))

    def step(self, t: Thread, expired: bool, made: list[list[Launch]]) -> None:
        t.waiting = None
        if expired:  # the next steps of whoever gives up may take long
            t.weight *= 1e-6
        try:
            t.waiting = t.steps.send(expired or None)  # type: ignore[arg-type]
        except StopIteration:
            del self.threads[t.name]
            launch = made[t.rank][-1]
            launch.threads.discard(t.name)
            join(self.stream[t.rank], t.clock)  # the end of a launch is ordered before the next one

    # ------------------------------------------------------------ flags (cute_kernels/flags.py)

    def value(self, rank: int, flag: tuple) -> int:
        return self.flags.get((rank, *flag), 0)

    def store(self, t: Thread, rank: int, flag: tuple, value: int, scope: str = "") -> None:
        """scope: of a release; "": relaxed."""
        self.touch(t, rank)
        self.flags[(rank, *flag)] = value
        self.released[(rank, *flag)] = [self.release(t, scope)] if scope else []

    def add(self, t: Thread, rank: int, flag: tuple, value: int, scope: str = "") -> int:
        """Returns the value before."""
        self.touch(t, rank)
        before = self.value(rank, flag)
        self.flags[(rank, *flag)] = before + value
        if scope:
            self.released.setdefault((rank, *flag), []).append(self.release(t, scope))
        return before

    def touch(self, t: Thread, rank: int) -> None:
        if t.is_late and rank != t.rank:
            raise ModelError(f"{t.name} touches rank {rank} in a call that had been given up before it began")

    def release(self, t: Thread, scope: str) -> tuple[int, str, Clock]:
        seen = dict(t.clock)
        t.clock[t.name] += 1
        return t.rank, scope, seen

    def acquire(self, t: Thread, rank: int, flag: tuple, scope: str) -> None:
        for writer, released, seen in self.released.get((rank, *flag), ()):
            if writer == t.rank or (released == "sys" and scope == "sys"):
                join(t.clock, seen)

    # ------------------------------------------------------------ data

    def write(self, t: Thread, key: tuple, number: int, good: bool = True) -> None:
        self.touch(t, key[0])
        self.data[key] = (self.serial + number, good, t.name, t.clock[t.name])

    def read(self, t: Thread, key: tuple, number: int) -> bool:
        """Whether this is call `number`'s, made of good data, and its write is ordered before."""
        written, good, writer, at = self.data.get(key, (-1, False, (), 0))
        return good and written == self.serial + number and t.clock.get(writer, 0) >= at


def join(clock: Clock, other: Clock) -> None:
    for name, at in other.items():
        if clock.get(name, 0) < at:
            clock[name] = at


class Cta:
    """One CTA of one launch. Each `yield` lets other threads go first."""

    def __init__(self, machine: Machine, thread: Thread, launch: Launch):
        self.m, self.t, self.launch, self.p = machine, thread, launch, machine.protocol
        self.rank, self.cta = thread.name[:2]
        self.call = launch.call
        self.epoch, self.parity, self.copy = 0, 0, 0
        self.plan_good = True
        self.given = self.call.given(self.rank)
        self.over, self.stopped = False, False  # fate
        everyone = list(range(machine.ranks))
        exchanged = [r for r in everyone if r == self.rank or self.exchanges(r)]
        self.home_ranks = everyone if self.p.home_of == "all" else exchanged
        self.header_ranks = everyone if self.p.headers_of == "all" or not self.given else exchanged

    def exchanges(self, other: int) -> bool:
        there = any(e // EXPERTS == other for e in self.call.slots[self.rank])
        return there or any(e // EXPERTS == self.rank for e in self.call.slots[other] if e >= 0)

    # ------------------------------------------------------------ flags.wait_for, flags.record

    def wait(self, t: Thread, flag: tuple, target: int, scope: str) -> Verdict:
        """flags.wait_for on this rank's own memory."""
        while True:
            if self.m.value(self.rank, flag) == target:
                self.m.acquire(t, self.rank, flag, scope)
                return True
            expired = yield Wait(self.rank, flag, target, self.epoch)
            if expired:
                yield from self.record(t, TIMEOUT)
                return False
            if self.m.value(self.rank, flag) != target:
                yield
                if self.m.is_over(self.rank, self.epoch):
                    return False

    def record(self, t: Thread, code: int) -> Steps:
        """flags.record: on one rank after the other, the record (of this rank's first error), then the abort word."""
        first, self.m.claimed[self.rank] = self.m.claimed[self.rank] != self.epoch, self.epoch
        for r in range(self.m.ranks):
            if self.p.aborts == "all" or r == self.rank:
                yield
                self.m.touch(t, r)
                if first:
                    self.m.lines[(r, self.rank)] = (self.epoch, code)
                yield
                self.m.store(t, r, ("ABORT",), self.epoch, "sys")

    def end_call(self, code: int) -> None:
        """errors.end_call: all ranks find this out for themselves."""
        self.over = True
        if self.cta == 0:
            self.m.lines[(self.rank, self.rank)] = (self.epoch, code)

    def report(self) -> Steps:
        """errors.report, find_record: unless the host has not seen the report before."""
        m, found = self.m, []
        call = m.value(self.rank, ("ABORT",)) or self.epoch
        for _ in range(300):  # another thread of the rank that raised the abort word may still be writing the record
            lines = [m.lines.get((self.rank, r), (0, 0)) for r in range(m.ranks)]
            found = [code for at, code in lines if at == call]
            if found:
                break
            yield
        if m.reports[self.rank] == IDLE and (self.p.reports == "any" or self.cta == 0):
            m.reports[self.rank] = found[0] if found else ABORTED

    # ------------------------------------------------------------ prologue.py

    def main(self) -> Steps:
        """forward.kernel: the prologue, then the roles."""
        t, m = self.t, self.m
        yield
        self.epoch = m.value(self.rank, ("EPOCH",)) + 1  # forward.bind_arguments
        self.parity, self.copy = self.epoch % self.p.counter_sets, self.epoch % self.p.header_copies
        if self.epoch != self.launch.number:
            raise ModelError(f"rank {self.rank} takes call {self.launch.number} for call {self.epoch}")
        t.is_late = m.value(self.rank, ("ABORT",)) != 0
        self.stopped = t.is_late and self.p.looks_first  # errors.begin
        yield from self.clear_counters()
        for token in range(self.cta, len(self.call.slots[self.rank]), m.ctas):  # prologue.quantize_tokens
            yield
            m.write(t, (self.rank, "xq", token), self.epoch)
        ok = yield from self.sort()
        rows = self.rows_of(self.rank) if ok else []
        for b in self.padding(rows):  # prologue.fill_padding: fence, then relaxed adds
            yield
            m.add(t, self.rank, ("arrive", self.parity, b), 1, "gpu")
        codes = yield from self.order_rows(rows)
        yield from self.announce("PLACED")
        ready = yield from self.await_headers("EPOCH")
        if ready and self.given:
            ready = yield from self.judge_headers()
        rows = rows if ready else []
        m.spawn(self.launch, (self.rank, self.cta, "pull"), t.clock, lambda u: self.pull(u, rows, codes))
        yield from self.tiles(rows)
        m.spawn(self.launch, (self.rank, self.cta, "courier"), t.clock, self.home)
        m.threads[(self.rank, self.cta, "courier")].is_late = t.is_late
        yield from self.combine()

    def clear_counters(self) -> Steps:
        """prologue.clear_counters: the set of the next call."""
        if not self.p.clears:
            return
        other = (self.epoch + 1) % self.p.counter_sets
        for b in range(self.cta, self.call.capacity, self.m.ctas):
            for name in ("arrive", "done"):
                yield
                self.m.store(self.t, self.rank, (name, other, b), 0)
        if self.cta == 0:
            for name in ("CLAIM", "COUNTED", "LISTED", "PLACED", "HOME"):
                yield
                self.m.store(self.t, self.rank, (name, other), 0)

    def sort(self) -> Verdict:
        """prologue.sort: count, sum_counts, place, make_segments."""
        t, m, n = self.t, self.m, self.epoch
        if self.given:  # prologue.given_segments
            return True
        yield
        m.write(t, (self.rank, "counts", self.cta), n)
        yield
        m.add(t, self.rank, ("COUNTED", self.parity), 1, "gpu")
        ok = yield from self.wait(t, ("COUNTED", self.parity), m.ctas, "gpu")
        if not ok or self.stopped:
            return False
        self.plan_good &= all(m.read(t, (self.rank, "counts", c), n) for c in range(m.ctas))
        if self.cta == 0:
            for r in range(m.ranks):
                yield
                m.write(t, (r, "body", self.rank, self.copy), n, self.plan_good)
        yield
        m.write(t, (self.rank, "slots", self.cta), n, self.plan_good)
        yield from self.announce("LISTED")
        ok = yield from self.await_headers("LISTED")
        if not ok:
            return False
        ok = yield from self.judge_headers()
        if not ok:
            return False
        for r in self.header_ranks:  # prologue.make_segments
            yield
            self.plan_good &= m.read(t, (self.rank, "body", r, self.copy), n)
        overflows = [r for r in range(m.ranks) if len(self.rows_of(r)) > self.call.capacity * BLOCK_ROWS]
        if overflows:
            self.end_call(OVERFLOW)
        return not overflows

    def judge_headers(self) -> Verdict:
        """errors.compare_headers, judge_headers: status first, then signatures against rank 0's."""
        m, words = self.m, []
        for r in self.header_ranks:
            yield
            self.plan_good &= m.read(self.t, (self.rank, "words", r, self.copy), self.epoch)
            words.append(m.words.get((self.rank, r, self.copy), (0, 0)))
        status = next((code for code, _ in words if code), 0)
        if status and self.p.heeds:
            self.end_call(status)
            return False
        if any(signature != words[0][1] for _, signature in words) and self.p.compares:
            yield from self.record(self.t, SIGNATURE)
            return False
        return True

    def rows_of(self, rank: int) -> list[tuple[int, int] | None]:
        """Pool rows of a rank: (source, slot), None where padding; a function of the routing alone."""
        rows: list[tuple[int, int] | None] = []
        for e in range(rank * EXPERTS, (rank + 1) * EXPERTS):
            rows += [(r, i) for r in range(self.m.ranks) for i, x in enumerate(self.call.slots[r]) if x == e]
            rows += [None] * (-len(rows) % BLOCK_ROWS)
        return rows

    def padding(self, rows: list) -> Iterator[int]:
        """Blocks of this CTA's padding rows."""
        return (i // BLOCK_ROWS for i, row in enumerate(rows) if row is None and i % self.m.ctas == self.cta)

    def mine(self, rows: list) -> list[int]:
        """The real rows that this CTA orders and pulls."""
        return [i for i, row in enumerate(rows) if row is not None][self.cta :: self.m.ctas]

    def order_rows(self, rows: list) -> Generator[Wait | None, bool, dict[int, bool]]:
        """prologue.order_row: the source's slot list says which row it is."""
        codes = {}
        for i in self.mine(rows):
            yield
            source, slot = rows[i]
            found = self.given or self.m.read(self.t, (source, "slots", slot % self.m.ctas), self.epoch)
            codes[i] = found and self.plan_good
        return codes

    def announce(self, counter: str) -> Steps:
        """prologue.announce: the last CTA writes the headers; at PLACED it also advances the number of the call."""
        t, m = self.t, self.m
        yield
        m.acquire(t, self.rank, (counter, self.parity), "sys")
        before = m.add(t, self.rank, (counter, self.parity), 1, "sys")
        last, first = before == m.ctas - 1, before == 0
        word = "EPOCH" if counter == "PLACED" else "LISTED"
        if word == "EPOCH" and (last if self.p.epoch_by == "last" else first):
            yield
            m.store(t, self.rank, ("EPOCH",), self.epoch)
        if (last if self.p.announces == "last" else first) and not self.stopped:
            status = BAD_IDS if self.rank in self.call.bad_ids and not self.given else IDLE
            for r in range(m.ranks):
                yield from self.send_header(r, word, (status, self.call.signature(self.rank)))

    def send_header(self, r: int, word: str, words: tuple) -> Steps:
        """prologue.announce, errors.describe_rank: this rank's header on rank r."""
        t, m = self.t, self.m
        describes = word == "LISTED" or self.given
        steps = [lambda: m.store(t, r, ("header", word, self.rank, self.copy), self.epoch, self.p.header_scope)]
        if word == "EPOCH" and self.given and self.p.lists:
            at = ("header", "LISTED", self.rank, self.copy)
            steps.insert(0, lambda: m.store(t, r, at, self.epoch, self.p.header_scope))

        def describe() -> None:
            m.words[(r, self.rank, self.copy)] = words
            m.write(t, (r, "words", self.rank, self.copy), self.epoch)

        if describes:
            steps.insert(0 if self.p.words_first else len(steps), describe)
        for step in steps:
            yield
            step()

    def refusal(self) -> Steps:
        """refusal.Refusal: this rank's place in a call that its host cannot make."""
        t, m = self.t, self.m
        yield
        self.epoch = m.value(self.rank, ("EPOCH",)) + 1
        self.parity, self.copy = self.epoch % self.p.counter_sets, self.epoch % self.p.header_copies
        self.given = True
        for cta in range(m.ctas):
            self.cta = cta
            yield from self.clear_counters()
        yield
        m.store(t, self.rank, ("EPOCH",), self.epoch)
        if m.value(self.rank, ("ABORT",)):
            return
        for r in range(m.ranks):
            yield from self.send_header(r, "EPOCH", (REFUSED, None))
        ok = yield from self.await_headers("EPOCH")
        if ok and self.p.refusal_signs:
            for r in range(m.ranks):
                yield
                m.add(t, r, ("HOME", self.parity), m.ctas, self.p.home_scope)
            yield from self.wait(t, ("HOME", self.parity), m.ranks * m.ctas, "sys")

    def await_headers(self, word: str) -> Verdict:
        """prologue.await_headers: by every CTA, of all ranks, in its own memory."""
        for r in self.header_ranks:
            ok = yield from self.wait(self.t, ("header", word, r, self.copy), self.epoch, "sys")
            if not ok:
                return False
        return not self.stopped

    # ------------------------------------------------------------ dispatch.py, loader.py, combine.py

    def pull(self, t: Thread, rows: list, codes: dict[int, bool]) -> Steps:
        """dispatch.pull: xq of the sources into the pool; each row arrives at its block."""
        for i in self.mine(rows):
            yield
            source, slot = rows[i]
            good = self.m.read(t, (source, "xq", slot), self.epoch) and codes[i]
            yield
            self.m.write(t, (self.rank, "pool", i), self.epoch, good)
            yield
            self.m.add(t, self.rank, ("arrive", self.parity, i // BLOCK_ROWS), 1, "gpu")

    def tiles(self, rows: list) -> Steps:
        """loader.scheduler, the math warps and loader.courier, tile after tile, until there is none or a flag does not
        come."""
        t, m, blocks = self.t, self.m, len(rows) // BLOCK_ROWS
        order = [(phase, b, n) for phase, b, n in tile_order(blocks)]
        while True:
            yield
            number = m.add(t, self.rank, ("CLAIM", self.parity), 1)  # loader.claim
            if number >= len(order):
                return
            phase, b, n = order[number]
            name, target = (("arrive", BLOCK_ROWS), ("done", N1))[phase]
            ok = yield from self.wait(t, (name, self.parity, b), target, "gpu")
            if not ok:
                return
            here = range(b * BLOCK_ROWS, (b + 1) * BLOCK_ROWS)
            yield
            if phase == 0:
                good = all(m.read(t, (self.rank, "pool", i), self.epoch) for i in here if rows[i] is not None)
                m.write(t, (self.rank, "h", b, n), self.epoch, good)
                yield
                m.add(t, self.rank, ("done", self.parity, b), 1, "gpu")  # epilogues.count_tile
            else:
                good = all(m.read(t, (self.rank, "h", b, j), self.epoch) for j in range(N1))
                for source, slot in (row for row in (rows[i] for i in here) if row is not None):
                    yield
                    m.write(t, (source, "y", slot, n), self.epoch, good)  # epilogues.store_y

    def home(self, t: Thread) -> Steps:
        """loader.courier, at the end: this CTA has stored all that it stores for this call."""
        yield
        if self.m.is_over(self.rank, self.epoch) and self.p.signs == "finished":
            return
        for r in self.home_ranks:
            yield
            self.m.add(t, r, ("HOME", self.parity), 1, self.p.home_scope)

    def combine(self) -> Steps:
        """combine.combine: the sum over k of this CTA's tokens."""
        t, m = self.t, self.m
        ok = yield from self.wait(t, ("HOME", self.parity), len(self.home_ranks) * m.ctas, "sys")
        yield
        ok = ok and not self.over
        if not ok:
            yield from self.report()
        good = self.plan_good
        slots = self.call.slots[self.rank]
        for i in range(self.cta, len(slots), m.ctas):
            yield
            good &= slots[i] < 0 or all(m.read(t, (self.rank, "y", i, n), self.epoch) for n in range(N2))
        self.launch.parts.append(("right" if good else "bad") if ok else "nan")


def tile_order(blocks: int) -> Iterator[tuple[int, int, int]]:
    """(phase, block, n) by claim number: GEMM-2 tiles trail their GEMM-1 tiles by a block."""
    for b in range(blocks + 1):
        if b < blocks:
            yield from ((0, b, n) for n in range(N1))
        if b > 0:
            yield from ((1, b - 1, n) for n in range(N2))


def random_calls(rng: random.Random, num_ranks: int, count: int, lonely: bool = False) -> list[Call]:
    """Calls with changing T and routing. lonely: most ranks exchange no row with others."""
    calls = []
    for _ in range(count):
        slots = []
        for r in range(num_ranks):
            experts = range(r * EXPERTS, (r + 1) * EXPERTS) if lonely else range(num_ranks * EXPERTS)
            slots.append(tuple(rng.choice([-1, *experts]) for _ in range(rng.randint(0, 4))))
        calls.append(Call(tuple(slots), plan_given=rng.random() < 0.3))
    return calls
