"""NVIDIA devices by way of NVML (the package ``nvidia-ml-py``, imported as ``pynvml``).

What a device, a driver or a permission does not allow is found out at the first try and not asked for again.
Reference: the NVML API reference manual, and ``nvml.h`` for the field numbers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from perfscope.recording.samples import DEVICE_COLUMNS

NVLINK_SENT: Final = 138
NVLINK_RECEIVED: Final = 139
"""``NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX`` and ``_RX``: payload in KiB since the driver was loaded."""
ALL_LINKS: Final = 0xFFFFFFFF
"""Scope of these two that adds up all links."""
PCIE_SENT: Final = 197
PCIE_RECEIVED: Final = 198
"""``NVML_FI_DEV_PCIE_COUNT_TX_BYTES`` and ``_RX_BYTES``; they may wrap."""

_WIDTHS: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Member of a field's value by its ``valueType`` (``nvmlValueType_t``)."""

_FINAL: Final = {2, 3, 4, 13, 25}
"""Errors that the next try would meet again (``nvmlReturn_t``): invalid argument, not supported, no permission,
function not found, argument version mismatch."""

_ANSWERS: Final = (
    ("sm_mhz", "nvmlDeviceGetClockInfo", "NVML_CLOCK_SM"),
    ("memory_mhz", "nvmlDeviceGetClockInfo", "NVML_CLOCK_MEM"),
    ("power_mw", "nvmlDeviceGetPowerUsage"),
    ("energy_mj", "nvmlDeviceGetTotalEnergyConsumption"),
    ("temperature_c", "nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU"),
)
"""Columns that one function answers: the column, the function, and the constants that it is asked with."""

Values = dict[str, "int | None"]


class Nvml:
    """The devices of this host. Raises ImportError without the package, RuntimeError without a driver or a device."""

    def __init__(self) -> None:
        nvml: Any = importlib.import_module("pynvml")
        try:
            nvml.nvmlInit()
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            raise RuntimeError(f"NVML: {error}") from error
        self._devices = []
        for index in range(count):
            with suppress(nvml.NVMLError):  # one that is lost must not hide the others
                self._devices.append(_Device(nvml, index, nvml.nvmlDeviceGetHandleByIndex(index)))
        if not self._devices:
            raise RuntimeError(f"NVML can use none of {count} devices")
        self._turn = 0

    def describe(self) -> list[dict[str, Any]]:
        """What does not change while a job runs, one entry a device."""
        return [device.describe() for device in self._devices]

    def sample(self) -> list[list[int | None]]:
        """For each device one value for each of ``DEVICE_COLUMNS``; None where it does not report it."""
        self._turn = (self._turn + 1) % len(self._devices)
        samples = [device.sample(in_turn=place == self._turn) for place, device in enumerate(self._devices)]
        return [[values.get(name) for name in DEVICE_COLUMNS] for values in samples]


class _Device:
    def __init__(self, nvml: Any, index: int, handle: Any) -> None:
        self._index = index
        self._nvml = nvml
        self._handle = handle
        self._parts: list[Callable[[], Values]] = [
            self._utilisation, self._memory, self._reasons, self._nvlink, self._pcie,
            *(partial(self._one, *answer) for answer in _ANSWERS),
        ]  # fmt: skip
        self._slow: list[Callable[[], Values]] = [self._pcie_rates]

    def describe(self) -> dict[str, Any]:
        nvml, asked = self._nvml, self._ask
        memory = asked(nvml.nvmlDeviceGetMemoryInfo)
        limit = asked(nvml.nvmlDeviceGetEnforcedPowerLimit)
        return {
            "index": self._index,
            "name": _text(asked(nvml.nvmlDeviceGetName)),
            "uuid": _text(asked(nvml.nvmlDeviceGetUUID)),
            "memory_bytes": memory.total if memory is not None else None,
            "power_limit_mw": limit,
            "sm_mhz_max": asked(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM),
            "memory_mhz_max": asked(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_MEM),
            "pcie_generation": asked(nvml.nvmlDeviceGetCurrPcieLinkGeneration),
            "pcie_generation_max": asked(nvml.nvmlDeviceGetMaxPcieLinkGeneration),
            "pcie_width": asked(nvml.nvmlDeviceGetCurrPcieLinkWidth),
            "pcie_width_max": asked(nvml.nvmlDeviceGetMaxPcieLinkWidth),
        }

    def sample(self, *, in_turn: bool) -> Values:
        values: Values = {}
        for parts in (self._parts, self._slow if in_turn else []):
            for part in list(parts):
                try:
                    values.update(part())
                except self._nvml.NVMLError as error:
                    if getattr(error, "value", None) in _FINAL:
                        parts.remove(part)
                except AttributeError:  # a package older than the question
                    parts.remove(part)
        return values

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(self._handle, *arguments)
        except self._nvml.NVMLError:
            return None

    def _utilisation(self) -> Values:
        rates = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
        return {"utilisation": rates.gpu, "memory_utilisation": rates.memory}

    def _memory(self) -> Values:
        return {"memory_used_bytes": self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used}

    def _one(self, column: str, function: str, *constants: str) -> Values:
        nvml = self._nvml
        return {column: getattr(nvml, function)(self._handle, *(getattr(nvml, name) for name in constants))}

    def _reasons(self) -> Values:
        # The newer name of the same call; a driver before 535 has only the older.
        try:
            return {"throttle": self._nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle)}
        except (AttributeError, self._nvml.NVMLError):
            return {"throttle": self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)}

    def _nvlink(self) -> Values:
        sent, received = self._fields((NVLINK_SENT, ALL_LINKS), (NVLINK_RECEIVED, ALL_LINKS))
        return {"nvlink_sent_kib": sent, "nvlink_received_kib": received}

    def _pcie(self) -> Values:
        sent, received = self._fields((PCIE_SENT, 0), (PCIE_RECEIVED, 0))
        if sent is not None and received is not None:
            self._slow.clear()
        return {"pcie_sent_bytes": sent, "pcie_received_bytes": received}

    def _pcie_rates(self) -> Values:
        ask = self._nvml.nvmlDeviceGetPcieThroughput
        return {
            "pcie_sent_kbps": ask(self._handle, self._nvml.NVML_PCIE_UTIL_TX_BYTES),
            "pcie_received_kbps": ask(self._handle, self._nvml.NVML_PCIE_UTIL_RX_BYTES),
        }

    def _fields(self, *wanted: tuple[int, int]) -> list[int | None]:
        """Values of (field, scope) pairs; None for those that this device has not."""
        answers = self._nvml.nvmlDeviceGetFieldValues(self._handle, list(wanted))
        return [
            int(getattr(answer.value, _WIDTHS[answer.valueType])) if answer.nvmlReturn == 0 else None
            for answer in answers
        ]


def _text(value: object) -> str:
    """Older packages answer in bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")
