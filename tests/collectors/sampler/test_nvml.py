"""Devices by way of NVML: a stand-in for the package ``nvidia-ml-py`` with its names, types and errors."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from perfscope.collectors.sampler.nvml import ALL_LINKS, NVLINK_SENT, PCIE_SENT, Nvml
from perfscope.recording.samples import DEVICE_COLUMNS

NOT_SUPPORTED, TIMEOUT, GPU_IS_LOST = 3, 10, 15
"""Of ``nvmlReturn_t``."""


class FakeNvml(ModuleType):
    """What is asked of ``pynvml``, answered from ``answers``; an error number there is raised.

    Interface as of nvidia-ml-py 13.615.71, whose own binding was tried against a stub of the driver's library.
    """

    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_TEMPERATURE_GPU = 0
    NVML_PCIE_UTIL_TX_BYTES = 0
    NVML_PCIE_UTIL_RX_BYTES = 1

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            super().__init__(f"error {value}")
            self.value = value

    def __init__(self, devices: int = 2) -> None:
        super().__init__("pynvml")
        self.devices = devices
        self.asked: list[str] = []
        self.fields = {138: 1000, 139: 2000, 197: 3000, 198: 4000}
        self.answers: dict[str, Any] = {
            "GetName": b"NVIDIA H100 80GB HBM3",  # bytes from old packages
            "GetUUID": "GPU-8a3c4d5e-0000-1111-2222-333344445555",
            "GetUtilizationRates": SimpleNamespace(gpu=97, memory=41),
            "GetMemoryInfo": SimpleNamespace(total=80 << 30, used=60 << 30),
            "GetClockInfo": {1: 1755, 2: 2619},
            "GetMaxClockInfo": {1: 1980, 2: 2619},
            "GetPowerUsage": 650_000,
            "GetEnforcedPowerLimit": 700_000,
            "GetTotalEnergyConsumption": 123_456,
            "GetTemperature": {0: 66},
            "GetCurrentClocksEventReasons": 0x44,
            "GetCurrentClocksThrottleReasons": 0x4,
            "GetPcieThroughput": {0: 111, 1: 222},
            "GetCurrPcieLinkGeneration": 5,
            "GetMaxPcieLinkGeneration": 5,
            "GetCurrPcieLinkWidth": 8,
            "GetMaxPcieLinkWidth": 16,
        }

    def nvmlInit(self) -> None:  # noqa: N802 - the package's name
        pass

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self.devices

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        if self.answers.get("GetHandleByIndex") == (index, GPU_IS_LOST):
            raise self.NVMLError(GPU_IS_LOST)
        return f"handle {index}"

    def nvmlDeviceGetFieldValues(self, handle: str, wanted: list[tuple[int, int]]) -> list[Any]:  # noqa: N802
        self.asked.append("GetFieldValues")
        assert (NVLINK_SENT, ALL_LINKS) in wanted or (PCIE_SENT, 0) in wanted
        return [
            SimpleNamespace(nvmlReturn=0, valueType=3, value=SimpleNamespace(ullVal=self.fields[field]))
            if field in self.fields
            else SimpleNamespace(nvmlReturn=NOT_SUPPORTED, valueType=0, value=None)
            for field, _ in wanted
        ]

    def __getattr__(self, name: str) -> Any:
        short = name.removeprefix("nvmlDevice")
        if short == name or short not in self.answers:
            raise AttributeError(name)

        def answer(handle: str, *key: int) -> Any:
            self.asked.append(short)
            value = self.answers[short]
            if isinstance(value, self.NVMLError):
                raise value
            return value[key[0]] if isinstance(value, dict) else value

        return answer


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def sample(devices: Nvml, index: int = 0) -> dict[str, int | None]:
    return dict(zip(DEVICE_COLUMNS, devices.sample()[index], strict=True))


def test_a_device_is_described(nvml: FakeNvml) -> None:
    assert Nvml().describe()[1] == {
        "index": 1,
        "name": "NVIDIA H100 80GB HBM3",
        "uuid": "GPU-8a3c4d5e-0000-1111-2222-333344445555",
        "memory_bytes": 80 << 30,
        "power_limit_mw": 700_000,
        "sm_mhz_max": 1980,
        "memory_mhz_max": 2619,
        "pcie_generation": 5,
        "pcie_generation_max": 5,
        "pcie_width": 8,
        "pcie_width_max": 16,
    }


def test_every_counter_lands_in_its_column(nvml: FakeNvml) -> None:
    assert sample(Nvml()) == {
        "utilisation": 97,
        "memory_utilisation": 41,
        "memory_used_bytes": 60 << 30,
        "sm_mhz": 1755,
        "memory_mhz": 2619,
        "power_mw": 650_000,
        "energy_mj": 123_456,
        "temperature_c": 66,
        "throttle": 0x44,
        "nvlink_sent_kib": 1000,
        "nvlink_received_kib": 2000,
        "pcie_sent_bytes": 3000,
        "pcie_received_bytes": 4000,
        "pcie_sent_kbps": None,
        "pcie_received_kbps": None,
    }


def test_rates_of_the_bus_are_asked_of_one_device_in_turn_where_there_are_no_counters(nvml: FakeNvml) -> None:
    del nvml.fields[197], nvml.fields[198]
    devices = Nvml()
    rates = [[row[list(DEVICE_COLUMNS).index("pcie_sent_kbps")] for row in devices.sample()] for _ in range(4)]
    assert rates == [[None, 111], [111, None], [None, 111], [111, None]]


def test_what_is_not_supported_is_not_asked_for_again(nvml: FakeNvml) -> None:
    nvml.answers["GetUtilizationRates"] = nvml.NVMLError(NOT_SUPPORTED)  # as with MIG
    nvml.answers["GetPowerUsage"] = nvml.NVMLError(TIMEOUT)
    devices = Nvml()
    for _ in range(3):
        values = sample(devices)
        assert (values["utilisation"], values["power_mw"], values["temperature_c"]) == (None, None, 66)
    assert nvml.asked.count("GetUtilizationRates") == 2  # once a device
    assert nvml.asked.count("GetPowerUsage") == 6  # it may answer next time


def test_an_old_driver_and_an_old_package_know_fewer_names(nvml: FakeNvml) -> None:
    del nvml.answers["GetCurrentClocksEventReasons"], nvml.answers["GetTotalEnergyConsumption"]
    values = sample(Nvml())
    assert (values["throttle"], values["energy_mj"], values["power_mw"]) == (0x4, None, 650_000)


def test_a_lost_device_does_not_hide_the_others(nvml: FakeNvml) -> None:
    nvml.answers["GetHandleByIndex"] = (0, GPU_IS_LOST)
    devices = Nvml()
    assert [device["index"] for device in devices.describe()] == [1]
    assert len(devices.sample()) == 1


def test_nothing_to_sample(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.devices = 0
    with pytest.raises(RuntimeError, match="none of 0 devices"):
        Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ImportError):
        Nvml()
