"""A device that is not here: the rates that the catalogue lets one expect of it, and how sure they are."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tessera_core.profile.catalogue import Catalogue, DeviceType, Efficiency, catalogue
from tessera_core.profile.times import Z_90


@dataclass(frozen=True, slots=True)
class Rate:
    """An achievable rate per second, the standard deviation of its logarithm, and where it comes from."""

    per_s: float
    log_deviation: float
    origin: str


@dataclass(frozen=True, slots=True)
class ModelledDevice:
    """A catalogued type, used through its achievable rates: measured peaks, else a share of the datasheet's."""

    type: DeviceType
    catalogue: Catalogue

    @staticmethod
    def of(name: str) -> ModelledDevice:
        """The shipped catalogue's type; raises ``InputError`` that lists near names."""
        return ModelledDevice(catalogue().type(name), catalogue())

    def memory(self) -> Rate:
        """Bytes per second."""
        if self.type.measured is not None:
            return Rate(self.type.measured.memory_bytes_per_s, 0.0, "measured peak")
        assert self.type.datasheet is not None
        return _share(self.type.datasheet.memory_bytes_per_s, self.catalogue.memory)

    def compute(self, dtype: str, matrix: bool) -> Rate:
        """Floating-point operations per second in ``dtype``.

        ``matrix``: on matrix units where the type has them for ``dtype``; otherwise on vector units, whose
        rate is float32's. A dtype without a rate of its own (float64, integers) is given float32's as well.
        """
        wanted = self._stands_for(dtype) if matrix else "float32"
        note = f" as {wanted}" if matrix and wanted != dtype and not wanted.startswith("float8") else ""
        rate = self._compute(wanted)
        if rate is None:
            rate, note = self._compute("float32"), " at the float32 rate"
        assert rate is not None, f"{self.type.name} has no float32 rate"
        return Rate(rate.per_s, rate.log_deviation, f"{dtype}{note}, {rate.origin}")

    def stated_flops_per_s(self, dtype: str) -> float:
        """What the maker states for matrix products in ``dtype``; from the measured rate where nothing is stated."""
        stated = self.type.datasheet
        if stated is not None:
            rates = stated.flops_per_s
            return rates.get(self._stands_for(dtype), rates["float32"])
        return self.compute(dtype, matrix=True).per_s / self.catalogue.compute.typical

    def floor_us(self, pointwise: bool, ops: int) -> float:
        """Least time of a kernel of ``ops`` ops."""
        floor = self.type.pointwise_floor_us if pointwise else self.type.other_floor_us
        return floor * ops if self.type.floor_per == "op" else floor

    def _stands_for(self, dtype: str) -> str:
        wanted = self.type.substitute.get(dtype, dtype)
        return "float8" if wanted.startswith("float8") else wanted

    def _compute(self, dtype: str) -> Rate | None:
        measured, datasheet = self.type.measured, self.type.datasheet
        if measured is not None and dtype in measured.flops_per_s:
            return Rate(measured.flops_per_s[dtype], 0.0, "measured peak")
        if datasheet is not None and dtype in datasheet.flops_per_s:
            return _share(datasheet.flops_per_s[dtype], self.catalogue.compute)
        return None


def _share(stated: float, efficiency: Efficiency) -> Rate:
    """A datasheet's rate times the usual share; the range seen is taken as a 90% interval."""
    deviation = math.log(efficiency.high / efficiency.low) / (2 * Z_90)
    return Rate(stated * efficiency.typical, deviation, f"{efficiency.typical:.0%} of the datasheet")
