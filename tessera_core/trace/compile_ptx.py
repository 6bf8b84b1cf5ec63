"""``python -m tessera_core.trace.compile_ptx``: Triton kernels to PTX, without a GPU or driver.

Reads JSON from stdin (an architecture and specialisations) and answers with one line of JSON on stdout. Line
information is switched off, so that the text does not depend on where files lie.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import tempfile
from typing import Any

# Stands for an allocation's address, of which only the alignment counts: at least that of an arena's base.
_BASE_ADDRESS = 4096
_DEBUG_LINE = re.compile(r"^\s*\.(file|loc)\b.*\n", re.MULTILINE)


@dataclasses.dataclass(frozen=True, slots=True)
class _Pointer:
    """What Triton's specialisation looks at in a tensor: its dtype and its address."""

    dtype: Any
    address: int

    def data_ptr(self) -> int:
        """The address."""
        return self.address


def main() -> None:
    """Compile every job on stdin."""
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    request = json.load(sys.stdin)
    with tempfile.TemporaryDirectory(prefix="tessera-ptx-") as cache:
        if "TRITON_CACHE_DIR" not in os.environ and "TRITON_HOME" not in os.environ:
            os.environ["TRITON_CACHE_DIR"] = cache
        done: dict[str, dict[str, Any]] = {}
        kernels = [_compile(job, request["architecture"], done) for job in request["jobs"]]
    print(json.dumps({"kernels": kernels}))


def _compile(job: dict[str, Any], architecture: int, done: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Compile a job, or find it in ``done`` under what the compiler would see of it."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    from tessera_core.trace.load import find_kernel

    kernel = find_kernel(job)
    target = GPUTarget("cuda", architecture, 32)
    backend = make_backend(target)
    # The same functions that a launch goes through, so that types and attributes are those of a launch.
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    values = {
        name: _Pointer(getattr(torch, value["dtype"]), _BASE_ADDRESS + value["offset"])
        if "dtype" in value
        else value["value"]
        for name, value in job["arguments"].items()
    }
    bound, specialisation, given = bind(**values, **job["options"])
    _, signature, constexprs, attributes = kernel._pack_args(backend, given, bound, specialisation, given)
    seen = str([job["file"], job["qualname"], signature, constexprs, attributes, job["options"]])
    if seen in done:
        return done[seen]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    compiled = triton.compile(source, target=target, options=given)
    done[seen] = {
        "name": str(compiled.metadata.name),
        "ptx": without_lines(str(compiled.asm["ptx"])),
        "shared": int(compiled.metadata.shared),
        "num_warps": int(compiled.metadata.num_warps),
        "num_ctas": int(compiled.metadata.num_ctas),
        "signature": signature,
    }
    return done[seen]


def without_lines(text: str) -> str:
    """PTX without line directives and debug sections."""
    text = _DEBUG_LINE.sub("", text)
    head, found, _ = text.partition("\n\t.section\t.debug")
    return head.rstrip() + "\n" if found else text


if __name__ == "__main__":
    main()
