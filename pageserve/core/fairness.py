"""The waiting requests of several tenants, taken in turn by the tokens each has been served.

Every tenant (an API key, or a user where there are no keys) has a queue in the policy's order. The
next request comes from the tenant that was served least for its weight: its prompts are charged
when they are admitted, its outputs when they end. This is start-time fair queueing: a clock follows
what the tenant admitted last had been served, and one that had nothing to do starts at the clock or
at what it was served itself, whichever is later. So nobody saves up turns, nobody sheds a debt by
leaving for a moment, and once nobody has anything to do all are even. Preempted requests go first,
whoever sent them. Under the policy ``priority`` smaller priorities go before larger ones and each
has books and a clock of its own: what a tenant was served at one says nothing of its share, or of
anybody's, in what another leaves over. With one tenant this is the policy's queue and nothing more.
"""

import heapq
from collections import Counter
from collections.abc import Iterator

from pageserve.core.policy import Key, Policy, WaitingQueue
from pageserve.core.request import Request

MAX_ABSENT = 1024  # tenants remembered for what they were served while they have nothing to do

_Turn = tuple[Key, float, int, int]  # urgency, tokens served, arrival of the head, serial number


class _Level:
    """The tenants with requests of one priority, of all requests where there are none."""

    __slots__ = ("clock", "num_live", "sweep_above", "tenants")

    def __init__(self) -> None:
        self.tenants: dict[str, _Tenant] = {}
        self.clock = 0.0  # what the tenant admitted last had been served
        self.num_live = 0  # requests waiting or running
        self.sweep_above = 64  # tenants

    def forget_absent(self) -> None:
        """Forget tenants that have nothing to do and that the clock has passed. Where too many are
        ahead of it, the clock passes those least ahead, so that leaving pays for none of them."""
        absent = sorted(t.served for t in self.tenants.values() if not t.num_live)
        if len(absent) > MAX_ABSENT:
            self.clock = max(self.clock, absent[-MAX_ABSENT // 2])
        self.tenants = {
            name: tenant
            for name, tenant in self.tenants.items()
            if tenant.num_live or tenant.served > self.clock
        }
        self.sweep_above = 64 + 2 * len(self.tenants)


class _Tenant:
    __slots__ = ("level", "num_live", "queue", "serial", "served", "weight")

    def __init__(self, level: _Level, policy: Policy, weight: int) -> None:
        self.level = level
        self.queue = WaitingQueue(policy.waiting_key)
        self.weight = weight
        self.served = 0.0  # tokens over weight
        self.num_live = 0  # requests waiting or running
        self.serial = 0  # of its only valid turn


class FairQueue:
    """All waiting requests. Every operation costs O(log n)."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._levels: dict[Key, _Level] = {}  # those with anything to do
        self._turns: list[tuple[_Turn, _Tenant]] = []  # heap; those of old serials are void
        self._num_waiting = 0
        self._serial = 0

    def __len__(self) -> int:
        return self._num_waiting

    # --- the life of a request ---

    def join(self, request: Request) -> None:
        """Note a new request of its tenant, whether it will wait or run at once."""
        level = self._levels.setdefault(self._policy.level(request), _Level())
        tenant = level.tenants.get(request.tenant)
        if tenant is None:
            tenant = level.tenants[request.tenant] = _Tenant(level, self._policy, request.weight)
        tenant.weight = request.weight
        tenant.num_live += 1
        level.num_live += 1

    def push(self, request: Request) -> None:
        """Queue a request that has joined."""
        tenant = self._tenant_of(request)
        if not len(tenant.queue):
            tenant.served = max(tenant.served, tenant.level.clock)
        tenant.queue.push(request)
        self._num_waiting += 1
        self._take_turn(tenant)

    def pop(self) -> Request:
        """Take the first living request; raises IndexError when there is none."""
        self._drop_void_turns()
        _, tenant = heapq.heappop(self._turns)
        request = tenant.queue.pop()
        self._num_waiting -= 1
        self._take_turn(tenant)
        return request

    def is_next(self, request: Request) -> bool:
        """Whether a request that has joined would be taken first if it were queued now."""
        self._drop_void_turns()
        if not self._turns:
            return True
        tenant = self._tenant_of(request)
        served = tenant.served
        if not len(tenant.queue):
            served = max(served, tenant.level.clock)
        elif self._policy.waiting_key(tenant.queue.peek()) < self._policy.waiting_key(request):
            return False
        return (self._policy.urgency(request), served, request.arrival) < self._turns[0][0][:3]

    def admitted(self, request: Request, num_tokens: int) -> None:
        """Charge a request that has just been admitted for the tokens of its prompt."""
        tenant = self._tenant_of(request)
        tenant.level.clock = max(tenant.level.clock, tenant.served)
        self._charge(tenant, num_tokens)

    def discard(self, request: Request) -> None:
        """Note that a request has finished while it was queued; call :meth:`leave` too."""
        self._tenant_of(request).queue.discard()
        self._num_waiting -= 1

    def leave(self, request: Request) -> None:
        """Charge a finished request for its output."""
        tenant = self._tenant_of(request)
        level = tenant.level
        tenant.num_live -= 1
        level.num_live -= 1
        self._charge(tenant, request.num_tokens - request.num_prompt_tokens)
        if not level.num_live:
            del self._levels[self._policy.level(request)]
        elif not tenant.num_live:
            if tenant.served <= level.clock:
                del level.tenants[request.tenant]
            elif len(level.tenants) > level.sweep_above:
                level.forget_absent()

    def _tenant_of(self, request: Request) -> _Tenant:
        return self._levels[self._policy.level(request)].tenants[request.tenant]

    # --- turns ---

    def _charge(self, tenant: _Tenant, num_tokens: int) -> None:
        tenant.served += num_tokens / tenant.weight
        self._take_turn(tenant)

    def _drop_void_turns(self) -> None:
        """Leave the turn of the request that is next at the head of the heap."""
        while self._turns:
            turn, tenant = self._turns[0]
            valid = turn[3] == tenant.serial and len(tenant.queue)
            if valid and turn[0] == self._policy.urgency(tenant.queue.peek()):
                return
            heapq.heappop(self._turns)
            if valid:  # the head has finished
                self._take_turn(tenant)

    def _take_turn(self, tenant: _Tenant) -> None:
        """Replace the tenant's turn by one that says how things are now."""
        if not len(tenant.queue):
            tenant.serial = 0
            return
        head = tenant.queue.peek()
        self._serial += 1
        tenant.serial = self._serial
        turn = (self._policy.urgency(head), tenant.served, head.arrival, self._serial)
        heapq.heappush(self._turns, (turn, tenant))
        if len(self._turns) > 64 + 2 * self._num_waiting:
            self._turns = [(t, owner) for t, owner in self._turns if t[3] == owner.serial]
            heapq.heapify(self._turns)

    # --- views ---

    def _tenants(self) -> Iterator[_Tenant]:
        return (t for level in self._levels.values() for t in level.tenants.values())

    def requests(self) -> list[Request]:
        """Return all living requests in the order in which they would be admitted if outputs cost
        nothing (for checks and progress reports, not for every step)."""
        return list(self._in_order())

    def _in_order(self) -> Iterator[Request]:
        queues = [(t.served, t.weight, t.queue.requests()[::-1]) for t in self._tenants()]
        turns = [
            (self._policy.urgency(waiting[-1]), served, waiting[-1].arrival, weight, waiting)
            for served, weight, waiting in queues
            if waiting
        ]
        heapq.heapify(turns)
        while turns:
            _, served, _, weight, waiting = turns[0]
            request = waiting.pop()
            yield request
            if waiting:
                served += request.num_tokens / weight
                urgency = self._policy.urgency(waiting[-1])
                heapq.heapreplace(turns, (urgency, served, waiting[-1].arrival, weight, waiting))
            else:
                heapq.heappop(turns)

    def check_integrity(self, live: list[Request]) -> None:
        """Assert that the books agree with the scheduler's ``live`` requests."""
        counts = Counter((self._policy.level(r), r.tenant) for r in live)
        assert counts == {
            (key, name): tenant.num_live
            for key, level in self._levels.items()
            for name, tenant in level.tenants.items()
            if tenant.num_live
        }
        assert Counter(self._policy.level(r) for r in live) == {
            key: level.num_live for key, level in self._levels.items()
        }
        assert self._num_waiting == sum(len(t.queue) for t in self._tenants())
        valid = [tenant for turn, tenant in self._turns if turn[3] == tenant.serial]
        assert len(set(map(id, valid))) == len(valid)
        assert all(any(t is v for v in valid) for t in self._tenants() if len(t.queue))
