"""An exchange whose request may go to another target as long as nothing was sent to the client.

In: the targets that routing chose, best first. Out: the request at the next one, at once or after a pause; a target of another
kind (an engine after a backend, or the reverse) gets an exchange of its own. Loop thread only.
"""

from __future__ import annotations

from typing import Any

from laya.gateway.dispatch import Attempts, Next, after_failure, pause
from laya.gateway.exchange import DONE, STREAMING, Exchange


class MovingExchange(Exchange):
    """`targets` are what the route allows, best first; `rule` is the route itself."""

    fields: Any = None
    targets: list = []  # noqa: RUF012 - never changed in place
    rule: Any = None
    attempts: Attempts | None = None  # made at the first failure: most requests have none
    session: bytes | None = None  # the key of the session table, where the target is to be remembered
    _timer: Any = None

    def untried(self) -> list:
        """Targets that are left, after the present one."""
        if self.attempts is None:
            self.attempts = Attempts()
        self.attempts.tried.append(self.backend)
        return [target for target in self.targets if target.name not in self.attempts.tried]

    def next_after(self, failure: str, left: list, *, retry_ambiguous: bool = True) -> Next:
        """What the table says, and for answers that name overload the retry budget too."""
        decision = after_failure(
            failure, self.attempts, sent_to_client=self.state is STREAMING, candidates_left=bool(left),
            retry_ambiguous=retry_ambiguous,
        )  # fmt: skip
        if decision is Next.OTHER and failure == "status" and not self.gateway.may_retry():
            return Next.STOP
        return decision

    def move_to(self, target, failure: str) -> None:
        """Go on at another target; after an answer that names overload with a pause before."""
        if failure == "status":
            self._timer = self.gateway.later(pause(self.attempts.others - 1), lambda: self._remember(target))
        else:
            self._remember(target)

    def _remember(self, target) -> None:
        self._timer = None
        if self.session is not None and not self.gateway.sessions.assign(
            self.session, target.name, lambda: self._arrive(target)
        ):
            return
        self._arrive(target)

    def _arrive(self, target) -> None:
        if self.state is not DONE and not self.goes_on(target):
            self.gateway.hand_over(self, target)

    def goes_on(self, target) -> bool:
        """Send it there, if this kind of exchange can; False: it needs another kind."""
        return False

    def leave(self) -> None:
        """Another exchange has taken this one's place: it ends without an answer and is not counted."""
        self.state = DONE

    def _release(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
