"""Rotary settings from a header: one reader for both families of files. No torch here.

Out: `RopeSpec`. Scalings that change more than the angle of each pair (yarn, dynamic, longrope) are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from laya.model.spec import RopeSpec, UnsupportedModel

KNOWN_SCALINGS = ("default", "linear", "llama3")


def rope_from_gguf(arch: str, fields: Mapping[str, Any], *, factors: tuple[float, ...] | None = None) -> RopeSpec:
    """`factors` come from the file's rope_freqs tensor, which holds llama 3.1's scaling already worked out."""
    kind = fields.get(f"{arch}.rope.scaling.type", "none")
    factor = 1.0
    if kind == "linear":
        factor = float(fields.get(f"{arch}.rope.scaling.factor", 1.0))
    elif kind != "none":
        raise UnsupportedModel(f"rotary scaling {kind!r} is not supported; known: none, linear, llama3 (as rope_freqs)")
    return RopeSpec(base=float(fields.get(f"{arch}.rope.freq_base", 10000.0)), linear_factor=factor, factors=factors)


def rope_from_hf(config: Mapping[str, Any], parameters: Mapping[str, Any] | None = None, *, head_dim: int) -> RopeSpec:
    """`parameters` is a rope_parameters mapping (transformers 5); older files keep rope_theta and rope_scaling apart."""
    if parameters is None:
        parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = float(parameters.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return RopeSpec(base=base)
    if kind == "linear":
        return RopeSpec(base=base, linear_factor=float(parameters["factor"]))
    if kind == "llama3":
        return RopeSpec(base=base, factors=_llama3_factors(parameters, base, head_dim))
    raise UnsupportedModel(f"rotary scaling {kind!r} is not supported; known: {', '.join(KNOWN_SCALINGS)}")


def _llama3_factors(parameters: Mapping[str, Any], base: float, head_dim: int) -> tuple[float, ...]:
    """Long wavelengths are stretched by `factor`, short ones left, those between blended."""
    factor, old = float(parameters["factor"]), float(parameters["original_max_position_embeddings"])
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    divisors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * base ** (2 * pair / head_dim)
        if wavelength < old / high:
            divisors.append(1.0)
        elif wavelength > old / low:
            divisors.append(factor)
        else:
            keep = (old / wavelength - low) / (high - low)
            divisors.append(1.0 / ((1.0 - keep) / factor + keep))
    return tuple(divisors)
