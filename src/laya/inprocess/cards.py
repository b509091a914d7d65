"""A model's card: from its header before it is loaded, and what the configuration says beyond its files. Any thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

from laya.config import EngineConfig, served_name
from laya.errors import StartError
from laya.inprocess.plans import EnginePlan
from laya.schema.generation import ModelCard

_read_calibration = msgspec.json.Decoder(dict[Literal["noul", "choice", "score"], Annotated[float, msgspec.Meta(gt=0)]]).decode
Loaded = tuple[Any, Any, ModelCard]  # runner, tokenizer, card


def card_before_loading(engine: EnginePlan, device: str) -> ModelCard:
    """Enough to translate a request by, which may come (and wait) before the weights are there."""
    settings, told = engine.settings, engine.description
    details = {
        "state": "not loaded", "engine": engine.choice.engine, "engine_why": engine.choice.why, "device": device,
        "chat_style": told["chat_style"],
    }  # fmt: skip
    return ModelCard(
        id=served_name(settings), max_model_len=engine.plan.max_seq_len, chat=told["chat_template"],
        details=_with_settings(details, settings),
    )  # fmt: skip


def with_settings(load: Callable[[], Loaded], engine: EnginePlan) -> Callable[[], Loaded]:
    """`load`, and then the card with why this engine, how tool calls are written and how decisions are made."""

    def loaded() -> Loaded:
        runner, tokenizer, card = load()
        details = {**card.details, "engine_why": engine.choice.why}
        return runner, tokenizer, msgspec.structs.replace(card, details=_with_settings(details, engine.settings))

    return loaded


def _with_settings(details: dict[str, Any], settings: EngineConfig) -> dict[str, Any]:
    temperatures = dict.fromkeys(("noul", "choice", "score"), settings.decision_temperature)
    if settings.decision_calibration is not None:
        temperatures |= _calibration(settings.decision_calibration)
    details = {**details, "decision_temperatures": temperatures}
    if settings.decision_options is not None:
        details["decision_options"] = settings.decision_options
    if settings.tool_calls != "auto":
        details["chat_style"] = {**details.get("chat_style", {}), "calls": settings.tool_calls}
    return details


def _calibration(path: str) -> dict[str, float]:
    """Temperatures by type of decision, from the file that a calibration run wrote. Raises StartError in one line."""
    try:
        with open(path, "rb") as file:
            return _read_calibration(file.read())
    except OSError as exc:
        raise StartError(f"inference.decision_calibration: {path}: {exc.strerror}") from None
    except msgspec.DecodeError as exc:
        raise StartError(f"inference.decision_calibration: {path}: {exc}; allowed: noul, choice, score, above 0") from None
