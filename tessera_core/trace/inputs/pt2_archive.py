"""Opening a ``.pt2`` file without running anything that is in it.

``torch.export.load`` unpickles, evaluates symbolic shapes as Python text, imports what a nesting of inputs names,
and loads compiled libraries, if a file asks for that. So every record that could is looked at first, and a file
that needs more than tensors, operators that compute and arithmetic on sizes is refused. What is left is data.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import logging
import re
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tessera_core.program.operators import TRUSTED_NAMESPACES, resolve_operator
from tessera_core.trace.place import one_line
from tessera_formats.errors import ArtifactError, InputError, ModelError, TesseraError

NO_EFFECT = frozenset(
    {"_assert_async", "_assert_scalar", "_assert_tensor_metadata", "sym_constrain_range"}
    | {"sym_constrain_range_for_size"}
)
"""Operators that only check; what they check holds for the traced sizes, or the trace would fail."""

_SIZE_FUNCTIONS = re.compile(
    r"_operator\.(getitem|add|sub|mul|floordiv|truediv|mod|neg|pos|pow|abs|eq|ne|lt|le|gt|ge|and_|or_|not_)"
    r"|math\.\w+|torch\.sym_\w+|torch\._sym_\w+"
)
_NO_GRADIENTS = "torch.ops.higher_order.wrap_with_set_grad_enabled"
_SYMBOL = re.compile(r"[a-z]+\d+")
_CONTAINERS = frozenset(
    {None, "builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict"}
    | {"torch.fx.immutable_collections.immutable_list", "torch.fx.immutable_collections.immutable_dict"}
)
_EXPRESSION = (
    *(ast.Expression, ast.Call, ast.Name, ast.Load, ast.Constant, ast.keyword, ast.operator, ast.unaryop),
    *(ast.BinOp, ast.UnaryOp, ast.Compare, ast.cmpop, ast.BoolOp, ast.boolop, ast.Tuple),
)
_ADVICE = "save it again with torch.export.save, or trace the model's own code as FILE.py:FACTORY"


def file_hash(path: Path) -> str:
    """The sha256 of a file; raises :class:`InputError` where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as problem:
        raise InputError(f"{path}: cannot be read ({problem.strerror}); check the path") from problem


def open_export(path: Path) -> torch.export.ExportedProgram:
    """The program in a ``.pt2`` file.

    Raises :class:`InputError` for a file that is missing, damaged or no ``.pt2``, and :class:`ModelError` for one
    that only code of its own could load.
    """
    if not path.is_file():
        raise InputError(f"model {str(path)!r}: there is no such file; check the path")
    quiet, before = logging.getLogger("torch.export"), logging.getLogger("torch.export").level
    try:
        _check(path)
        quiet.setLevel(logging.CRITICAL)  # it logs whole tracebacks before it raises
        return torch.export.load(str(path))
    except TesseraError:
        raise
    except Exception as problem:
        raise InputError(
            f"{path}: torch {torch.__version__} cannot load it as an exported program ({one_line(problem)});"
            f" it is damaged, or of another version: {_ADVICE}"
        ) from problem
    finally:
        quiet.setLevel(before)


def exported_weights(path: Path, recorded_hash: str, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Values of the named weights of the file that a trace was made from.

    Raises :class:`InputError` where the file is not there any more, or is another one.
    """
    if not path.is_file():
        raise InputError(
            f"{path}: holds the weights and is gone; restore it, or pass --weights FILE.safetensors"
        )
    if file_hash(path) != recorded_hash:
        raise InputError(f"{path}: has changed since the trace was made; restore it, or trace again")
    values = dict(open_export(path).state_dict)
    lacking = [name for name in names if name not in values]
    if lacking:
        raise InputError(f"{path}: holds no weight {lacking[0]!r}; trace again")
    return {name: values[name].detach() for name in names}


def _check(path: Path) -> None:
    """Refuse what loading would execute."""
    if not zipfile.is_zipfile(path):
        raise InputError(f"{path}: is no archive of torch.export.save, or only a part of one; {_ADVICE}")
    reader = torch._C.PyTorchFileReader(str(path))
    records = list(reader.get_all_records())
    if len(set(records)) != len(records):
        raise InputError(f"{path}: holds two records of one name; {_ADVICE}")
    if "archive_format" not in records or reader.get_record("archive_format") != b"pt2":
        raise InputError(f"{path}: is an archive, but not one of torch.export.save; {_ADVICE}")
    order = (
        reader.get_record("byteorder").decode("ascii", "replace") if "byteorder" in records else sys.byteorder
    )
    if order != sys.byteorder:  # loading would take the weights' bytes as they are
        raise InputError(
            f"{path}: was written on a machine of byte order {order!r}, and this one's is {sys.byteorder!r}; export"
            " it on a machine like this one"
        )
    models = [record for record in records if record.startswith("models/")]
    if models != ["models/model.json"]:
        found = ", ".join(models) or "none"
        raise InputError(f"{path}: one program is wanted, and it holds {found}; {_ADVICE}")
    for record in records:
        if record.startswith("data/aotinductor/"):
            raise _unsafe(path, "a compiled library")
        if record.endswith("_config.json"):
            _check_payload(path, json.loads(reader.get_record(record)))
        elif record.endswith(".pt") and record.startswith("data/"):
            _check_pickle(path, record, reader.get_record(record))
    content = json.loads(reader.get_record("models/model.json"))
    for key, value in _walk(content):
        if key == "target" and isinstance(value, str):
            _check_target(path, value)
        elif key == "as_operator" and isinstance(value, str):
            raise _unsafe(path, f"an operator as an argument ({value})")
        elif key in ("as_custom_obj", "as_opaque_obj") and value is not None:
            raise _unsafe(path, "a custom object")
        elif key == "expr_str":
            _check_expression(path, str(value))
        elif key in ("in_spec", "out_spec") and isinstance(value, str):
            _check_containers(path, value)
        elif key == "source_fn_stack":
            raise _unsafe(path, "names of source functions")


def _walk(value: Any) -> Iterator[tuple[str, Any]]:
    """Every (key, value) in nested JSON."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            yield from item.items()
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)


def _check_payload(path: Path, config: Any) -> None:
    for name, entry in config["config"].items():
        if entry.get("use_pickle") or not str(entry["path_name"]).startswith(("weight_", "tensor_")):
            raise _unsafe(path, f"{name}, which is no plain tensor")


def _check_pickle(path: Path, record: str, content: bytes) -> None:
    try:
        if content:
            torch.load(io.BytesIO(content), weights_only=True)
    except Exception as problem:
        raise _unsafe(path, f"{record}, which holds more than tensors") from problem


def _check_target(path: Path, target: str) -> None:
    if target == _NO_GRADIENTS or _SIZE_FUNCTIONS.fullmatch(target):
        return
    name = target.removeprefix("torch.ops.")
    if name == target or name.startswith("higher_order."):
        raise ModelError(
            f"{path}: calls {target}, which is control flow or no operator; export a program without it"
        )
    namespace, _, rest = name.partition(".")
    if rest.partition(".")[0] in NO_EFFECT:
        return
    if namespace not in TRUSTED_NAMESPACES:
        raise ModelError(
            f"{path}: calls {name}, a custom operator; trace the model's own code as FILE.py:FACTORY"
        )
    try:
        resolve_operator(name)
    except ArtifactError as problem:
        raise ModelError(
            f"{path}: calls {name}, which does not exist here or does more than compute; {_ADVICE}"
        ) from problem


def _check_expression(path: Path, text: str) -> None:
    """Sizes are arithmetic on symbols: classes of sympy (they start with a capital), symbols and numbers."""
    try:
        nodes = list(ast.walk(ast.parse(text, mode="eval")))
    except (SyntaxError, ValueError, RecursionError) as problem:
        raise _unsafe(path, f"a size that is no expression ({text[:60]!r})") from problem
    for node in nodes:
        known = isinstance(node, _EXPRESSION)
        if isinstance(node, ast.Name):
            known = node.id[:1].isupper() or _SYMBOL.fullmatch(node.id) is not None
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            known = _SYMBOL.fullmatch(node.value) is not None
        if not known:
            raise _unsafe(path, f"a size that is more than arithmetic ({text[:60]!r})")


def _check_containers(path: Path, text: str) -> None:
    for key, value in _walk(json.loads(text)) if text else ():
        if key == "type" and value not in _CONTAINERS:
            raise ModelError(
                f"{path}: takes or returns a {value}; export it with tuples, lists and dictionaries"
            )


def _unsafe(path: Path, what: str) -> ModelError:
    return ModelError(f"{path}: holds {what}, which only unsafe loading could read; {_ADVICE}")
