"""A Responses or Messages request that goes to a backend which has the API: untouched, but its conversation is looked after.

In: a routed request with its raw body. Out: the backend's answer as it came. What a backend stores it stores for all of our
clients together, so we keep note of whose each answer is and where it lies: a conversation goes on only under its own key, at
the backend that has it. Loop thread only.
"""

from __future__ import annotations

from laya.errors import LayaError
from laya.gateway.exchange import Exchange
from laya.gateway.native_stream import NativeStream
from laya.gateway.proxy import ProxyExchange
from laya.gateway.translation import Translating
from laya.schema.codec import encode_json
from laya.schema.responses import decode_kept


class NativeProxy(Translating, ProxyExchange):
    _native: NativeStream | None = None
    _joined = False  # the conversation that the request goes on from was looked up
    _noted = False

    def pass_on(self, target, fresh_only: bool) -> None:
        previous = None if self._joined or self.plan.api != "responses" else self.fields.text("previous_response_id")
        if previous is None:
            super()._send(target, fresh_only)
        else:
            self.find_kept(previous, lambda kept: self._with_kept(target, fresh_only, previous, kept))

    def _with_kept(self, target, fresh_only: bool, previous: str, kept: bytes | None) -> None:
        self._joined = True
        if kept is None:
            if self.plan.key is not None:
                raise self.not_found(previous)
            super()._send(target, fresh_only)  # without keys nobody's answers are apart: the backend may know it
            return
        holder = decode_kept(kept).backend
        if holder is None:
            self.take_over(target, fresh_only)
        else:
            super()._send(next((t for t in self.targets if t.name == holder), target), fresh_only)

    def take_over(self, target, fresh_only: bool) -> None:
        """For subclasses: the conversation lies here and not at any backend."""

    def own_lines(self) -> bytes:
        return Exchange.own_lines(self) if self.target is None else super().own_lines()  # None: refused before it was sent

    # -- the answer passes by ------------------------------------------------------------------------------------------

    def pass_head(self, response) -> None:
        self._native = self._native or NativeStream(self.plan.api)
        if response.body:
            self._see(response.body)
        super().on_upstream_head(response)

    def pass_data(self, data: bytes) -> None:
        self._see(data)
        super().on_upstream_data(data)

    def _see(self, data: bytes) -> None:
        native = self._native
        native.see(data)
        if native.id is not None and not self._noted:
            self._noted = True
            keep = self.keeper()
            if keep is not None and not self.counts() and bytes(self.fields.members.get("store", b"")) != b"false":
                keep(native.id.decode("latin-1"), lambda: encode_json({"backend": self.backend}))

    def sign_of_life(self) -> bytes:
        if self._native is None:  # it is begun before the backend has said anything
            self._native = NativeStream(self.plan.api)
        return self._native.sign_of_life()

    def has_ended(self) -> bool:
        return self._native is not None and self._native.whole and not self._partial

    def _stream_is_whole(self) -> bool:
        return self._native.whole

    def _cut_off(self, error: LayaError) -> None:
        if self._sse and not self.has_ended():
            self.finish_with(error, self._native.error(error))
        else:
            super()._cut_off(error)
