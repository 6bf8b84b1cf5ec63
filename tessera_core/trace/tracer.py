"""The recorder: every operator call that PyTorch's dispatcher sees while one step of a model runs.

Ops are written down in portable form with exact storages and strides. Views leave no op behind: they are
tensor references. Attention is taken one level higher, as the composite operator that every device can run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tessera_core.program.operators import TRUSTED_NAMESPACES, resolve_operator
from tessera_core.trace.encode import encode, map_tensors, tensors_in
from tessera_core.trace.operands import content_operands, schema_operands
from tessera_core.trace.operators import argument_values, is_view, reads_values, schema_says_all
from tessera_core.trace.place import calling_place
from tessera_core.trace.recorder import Recorder, encode_named
from tessera_core.trace.registry import form_problem, is_lazy
from tessera_core.trace.writes import Watch, written_names, written_tensors
from tessera_formats.errors import ArtifactError, ModelError, UntracedLaunchError

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_HOST_READS = ("numpy", "tolist", "__array__", "__dlpack__", "data_ptr")


class OpMode(TorchDispatchMode):
    """Feeds a :class:`Recorder` with what the dispatcher sees."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recorder = self.recorder
        if recorder.silent:
            return func(*args, **kwargs)
        op = str(func)
        if func.namespace == "prim":
            # A question about a tensor, which only fake ones pass on to the dispatcher: nothing of it is recorded.
            return recorder.call(func, args, kwargs)
        found = tensors_in((args, kwargs))
        check_forms(op, "uses", found)
        if func is _CPU_ATTENTION:
            return self._cpu_attention(func, args, kwargs)
        self._refuse(func, op, found, args, kwargs)
        if torch.Tag.data_dependent_output in func.tags:
            for tensor in found:
                recorder.read_on_host(tensor, op)
            return func(*args, **kwargs)
        if torch.Tag.inplace_view in func.tags:
            for tensor in found:
                recorder.entry(tensor, op)
            return recorder.call(func, args, kwargs)
        if any(is_lazy(tensor) for tensor in found):
            if is_view(func):
                return recorder.call(func, args, kwargs)
            args, kwargs = self._without_lazy(func, args, kwargs)
            found = tensors_in((args, kwargs))
        arguments = {
            "args": encode(list(args), lambda t: recorder.tensor(t, op), op),
            "kwargs": encode_named(kwargs, recorder, op),
        }
        written = written_tensors(func, args, kwargs)
        if written:
            # As in replay, where equal views are one tensor: some operators refuse what they write as a source too.
            same = {recorder.tensor(tensor, op): tensor for tensor in reversed(written)}
            args, kwargs = (
                map_tensors(value, lambda t: same.setdefault(recorder.tensor(t, op), t))
                for value in (args, kwargs)
            )
        real = all(recorder.has_value(tensor) for tensor in found)
        watch = None if schema_says_all(func) or not real else self._watch(found, written)
        if recorder.looks_inside(func, found):
            result, inner = recorder.call_watched(func, args, kwargs)
        else:
            result, inner = recorder.call(func, args, kwargs), None
        if watch is not None:
            with recorder.quiet():
                watch.check(op)
        made = tensors_in(result)
        check_forms(op, "makes", made)
        if not written:
            if made and all(recorder.registry.find(tensor) is not None for tensor in made):
                return result
            if not made and not func._schema.returns:
                raise ModelError(
                    f"{op} at {calling_place()}: returns nothing and writes nothing, so nothing can depend on it;"
                    " leave it out of the step"
                )
            if not made:
                # A question about shape, dtype or device, which the trace answers by being specialised.
                return result
        _check_replayable(func, op)
        depends = reads_values(func) and recorder.depends(found, op)
        for tensor in written:
            recorder.mark_written(tensor, op, depends, real)
        recorder.record(
            op,
            str(func._schema),
            arguments,
            result,
            lambda: (
                schema_operands(recorder.registry, func, arguments, recorder.ops[-1].outputs)
                + (content_operands(recorder.registry, func, args, kwargs) if written and real else ())
            ),
            depends,
        )
        if inner is not None:
            recorder.keep_launches(op, inner)
        return result

    def resolved(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself; or, of a conjugate or negative view, the values that it stands for, by an op.

        Such a view differs from its base in a bit that only PyTorch's own dispatch looks at.
        """
        if not is_lazy(tensor):
            return tensor
        plain, functions = tensor, []
        with self.recorder.quiet():
            if plain.is_conj():
                plain = plain.conj()
                functions.append(torch.ops.aten._conj_physical.default)
            if plain.is_neg():
                plain = torch._neg_view(plain)
                functions.append(torch.ops.aten.neg.default)
        for function in functions:
            plain = self.__torch_dispatch__(function, (), (plain,))
        return plain

    def _without_lazy(self, func: OpOverload, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A call's arguments with all that is only read resolved."""
        written = written_names(func, argument_values(func, args, kwargs))
        names = [argument.name for argument in func._schema.arguments]

        def change(name: str, value: Any) -> Any:
            return value if name in written else map_tensors(value, self.resolved)

        return (
            tuple(change(name, value) for name, value in zip(names, args)),
            {name: change(name, value) for name, value in kwargs.items()},
        )

    def _watch(self, found: list[torch.Tensor], written: list[torch.Tensor]) -> Watch:
        with self.recorder.quiet():
            return Watch(found, written)

    def attention(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Attention called as one function: recorded as the composite operator, executed silently."""
        recorder, op = self.recorder, str(ATTENTION)
        values = map_tensors(argument_values(ATTENTION, args, kwargs), self.resolved)
        if values.get("dropout_p", 0.0):
            raise ModelError(f"{op} at {calling_place()}: uses dropout; put the model in eval mode")
        order = [a.name for a in ATTENTION._schema.arguments if not a.kwarg_only]
        given = [name for name in order if name in values]
        positional = [
            values.get(name, a.default_value)
            for name, a in zip(order, ATTENTION._schema.arguments)
            if order.index(name) <= order.index(given[-1])
        ]
        named = {name: value for name, value in values.items() if name not in order}
        arguments = {
            "args": encode(positional, lambda t: recorder.tensor(t, op), op),
            "kwargs": encode_named(named, recorder, op),
        }
        found = tensors_in((positional, named))
        result = recorder.call(ATTENTION, tuple(positional), named)
        depends = recorder.depends(found, op)
        recorder.record(
            op,
            str(ATTENTION._schema),
            arguments,
            result,
            lambda: schema_operands(recorder.registry, ATTENTION, arguments, recorder.ops[-1].outputs),
            depends,
        )
        return result

    def _cpu_attention(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The CPU's own variant, reached from C++: recorded as the composite operator."""
        recorder, op = self.recorder, str(ATTENTION)
        values = argument_values(func, args, kwargs)
        positional = [values["query"], values["key"], values["value"], values.get("attn_mask"), 0.0]
        positional.append(values.get("is_causal", False))
        scale = values.get("scale")
        arguments = {
            "args": encode(positional, lambda t: recorder.tensor(t, op), op),
            "kwargs": {} if scale is None else {"scale": scale},
        }
        depends = recorder.depends(tensors_in(positional), op)
        result = recorder.call(func, args, kwargs)
        recorder.record(
            op,
            str(ATTENTION._schema),
            arguments,
            result[0],
            lambda: schema_operands(recorder.registry, ATTENTION, arguments, recorder.ops[-1].outputs),
            depends,
        )
        return result

    def _refuse(self, func: OpOverload, op: str, found: list[torch.Tensor], args: Any, kwargs: Any) -> None:
        if torch.Tag.nondeterministic_seeded in func.tags and not _without_chance(func, args, kwargs):
            raise ModelError(
                f"{op} at {calling_place()}: draws from the global random generator;"
                " put the model in eval mode, or pass random numbers as an input"
            )
        if torch.Tag.dynamic_output_shape in func.tags and _shape_depends_on_values(func, args):
            place = calling_place()
            if self.recorder.depends(found, op) or not all(self.recorder.has_value(t) for t in found):
                raise UntracedLaunchError(
                    f"{op} at {place}: its result's shape depends on values that only a run knows;"
                    " use a mask or torch.where instead"
                )
        if func._schema.name in ("aten::set_", "aten::resize_", "aten::resize_as_"):
            raise ModelError(
                f"{op} at {calling_place()}: changes a tensor's storage; allocate a new tensor instead"
            )


def check_forms(op: str, does: str, tensors: list[torch.Tensor]) -> None:
    """Refuse tensors that a trace cannot hold; raises :class:`ModelError` with the place in the user's code."""
    for tensor in tensors:
        problem = form_problem(tensor)
        if problem is not None:
            raise ModelError(f"{op} at {calling_place()}: {does} {problem}")


class FunctionMode(TorchFunctionMode):
    """Catches what never reaches the dispatcher as one op: attention, and tensors read as Python values."""

    def __init__(self, ops: OpMode) -> None:
        super().__init__()
        self.ops = ops

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.ops.recorder.silent:
            if func is torch.nn.functional.scaled_dot_product_attention or func is ATTENTION:
                return self.ops.attention(func, args, kwargs)
            name = getattr(func, "__name__", "")
            if name in _HOST_READS and args and isinstance(args[0], torch.Tensor):
                self._host_read(args[0], name)
        return func(*args, **kwargs)

    def _host_read(self, tensor: torch.Tensor, name: str) -> None:
        if name == "data_ptr":
            raise UntracedLaunchError(
                f"Tensor.data_ptr at {calling_place()}: memory would be touched outside the recorded ops;"
                " register the launch as a custom op (torch.library.custom_op)"
            )
        if name == "tolist" and tensor.dim() == 0:
            return
        with self.ops.recorder.quiet(), _disable_current_modes():
            self.ops.recorder.read_on_host(tensor, f"Tensor.{name}")


def _check_replayable(func: OpOverload, op: str) -> None:
    """Refuse now what replay would refuse later."""
    if func.namespace in TRUSTED_NAMESPACES:
        try:
            resolve_operator(op)
        except ArtifactError as problem:
            raise ModelError(
                f"{op} at {calling_place()}: cannot be replayed, because it does more than compute;"
                " leave it out of the step"
            ) from problem


def _without_chance(func: OpOverload, args: Any, kwargs: Any) -> bool:
    """Whether a seeded operator's arguments leave nothing to chance (dropout with probability zero)."""
    values = argument_values(func, args, kwargs)
    return any(name in values and not values[name] for name in ("dropout_p", "train", "training")) or (
        values.get("p") == 0.0 and "dropout" in func._schema.name
    )


def _shape_depends_on_values(func: OpOverload, args: Any) -> bool:
    if func._schema.name == "aten::index":
        return any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in(args[1]))
    return True
