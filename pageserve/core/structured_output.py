"""Grammars of live requests: compiled, advanced and turned into masks beside the engine's loop.

    add ─► compiling ─► bitmask known ─► row runs ─► token ─► bitmask being computed ─┐
                             ▲───────────────────────────────────────────────────────┘

Threads do what takes time and needs no lock: llguidance lets others run while it compiles a grammar
and while it computes which tokens may follow. All state belongs to the loop, which hands work out
and takes results in. But most masks take 10 µs, less than it costs to hand them to a thread, which
then waits for the interpreter's lock: a grammar whose last masks were that quick is advanced by the
loop itself.

With trigger ids a grammar is dormant until one of them is sampled, in force from the next token on,
and dormant again after its end.
"""

import os
import queue
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from llguidance import LLMatcher

from pageserve.utils import cdiv

CACHE_SIZE = 256  # compiled grammars kept
COMPILE_THREADS = 1
MASK_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))
QUICK_SECONDS = 50e-6  # of CPU that a quick mask takes at most
QUICK_MASKS = 4  # in a row make a quick grammar, until one is not
LOOP_MASKS = 32  # of a step that the loop computes itself


class Outlook(NamedTuple):
    """What may come next. ``bitmask`` has a bit per token, little-endian; None: nothing may, since
    the grammar has ended or met an ``error``. ``without_end`` is the same with no EOS in it."""

    bitmask: bytes | None
    without_end: bytes | None = None
    error: str | None = None


class CompiledGrammar:
    """A grammar that all requests with the same text start from."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matcher: LLMatcher | None = None  # never advanced, only copied
        self.first: Outlook | None = None  # None while it is being compiled
        self.seconds = 0.0
        self.waiting: list[Grammar] = []


class Grammar:
    """The grammar of one request. Where it is ``active`` the next token needs its ``bitmask``."""

    __slots__ = (
        "active",
        "bitmask",
        "compiled",
        "error",
        "ignore_eos",
        "matcher",
        "num_quick",
        "num_stale",
        "request_id",
        "trigger_ids",
    )

    def __init__(
        self,
        request_id: str,
        compiled: CompiledGrammar,
        trigger_ids: Iterable[int],
        ignore_eos: bool,
    ) -> None:
        self.request_id = request_id
        self.compiled = compiled
        self.trigger_ids = frozenset(trigger_ids)
        self.ignore_eos = ignore_eos
        self.active = not self.trigger_ids
        self.bitmask: bytes | None = None  # None: still being computed
        self.matcher: LLMatcher | None = None  # copied when the first token is to be consumed
        self.num_quick = 0  # masks in a row that took next to no time
        self.num_stale = 0  # tokens in flight that were sampled before the grammar was in force
        self.error: str | None = None

    @property
    def waits(self) -> bool:
        """Whether the next token cannot be sampled yet for want of a bitmask."""
        return self.active and self.bitmask is None

    @property
    def ended(self) -> bool:
        """Whether nothing may follow any more."""
        return not self.active and not self.trigger_ids

    def holds_back(self, num_in_flight: int) -> bool:
        """Whether no row may be planned now: the mask depends on every token before."""
        return self.active and (self.bitmask is None or num_in_flight > 0)

    def start(self, num_in_flight: int = 0) -> None:
        """Be in force from the next token on; those in flight were sampled without a mask."""
        self.active = True
        if self.compiled.first is not None:
            self.look(self.compiled.first)
        if self.active:
            self.num_stale = num_in_flight

    def look(self, outlook: Outlook) -> None:
        """Take in what may come next."""
        self.bitmask = outlook.without_end if self.ignore_eos else outlook.bitmask
        self.error = outlook.error
        if self.bitmask is None:
            self.active = False
            self.matcher = None


class StructuredOutputManager:
    """Compiles grammars and keeps the masks of all requests that have one."""

    def __init__(
        self,
        compile: Callable[[str], LLMatcher],
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        """``compile`` runs in a thread; what it raises ends the requests that wait for it. Masks
        have ``vocab_size`` bits, rounded up to whole 32-bit words."""
        self.num_cache_hits = 0
        self.num_compiled = 0
        self.num_compiling = 0  # under way
        self.compile_seconds = 0.0
        self._compile = compile
        self._mask_size = cdiv(vocab_size, 32) * 4
        self._nothing = bytes(self._mask_size)
        self._ends = [(i // 8, 1 << i % 8) for i in set(eos_token_ids) if i < vocab_size]
        # Bytes of the last word that are not whole in the vocabulary, and which of their bits are.
        rest = range(vocab_size // 8, self._mask_size)
        self._behind_vocab = [(i, (1 << max(0, vocab_size - 8 * i)) - 1) for i in rest]
        self._cache: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._results = _Results()
        self._compile_jobs = _Threads("compile", COMPILE_THREADS, self._results)
        self._mask_jobs = _Threads("mask", MASK_THREADS, self._results)
        self._advances: list[tuple[Grammar, int]] = []  # by the tokens of a step
        self._jobs: list[_Job] = []  # for the threads
        self._pending: set[Grammar] = set()  # whose mask is to come

    def add(
        self, request_id: str, text: str, trigger_ids: Iterable[int], ignore_eos: bool
    ) -> Grammar:
        """Return the state of a new request's grammar, which may still have to be compiled."""
        compiled = self._cache.get(text)
        if compiled is None:
            compiled = self._cache[text] = CompiledGrammar(text)
            self.num_compiling += 1
            self._compile_jobs.put([lambda: self._run_compile(compiled)])
            if len(self._cache) > CACHE_SIZE:
                self._cache.popitem(last=False)
        else:
            self.num_cache_hits += 1
            self._cache.move_to_end(text)
        grammar = Grammar(request_id, compiled, trigger_ids, ignore_eos)
        if compiled.first is None:
            compiled.waiting.append(grammar)
        elif grammar.active:
            grammar.start()
        return grammar

    def accept(self, grammar: Grammar, token_id: int, num_in_flight: int) -> None:
        """Let a grammar know the request's newest token, behind which ``num_in_flight`` more are
        under way (none if the grammar is in force). :meth:`flush` sees to the mask."""
        if grammar.active:
            grammar.bitmask = None
            self._pending.add(grammar)
            self._advances.append((grammar, token_id))
        elif token_id in grammar.trigger_ids:
            grammar.start(num_in_flight)

    def flush(self) -> None:
        """Turn to the masks behind all tokens of a step: quick ones are there when it returns, for
        :meth:`take`, and the others are left to :meth:`begin`."""
        advances, self._advances = self._advances, []
        room = LOOP_MASKS
        for grammar, token_id in advances:
            if grammar.num_quick >= QUICK_MASKS and room:
                self._results.put(self._run_advance(grammar, token_id))
                room = room - 1 if grammar.num_quick else 0  # the others may have become slow, too
            else:
                self._jobs.append(partial(self._run_advance, grammar, token_id))

    def begin(self) -> None:
        """Let the threads begin with the masks that are left to them. The best time is when the
        loop is about to wait for the device: whenever it needs the interpreter's lock back, after
        each copy and launch, it may have to wait for a thread that has taken it."""
        if self._jobs:
            self._mask_jobs.put(self._jobs)
            self._jobs = []

    def forget_masks(self) -> None:
        """Expect none of those under way any more: their requests have ended."""
        self._advances = []
        self._jobs = []
        self._pending.clear()

    def ends_with(self, grammar: Grammar, token_id: int) -> bool:
        """Whether a request's very last token completes its grammar; without a thread."""
        return (
            grammar.active
            and not grammar.trigger_ids
            and self._advance(grammar, token_id) == Outlook(None)
        )

    def take(self, timeout: float = 0.0, idle: bool = False) -> list[Grammar]:
        """Take in the results that are there; return the grammars they belong to.

        Waits up to ``timeout`` seconds for masks under way; if only compilations are, for the first
        result where the caller is ``idle``, else not: a compilation may take long, and a step that
        waited for it would hold up everybody."""
        if timeout:
            self.begin()
        changed: list[Grammar] = []
        end = time.monotonic() + timeout if timeout else 0.0
        while self._pending or self.num_compiling:
            for result in self._results.take():
                changed += result()
            waits = self._pending or (idle and self.num_compiling and not changed)
            left = end - time.monotonic() if waits and timeout else 0.0
            if left <= 0:
                break
            self._results.wait(len(self._pending) or 1, left)
        return changed

    # --- in a thread, if not quick ----------------------------------------------------------------

    def _run_compile(self, compiled: CompiledGrammar) -> "_Result":
        start = time.monotonic()
        matcher: LLMatcher | None = None
        try:
            matcher = self._compile(compiled.text)
            first = self._outlook(matcher.deep_copy())
        except BaseException as error:  # also a panic, which is no Exception: it ends the
            # requests that use the grammar, never the thread or the engine
            first = Outlook(None, error=_first_line(str(error)) or type(error).__name__)
        seconds = time.monotonic() - start
        return lambda: self._compiled(compiled, matcher, first, seconds)

    def _run_advance(self, grammar: Grammar, token_id: int) -> "_Result":
        start = time.thread_time()
        outlook = self._advance(grammar, token_id)
        quick = time.thread_time() - start < QUICK_SECONDS
        grammar.num_quick = grammar.num_quick + 1 if quick else 0
        return lambda: self._advanced(grammar, outlook)

    def _advance(self, grammar: Grammar, token_id: int) -> Outlook:
        try:
            if grammar.matcher is None:
                assert grammar.compiled.matcher is not None, "a token before the first mask"
                grammar.matcher = grammar.compiled.matcher.deep_copy()
            grammar.matcher.consume_token(token_id)
            return self._outlook(grammar.matcher)
        except (KeyboardInterrupt, SystemExit):  # meant for the loop
            raise
        except BaseException as error:
            return Outlook(None, error=_first_line(str(error)) or type(error).__name__)

    def _outlook(self, matcher: LLMatcher) -> Outlook:
        """Compute what may follow; an end that nothing but EOS may follow is an end."""
        if not matcher.is_stopped():
            bits = bytearray(self._mask_size)
            mask = matcher.compute_bitmask()[: self._mask_size]
            bits[: len(mask)] = mask
            for place, kept in self._behind_vocab:
                bits[place] &= kept
            if not matcher.is_accepting():
                if not matcher.is_error():
                    bitmask = bytes(bits)
                    return Outlook(bitmask, bitmask)
            else:
                others = bits.copy()
                for place, bit in self._ends:
                    others[place] &= ~bit
                    bits[place] |= bit
                if others != self._nothing:
                    return Outlook(bytes(bits), bytes(others))
        return Outlook(None, error=_first_line(matcher.get_error()))

    # --- in the loop ------------------------------------------------------------------------------

    def _compiled(
        self, compiled: CompiledGrammar, matcher: LLMatcher | None, first: Outlook, seconds: float
    ) -> list[Grammar]:
        compiled.matcher, compiled.first = matcher, first
        self.num_compiling -= 1
        self.num_compiled += 1
        self.compile_seconds += seconds
        grammars, compiled.waiting = compiled.waiting, []
        for grammar in grammars:
            if first.error is not None:
                grammar.error = first.error
            elif grammar.active:
                grammar.look(first)
        if first.bitmask is None and self._cache.get(compiled.text) is compiled:
            del self._cache[compiled.text]  # nothing to start from, and an error may pass
        return grammars

    def _advanced(self, grammar: Grammar, outlook: Outlook) -> list[Grammar]:
        self._pending.discard(grammar)
        grammar.look(outlook)
        return [grammar]


_Result = Callable[[], list[Grammar]]
_Job = Callable[[], _Result]
_Queue = queue.SimpleQueue[tuple[list[_Job], "_Results"] | None]


class _Results:
    """What threads have found. Waiting for several of them wakes the loop once, not for each."""

    def __init__(self) -> None:
        self._found: deque[_Result] = deque()
        self._wanted = 0
        self._there = threading.Event()

    def put(self, result: _Result) -> None:
        self._found.append(result)
        if len(self._found) >= self._wanted:
            self._there.set()

    def take(self) -> list[_Result]:
        """Return all that are there."""
        return [self._found.popleft() for _ in range(len(self._found))]

    def wait(self, count: int, timeout: float) -> None:
        """Wait until ``count`` are there, ``timeout`` seconds at most."""
        self._there.clear()
        self._wanted = count
        if len(self._found) < count:
            self._there.wait(timeout)


class _Threads:
    """A few daemon threads that run jobs in order, started with the first one. (An executor's
    futures cost more than a mask, and it waits for its threads when the process ends.)"""

    def __init__(self, name: str, count: int, results: _Results) -> None:
        self._name = name
        self._count = count
        self._results = results
        self._jobs: _Queue = queue.SimpleQueue()
        self._started = False

    def put(self, jobs: list[_Job]) -> None:
        """Run ``jobs`` soon and put what each returns into the results. However many they are, this
        wakes one thread: one that finds several leaves half of them to the next."""
        if not self._started:
            self._started = True
            for i in range(self._count):
                threading.Thread(
                    target=_work, args=(self._jobs,), name=f"{self._name}-{i}", daemon=True
                ).start()
            weakref.finalize(self, _stop, self._jobs, self._count)
        self._jobs.put((jobs, self._results))


def _first_line(text: str) -> str | None:
    return text.strip().partition("\n")[0] or None


def _work(queued: _Queue) -> None:
    while (entry := queued.get()) is not None:
        jobs, results = entry
        while len(jobs) > 1:
            queued.put((jobs[len(jobs) // 2 :], results))
            del jobs[len(jobs) // 2 :]
        results.put(jobs[0]())
        del entry, jobs, results  # an idle thread keeps nothing alive


def _stop(jobs: _Queue, count: int) -> None:
    for _ in range(count):
        jobs.put(None)
