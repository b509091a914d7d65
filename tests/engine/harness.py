"""The engine loop driven by hand: no thread, a clock that the test moves, and everything checked after each turn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from laya.engine.admission import Admission, Offer
from laya.engine.prepare import Prepared
from laya.engine.settings import EngineSettings
from laya.engine.thread import EngineLoop
from laya.errors import LayaError
from laya.schema.generation import Delta, Finished, GenerationRequest, SamplingParams, Started

from .fake_runner import FakeRunner, FakeTokenizer


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids that differ between seeds; a shorter prompt of the same seed is a prefix of a longer one."""
    return [1 + (seed * 7919 + i * 31) % 500 for i in range(length)]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Client:
    """The owner of one request: keeps what it hears, and insists on the order of events."""

    offer: Offer | None = None
    started: Started | None = None
    deltas: list[Delta] = field(default_factory=list)
    end: Any = None
    gone: bool = False

    def deliver(self, event: Any) -> None:
        assert self.end is None, "an event after the last"
        if isinstance(event, Started):
            assert self.started is None and not self.deltas
            self.started = event
        elif isinstance(event, Delta):
            assert self.started is not None
            self.deltas.append(event)
        else:
            self.end = event

    def token_ids(self, index: int = 0) -> list[int]:
        return [t for delta in self.deltas if delta.index == index for t in delta.token_ids]

    def text(self, index: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas if delta.index == index)

    def finish(self, index: int = 0) -> str | None:
        return next((d.finish_reason for d in self.deltas if d.index == index and d.finish_reason), None)

    @property
    def ok(self) -> bool:
        return isinstance(self.end, Finished)


class Engine:
    def __init__(self, runner: FakeRunner | None = None, *, tokenizer=None, open_all: bool = True, **settings) -> None:
        settings = {"prefill_chunk_tokens": 16, "queue_timeout_s": 1e9, **settings}
        self.settings = EngineSettings(**settings)
        self.runner = runner or FakeRunner()
        self.tokenizer = tokenizer or FakeTokenizer()
        self.clock = Clock()
        self.admission = Admission(self.settings, self.clock)
        self.posts: list[list] = []
        self.loop = EngineLoop(
            runner=self.runner, tokenizer=self.tokenizer, settings=self.settings, admission=self.admission, post=self._post,
            clock=self.clock,
        )  # fmt: skip
        if open_all:
            self.loop.opening.allowed = self.settings.max_num_seqs
        self.clients: list[Client] = []

    def _post(self, events: list) -> None:
        self.posts.append(events)
        for client, event in events:
            if not client.gone:
                client.deliver(event)

    def offer(
        self, prompt_ids: list[int], max_new: int = 8, *, client: str = "", salt: str = "", prompt_text: str | None = None,
        grammar=None, **sampling,
    ) -> Client:  # fmt: skip
        """Queue one request; raises what admission raises."""
        request = GenerationRequest(
            id=f"r{len(self.clients)}", prompt=prompt_ids, client=client, salt=salt,
            sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": max_new} | sampling),
        )  # fmt: skip
        owner = Client()
        self.admission.reserve(request.sampling.n)
        prepared = Prepared(
            request=request, prompt_ids=prompt_ids, max_new_tokens=max_new, prompt_text=prompt_text, grammar=grammar
        )  # fmt: skip
        owner.offer = Offer(prepared, owner, self.clock())
        self.admission.offer(owner.offer)
        self.clients.append(owner)
        return owner

    def leave(self, client: Client) -> None:
        client.gone = True
        self.admission.abort(client.offer)

    def turn(self) -> bool:
        busy = self.loop.turn()
        self.clock.now += 0.01
        self.check()
        return busy

    def check(self) -> None:
        scheduler = self.loop.scheduler
        live = list(scheduler.sequences())
        scheduler.blocks.check(live)
        assert scheduler.size <= self.loop.opening.allowed
        assert [s.seq_id for s in scheduler.running] == sorted(s.seq_id for s in scheduler.running)
        assert self.runner.swapped_tickets == sum(s.swap_ticket is not None for s in live)
        assert {s.request for s in live} <= scheduler.groups
        assert self.admission.waiting >= 0 and self.admission.waiting_tokens >= 0

    def settle(self, turns: int = 20_000) -> None:
        """Run until nothing is left, then nothing may be held."""
        for _ in range(turns):
            if not self.turn() and not self.loop.scheduler.groups and not self.admission.waiting:
                break
        else:
            raise AssertionError("the engine does not come to rest")
        assert self.loop.scheduler.size == 0 and self.loop.scheduler.blocks.used == 0
        assert self.admission.waiting == 0 and self.admission.waiting_tokens == 0
        assert self.runner.swapped_tickets == 0
        for client in self.clients:
            assert client.gone or isinstance(client.end, Finished | LayaError)
            if client.ok:
                assert client.end.cached_tokens == client.started.cached_tokens
