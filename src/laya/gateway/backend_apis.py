"""Which APIs a backend has: as configured, else as found out. Pure; loop thread.

In: `backends.NAME.apis` (None: ask it), and what it answered. Out: whether a request can be passed on to it as it is.
"""

from __future__ import annotations

# A backend that was found to lack an API is asked again after so long: it may have been upgraded meanwhile.
REMEMBER_S = 600.0
# Counting comes with its API.
_PART_OF = {"count_tokens": "messages", "input_tokens": "responses"}


class BackendApis:
    def __init__(self, configured: tuple[str, ...] | None) -> None:
        self._configured = configured
        self._lacks_until: dict[str, float] = {}

    def offers(self, api: str) -> bool:
        """It is not known to lack the API by configuration."""
        return self._configured is None or _PART_OF.get(api, api) in self._configured

    def lacks(self, api: str, now: float) -> bool:
        """It has not the API, as far as is known: asking it would be in vain."""
        if self._configured is not None:
            return not self.offers(api)
        return self._lacks_until.get(_PART_OF.get(api, api), 0.0) > now

    def may_have(self, ability: str, now: float) -> bool:
        """It was not found to lack something that no configuration tells of."""
        return self._lacks_until.get(ability, 0.0) <= now

    def unsure(self, api: str) -> bool:
        """A refusal of the path may mean that it lacks the API."""
        return self._configured is None or api in _PART_OF

    def found_lacking(self, api: str, now: float) -> None:
        self._lacks_until[api] = now + REMEMBER_S
