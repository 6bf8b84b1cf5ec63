"""Fake tensors have the strides that eager execution gives, those of extents of one included."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._ops import OpOverload

from tessera_core.trace.fake import new_fake_mode, strided_as_eager

ATEN = torch.ops.aten
OPERATORS = {
    ATEN.mul.Tensor: 2, ATEN.add.Tensor: 2, ATEN.eq.Tensor: 2, ATEN.maximum.default: 2, ATEN.neg.default: 1,
    ATEN.silu.default: 1, ATEN.rsqrt.default: 1, ATEN.gelu.default: 1, ATEN.clone.default: 1,
}  # fmt: skip


@st.composite
def dense(draw: st.DrawFn, shape: list[int]) -> torch.Tensor:
    """A tensor whose axes lie in memory in any order; some of its extents may be broadcast."""
    order = draw(st.permutations(range(len(shape))))
    shape = [draw(st.sampled_from((extent, extent, 1))) for extent in shape]
    made = torch.empty([shape[axis] for axis in order])
    return made.permute([order.index(axis) for axis in range(len(shape))])


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
@given(data=st.data(), shape=st.lists(st.sampled_from((1, 1, 2, 3)), min_size=1, max_size=4))
def test_pointwise_results_lie_as_eager_ones(
    operator: OpOverload, data: st.DataObject, shape: list[int]
) -> None:
    given_tensors = [data.draw(dense(shape)) for _ in range(OPERATORS[operator])]
    mode = new_fake_mode()
    fakes = [mode.from_tensor(tensor) for tensor in given_tensors]
    with mode:
        found = strided_as_eager(operator, fakes, {}, operator(*fakes))
    assert found.stride() == operator(*given_tensors).stride()
