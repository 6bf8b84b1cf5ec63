import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_core.devices.modelled import ModelledDevice
from tessera_core.profile.catalogue import catalogue, device_type
from tessera_core.profile.type_name import TypeName
from tessera_formats.errors import InputError

BASES = st.sampled_from(sorted(catalogue().types))
COUNTS = st.none() | st.integers(1, 999_999)
DTYPES = st.none() | st.sampled_from(["float8", "int4_wo", "bfloat16"])


@given(BASES, COUNTS, DTYPES)
def test_a_name_reads_back_as_it_was_written(base: str, count: int | None, dtype: str | None) -> None:
    name = TypeName(base=base, multiprocessors=count, dtype=dtype)
    assert TypeName.parse(str(name)) == name


@given(st.text(max_size=20))
def test_any_other_text_is_a_base_or_one_line(text: str) -> None:
    try:
        assert str(TypeName.parse(text)) == text
    except InputError as problem:
        assert "device type" in str(problem) and "\n" not in str(problem).replace(text, "")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("h200-sxm/sn=96", "did you mean sm=96?"),
        ("h200-sxm/sm", "sm"),
        ("h200-sxm/sm=0", "no number of multiprocessors"),
        ("h200-sxm/sm=132", "h200-sxm has 132 multiprocessors; ask for fewer, or for h200-sxm"),
        ("h200-sxm/sm=96/sm=36", "says sm twice"),
        ("h200-sxm/dtype=float8/sm=36", "write it as h200-sxm/sm=36/dtype=float8"),
        ("h200-sxm/sm=036", "no number"),
        ("h200/sm=96", "did you mean h200-sxm"),
        ("l40s/dtype=", "names no dtype"),
        ("l40s/dtype=floot8", "did you mean float8"),
        ("a100-80gb/dtype=float8", "a100-80gb has no float8 rate; it computes in"),
        ("cpu-1thread/sm=1", "is no GPU"),
        ("/sm=3", "has no base"),
    ],
)
def test_what_a_name_cannot_say_is_one_line(name: str, hint: str) -> None:
    with pytest.raises(InputError) as problem:
        device_type(name)
    assert hint in str(problem.value)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize(
    ("multiprocessors", "tflop_per_s", "gbyte_per_s"),
    [(16, 108, 729), (32, 210, 1386), (64, 390, 2504), (96, 571, 3299)],
)
def test_slices_reach_what_was_measured_of_them(
    multiprocessors: int, tflop_per_s: float, gbyte_per_s: float
) -> None:
    # As shares of the 799 TFLOP/s and 4,211 GB/s that the whole GPU reached in the same session. Bandwidth is that of
    # plain copies, the least of all kernels: products and elementwise kernels draw more (see the catalogue).
    whole, part = device_type("h200-sxm"), device_type(f"h200-sxm/sm={multiprocessors}")
    assert whole.measured is not None and part.measured is not None
    compute = part.measured.flops_per_s["bfloat16"] / whole.measured.flops_per_s["bfloat16"]
    memory = part.measured.memory_bytes_per_s / whole.measured.memory_bytes_per_s
    assert math.isclose(compute, tflop_per_s / 799, rel_tol=0.08)
    assert gbyte_per_s / 4211 < memory < 1


@given(st.sampled_from([name for name, kind in catalogue().types.items() if kind.kind == "gpu"]), st.data())
def test_a_slice_has_the_base_s_memory_and_less_of_its_rates(name: str, data: st.DataObject) -> None:
    whole = device_type(name)
    count = data.draw(st.integers(1, whole.multiprocessors - 1))
    part = device_type(f"{name}/sm={count}")
    assert (part.name, part.base, part.multiprocessors) == (f"{name}/sm={count}", name, count)
    assert (part.memory_bytes, part.l2_bytes) == (whole.memory_bytes, whole.l2_bytes)
    assert (
        ModelledDevice(part, catalogue()).memory().per_s < ModelledDevice(whole, catalogue()).memory().per_s
    )
    # Few multiprocessors draw more than their share of the memory's rate.
    assert (
        ModelledDevice(part, catalogue()).memory().per_s
        > count / whole.multiprocessors * ModelledDevice(whole, catalogue()).memory().per_s
    )


def test_a_dtype_is_the_type_s_own_word() -> None:
    kind = device_type("l40s/dtype=float8")
    assert (kind.name, kind.base, kind.dtype) == ("l40s/dtype=float8", "l40s", "float8")
    assert kind.datasheet == device_type("l40s").datasheet
    both = device_type("h200-sxm/sm=36/dtype=float8")
    assert (both.multiprocessors, both.dtype) == (36, "float8")
