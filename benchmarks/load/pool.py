"""Client processes: one Python loop cannot read what a fast server streams to hundreds of users.

The parent draws one schedule and deals it out, so the arrivals stay one process however many
clients there are. ``time.monotonic()`` is the same clock in all processes of a machine.
"""

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Self

from load.client import Record, Target, ask, open_session
from load.workloads import Prompt

START_TIMEOUT = 180.0  # seconds for all processes to be there
POLL = 0.2  # seconds between two looks at the progress


@dataclass(frozen=True)
class Share:
    """One process' part of a run: prompts with the times they are due at (seconds from the start,
    rising), or, without times, for ``concurrency`` users to take one after another."""

    prompts: list[Prompt]
    times: list[float] | None
    concurrency: int


def deal(
    prompts: Sequence[Prompt],
    times: Sequence[float] | None,
    concurrency: int | None,
    processes: int,
) -> list[Share]:
    """Deal a run out to ``processes``; with fewer users than those, some get nothing to do."""
    hands = processes if concurrency is None else min(processes, concurrency)
    shares = [Share([], None if times is None else [], 0) for _ in range(processes)]
    for i in range(hands):
        mine = slice(i, None, hands)
        users = 0 if concurrency is None else concurrency // hands + (i < concurrency % hands)
        due = None if times is None else list(times[mine])
        shares[i] = Share(list(prompts[mine]), due, users)
    return shares


class ClientPool:
    """Processes that send what they are told, run after run."""

    def __init__(self, processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.processes = processes
        self._done = context.Array("q", processes, lock=False)
        barrier = context.Barrier(processes)
        self._executor = ProcessPoolExecutor(
            processes, context, initializer=_enter, initargs=(barrier, self._done)
        )

    def run(
        self,
        target: Target,
        prompts: Sequence[Prompt],
        *,
        times: Sequence[float] | None = None,
        concurrency: int | None = None,
        progress: Callable[[int], None] = lambda finished: None,
    ) -> list[Record]:
        """Send all prompts, at ``times`` or by ``concurrency`` users, and return the records.

        ``progress`` is called now and then with how many requests have ended.
        """
        assert (times is None) != (concurrency is None), "an open or a closed loop"
        self._done[:] = [0] * self.processes
        shares = deal(prompts, times, concurrency, self.processes)
        futures = [self._executor.submit(_drive, i, target, s) for i, s in enumerate(shares)]
        while wait(futures, POLL).not_done:
            progress(sum(self._done))
        progress(len(prompts))
        return [record for future in futures for record in future.result()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(cancel_futures=True)


# --- in a client process --------------------------------------------------------------------------

_barrier: Any = None
_done: Any = None


def _enter(barrier: Any, done: Any) -> None:
    global _barrier, _done  # a pool's initializer has no other place to leave things
    _barrier, _done = barrier, done


def _drive(index: int, target: Target, share: Share) -> list[Record]:
    import uvloop

    _barrier.wait(START_TIMEOUT)  # every process has its share, and all begin together

    def finished() -> None:
        _done[index] += 1

    return uvloop.run(drive(target, share, finished))


async def drive(
    target: Target, share: Share, finished: Callable[[], None] = lambda: None
) -> list[Record]:
    """Send one share and return its records; ``finished`` is called after each request."""
    start = time.monotonic()
    async with open_session(target) as session:

        async def one(prompt: Prompt, due: float) -> Record:
            record = await ask(session, target, prompt, due)
            finished()
            return record

        if share.times is None:
            return await _closed_loop(one, iter(share.prompts), share.concurrency)
        tasks = []
        for prompt, offset in zip(share.prompts, share.times, strict=True):
            due = start + offset
            if (delay := due - time.monotonic()) > 0:
                await asyncio.sleep(delay)
            tasks.append(asyncio.create_task(one(prompt, due)))
        return list(await asyncio.gather(*tasks))


async def _closed_loop(one: Any, prompts: Iterable[Prompt], concurrency: int) -> list[Record]:
    records: list[Record] = []

    async def user() -> None:
        for prompt in prompts:  # one iterator for all users
            records.append(await one(prompt, time.monotonic()))

    await asyncio.gather(*(user() for _ in range(concurrency)))
    return records
