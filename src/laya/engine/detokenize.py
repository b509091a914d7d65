"""Tokens to text as they come: bytes are joined to whole characters, and stop strings never leak.

In: one token at a time, on the engine thread. Out: the text that is certain. What may still become part of a character or
of a stop string is held back: at most three bytes, and one character less than the longest stop string. The concatenation
of everything handed out equals the whole text up to the stop string that ended first, however the tokens cut it.
"""

from __future__ import annotations

import codecs

from laya.engine.step import Tokenizer

_utf8 = codecs.getincrementaldecoder("utf-8")


class StopString:
    """One stop string followed through the text (Knuth-Morris-Pratt): linear, whatever the string repeats."""

    __slots__ = ("text", "matched", "_failure")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # characters of `text` that the seen text ends with
        self._failure = failure = [0] * len(text)
        border = 0
        for i in range(1, len(text)):
            while border and text[i] != text[border]:
                border = failure[border - 1]
            if text[i] == text[border]:
                border += 1
            failure[i] = border

    def feed(self, piece: str, may_stop: bool) -> int | None:
        """Where in `piece` the string ends for the first time, or None. Without `may_stop` matches are passed over."""
        text, failure, matched = self.text, self._failure, self.matched
        if not matched and text[0] not in piece:
            return None
        for position, character in enumerate(piece):
            while matched and text[matched] != character:
                matched = failure[matched - 1]
            if text[matched] == character:
                matched += 1
            if matched == len(text):
                if may_stop:
                    return position + 1
                matched = failure[matched - 1]
        self.matched = matched
        return None


class Detokenizer:
    """The text of one choice. `num_decoded` and `num_emitted` count characters; their difference is held back."""

    __slots__ = ("num_decoded", "num_emitted", "stopped_by", "_token_bytes", "_decoder", "_stops", "_held")

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self.num_decoded = 0
        self.num_emitted = 0
        self.stopped_by: str | None = None
        self._token_bytes = tokenizer.token_bytes
        self._decoder = _utf8("replace")
        self._stops = [StopString(text) for text in stop if text]
        self._held = ""

    def push(self, token_id: int, may_stop: bool = True) -> str:
        """The text that `token_id` makes certain. Sets `stopped_by` when a stop string ends in it; push no more then."""
        return self._advance(self._decoder.decode(self._token_bytes(token_id)), may_stop)

    def finish(self, may_stop: bool = True) -> str:
        """What was held back, when generation ended for another reason; an unfinished character becomes U+FFFD."""
        text = self._advance(self._decoder.decode(b"", True), may_stop)
        if self.stopped_by is None:
            text += self._held
            self.num_emitted += len(self._held)
            self._held = ""
        return text

    def _advance(self, piece: str, may_stop: bool) -> str:
        if not self._stops:
            self.num_decoded += len(piece)
            self.num_emitted = self.num_decoded
            return piece
        cut = self._find_stop(piece, may_stop) if piece else None
        text = self._held + piece
        self.num_decoded += len(piece)
        if cut is None:
            keep = max(stop.matched for stop in self._stops)
            end = len(text) - keep
            self._held = text[end:]
        else:
            end = len(self._held) + cut
            self._held = ""
        self.num_emitted += end
        return text[:end]

    def _find_stop(self, piece: str, may_stop: bool) -> int | None:
        """Where the text is cut, counted from the start of `piece` (negative: inside what is held).

        The stop string that ends first wins, of several that end together the longest: the same answer however the
        text was cut into tokens.
        """
        best: tuple[int, int] | None = None
        for stop in self._stops:
            end = stop.feed(piece, may_stop)
            if end is not None and (best is None or (end, end - len(stop.text)) < best):
                best = (end, end - len(stop.text))
                self.stopped_by = stop.text
        return None if best is None else best[1]
