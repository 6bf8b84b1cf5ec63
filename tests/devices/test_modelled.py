import math

import pytest

from tessera_core.devices.modelled import ModelledDevice
from tessera_core.profile.catalogue import catalogue
from tessera_core.profile.times import Z_90
from tessera_formats.errors import InputError


def test_measured_peaks_are_taken_as_they_are() -> None:
    device = ModelledDevice.of("h200-sxm")
    assert device.memory().per_s == 4125e9
    assert device.compute("bfloat16", matrix=True).per_s == 774e12
    assert device.memory().log_deviation == 0.0


def test_a_datasheet_rate_is_reduced_and_its_doubt_kept() -> None:
    device, share = ModelledDevice.of("rtx-4090"), catalogue().memory
    memory = device.memory()
    assert math.isclose(memory.per_s, 1008e9 * share.typical)
    # The range seen is a 90% interval.
    assert math.isclose(math.exp(2 * Z_90 * memory.log_deviation), share.high / share.low)


@pytest.mark.parametrize(
    ("name", "dtype", "matrix", "origin"),
    [
        ("t4", "bfloat16", True, "bfloat16 as float16"),
        ("l40s", "float8_e4m3fn", True, "float8_e4m3fn, "),
        ("a100-80gb", "float8_e4m3fn", True, "float8_e4m3fn at the float32 rate"),
        ("l40s", "int64", False, "int64, "),
        ("cpu-1thread", "float16", True, "float16 at the float32 rate"),
    ],
)
def test_a_rate_says_what_stood_in_for_what(name: str, dtype: str, matrix: bool, origin: str) -> None:
    assert origin in ModelledDevice.of(name).compute(dtype, matrix).origin


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(InputError, match="did you mean rtx-4090"):
        ModelledDevice.of("rtx4090")
