"""What the configuration says of a model beyond its files, put on its card once it is loaded. Engine thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from laya.config import EngineConfig
from laya.schema.generation import ModelCard

Loaded = tuple[Any, Any, ModelCard]  # runner, tokenizer, card


def with_settings(load: Callable[[], Loaded], settings: EngineConfig) -> Callable[[], Loaded]:
    """`load`, and then the card with how tool calls are written and how decisions are made."""

    def loaded() -> Loaded:
        runner, tokenizer, card = load()
        details = {**card.details, "decision_temperature": settings.decision_temperature}
        if settings.decision_options is not None:
            details["decision_options"] = settings.decision_options
        if settings.tool_calls != "auto":
            details["chat_style"] = {**details.get("chat_style", {}), "calls": settings.tool_calls}
        return runner, tokenizer, msgspec.structs.replace(card, details=details)

    return loaded
