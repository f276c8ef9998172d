"""An engine that schedules requests as vLLM does, without a model: chunks, prefixes, preemption, drafts, aborts, n > 1.

for step in SimulatedEngine(random.Random(3), drafts=4).run(): ...
engine.shown[("1_r2", 17)]              # the (step, row) that a plain dictionary ends with for this token
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace

import numpy as np

from probemon.ops.vllm.rows import StepRows

N_TOKENS = 50  # of the vocabulary
BLOCK = 4


@dataclass
class Simulated:
    """A request: `tokens` are its prompt and what it sampled so far, `output` what it is going to sample."""

    name: str
    prompt: list[int]
    output: list[int]
    aborts: bool
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    n_cached: int = 0
    begun: bool = False
    preempted: bool = False
    ended: bool = False
    run: set[int] = field(default_factory=set)  # positions of which a row was kept
    reused: set[int] = field(default_factory=set)  # that came from the cache, and from no row


@dataclass
class Step:
    """`scheduled`: as vLLM's scheduler tells it. `rows`: what ran. `drafts`, `accepted`: how many, by request."""

    scheduled: SimpleNamespace
    rows: StepRows
    drafts: dict[str, int]
    accepted: dict[str, int]


class SimulatedEngine:
    """`shown`: the oracle, the last row of each token that was not taken back when the next ones were run."""

    def __init__(self, random: Random, *, n_requests: int = 5, drafts: int = 0, budget: int = 16) -> None:
        self.random, self._drafts, self._budget = random, drafts, budget
        self.requests: list[Simulated] = []
        for number in range(n_requests):
            prompt = [random.randrange(N_TOKENS) for _ in range(random.choice([1, 2, 7, 13, 31]))]
            n = random.choice([1, 1, 1, 3])
            for index in range(n):
                output = [random.randrange(N_TOKENS) for _ in range(random.choice([1, 2, 5, 11]))]
                name = f"r{number}" if n == 1 else f"{index}_r{number}"
                self.requests.append(Simulated(name, prompt, output, aborts=random.random() < 0.2))
        for request in self.requests:
            request.tokens = list(request.prompt)
        self.shown: dict[tuple[str, int], tuple[int, int]] = {}
        self._settled: set[tuple[str, int]] = set()

    def run(self):
        """Yield steps until every request has ended, and one more that tells of the last ends."""
        finished: list[str] = []
        n_steps = 0
        while finished or any(not request.ended for request in self.requests):
            step, finished = self._step(n_steps, finished), []
            yield step
            finished = self._sample(step, n_steps)
            n_steps += 1

    def final(self, request: Simulated) -> list[int]:
        """Return prompt and output as the engine's front end returns them."""
        return request.tokens

    # -- inside ----------------------------------------------------------------------------------

    def _step(self, number: int, finished: list[str]) -> Step:
        random, left = self.random, self._budget
        new, resumed, parts = [], {}, []
        running = [one for one in self.requests if one.begun and not one.ended and not one.preempted]
        for request in running:
            if len(running) > 1 and random.random() < 0.08:
                request.preempted, request.computed = True, 0
        waiting = [one for one in self.requests if not one.ended and (not one.begun or one.preempted)]
        candidates = [one for one in running if not one.preempted] + waiting
        random.shuffle(candidates)
        for request in candidates:
            if left <= 0 or len(parts) == 4:
                break
            if not request.begun or request.preempted:
                at = self._from_cache(request)
                if request.preempted:
                    resumed[request.name] = list(request.tokens)
                    request.reused |= set(range(request.n_cached, at)) - request.run
                else:
                    request.n_cached = at
                    new.append(request)
                request.computed, request.begun, request.preempted = at, True, False
            n = min(len(request.tokens) - request.computed, left)
            drafts = self._propose(request, left - n) if request.computed + n == len(request.tokens) else []
            parts.append((request, request.computed, n, drafts))
            left -= n + len(drafts)
        random.shuffle(parts)
        ids, positions, starts = [], [], [0]
        for request, at, n, drafts in parts:
            ids += request.tokens[at : at + n] + drafts
            positions += range(at, at + n + len(drafts))
            starts.append(len(ids))
        for row, (position, token) in enumerate(zip(positions, ids, strict=True)):
            part = next(i for i, start in enumerate(starts[1:]) if row < start)
            key = (parts[part][0].name, position)
            if key not in self._settled:
                self.shown[key] = (number, row)
            del token
        accepted = {request.name: self._n_accepted(request, drafts) for request, _, _, drafts in parts if drafts}
        self._parts = parts
        return Step(
            SimpleNamespace(
                finished_req_ids=set(finished),
                scheduled_new_reqs=[
                    SimpleNamespace(
                        req_id=one.name, prompt_token_ids=list(one.prompt), num_computed_tokens=one.n_cached
                    )
                    for one in new
                ],
                scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(resumed), all_token_ids=resumed),
                num_scheduled_tokens={request.name: n + len(drafts) for request, _, n, drafts in parts},
            ),
            StepRows(
                tuple(request.name for request, *_ in parts),
                np.array(starts),
                np.array(ids, dtype=np.int64),
                np.array(positions, dtype=np.int64),
            ),
            {request.name: len(drafts) for request, _, _, drafts in parts if drafts},
            accepted,
        )

    def _sample(self, step: Step, number: int) -> list[str]:
        finished = []
        for request, at, n, _ in self._parts:
            n_kept = n + step.accepted.get(request.name, 0)
            self._settled |= {(request.name, position) for position in range(at, at + n_kept)}
            request.run |= set(range(at, at + n_kept))
            done = at + n == len(request.tokens)
            if done:  # the drafts that were right, and one token more
                begin = len(request.tokens) - len(request.prompt)
                request.tokens += request.output[begin : begin + step.accepted.get(request.name, 0) + 1]
                request.computed = at + n_kept
            else:
                request.computed = at + n
            whole = len(request.tokens) == len(request.prompt) + len(request.output)
            if whole or (request.aborts and self.random.random() < 0.1):
                request.ended = True
                finished.append(request.name)
        return finished

    def _from_cache(self, request: Simulated) -> int:
        """How many tokens are in the cache: whole blocks, and not the last token."""
        most = (len(request.tokens) - 1) // BLOCK
        return BLOCK * self.random.choice([0, 0, self.random.randint(0, most)])

    def _propose(self, request: Simulated, most: int) -> list[int]:
        begin = len(request.tokens) - len(request.prompt)
        right = request.output[begin:]
        # The last token is never proposed with more after it: the engine stops there.
        n = min(self.random.randint(0, self._drafts), most, len(right) - 1)
        return [token if self.random.random() < 0.6 else (token + 1) % N_TOKENS for token in right[: max(n, 0)]]

    def _n_accepted(self, request: Simulated, drafts: list[int]) -> int:
        right = request.output[len(request.tokens) - len(request.prompt) :]
        n = 0
        while n < len(drafts) and drafts[n] == right[n]:
            n += 1
        return n
