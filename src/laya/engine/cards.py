"""GPUs as the driver sees them, through NVML: memory, temperature, and whether a card has fallen off the bus. No torch.

In: the package `nvidia-ml-py` (module pynvml), where it and a driver are installed; without them there are no cards here.
Out: `Card`s. Called on the watchdog's thread, and before the start; a call takes milliseconds at worst.
"""

from __future__ import annotations

from typing import Any

import msgspec

# NVML's errors after which a card does not come back without a reset or a boot.
_LOST = ("GPU_IS_LOST", "RESET_REQUIRED")


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. Bytes; `temperature_c` None where the card does not tell; a lost card has no figures."""

    index: int
    name: str = ""
    total: int = 0
    used: int = 0
    temperature_c: float | None = None
    lost: bool = False

    @property
    def used_share(self) -> float:
        return self.used / self.total if self.total > 0 else 0.0


class Nvml:
    """The driver's library. `module` is pynvml, or what stands for it in a test."""

    def __init__(self, module: Any) -> None:
        self._nvml = module
        self._lost_codes = {getattr(module, f"NVML_ERROR_{name}", None) for name in _LOST}  # older packages lack the second
        module.nvmlInit()
        self._handles = [module.nvmlDeviceGetHandleByIndex(i) for i in range(module.nvmlDeviceGetCount())]

    @classmethod
    def find(cls) -> Nvml | None:
        """None without the package, a driver or a card."""
        try:
            import pynvml

            found = cls(pynvml)
        except Exception:  # no package, no driver, no permission: each its own class of error
            return None
        return found if found._handles else None

    def driver_version(self) -> str:
        """"unknown" where the driver does not tell."""
        try:
            version = self._nvml.nvmlSystemGetDriverVersion()
        except self._nvml.NVMLError:
            return "unknown"
        return version.decode() if isinstance(version, bytes) else version

    def cards(self) -> tuple[Card, ...]:
        return tuple(self._card(index, handle) for index, handle in enumerate(self._handles))

    def _card(self, index: int, handle: Any) -> Card:
        nvml = self._nvml
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            name = nvml.nvmlDeviceGetName(handle)
        except nvml.NVMLError as error:
            if error.value in self._lost_codes:
                return Card(index=index, lost=True)
            return Card(index=index)
        return Card(
            index=index,
            name=name.decode() if isinstance(name, bytes) else name,
            total=memory.total,
            used=memory.used,
            temperature_c=self._temperature(handle),
        )

    def _temperature(self, handle: Any) -> float | None:
        try:
            return float(self._nvml.nvmlDeviceGetTemperature(handle, self._nvml.NVML_TEMPERATURE_GPU))
        except self._nvml.NVMLError:
            return None
