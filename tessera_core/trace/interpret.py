"""``python -m tessera_core.trace.interpret``: one launch in Triton's interpreter, tensors in files.

Reads a JSON job from stdin and writes the changed storages back into their files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tessera_core.trace.load import find_kernel


def main() -> None:
    """Run the job on stdin."""
    job = json.load(sys.stdin)
    kernel = find_kernel(job)
    storages: dict[str, torch.Tensor] = {}
    arguments: dict[str, Any] = {}
    for name, value in job["arguments"].items():
        if "file" in value:
            file = value["file"]
            if file not in storages:
                storages[file] = torch.frombuffer(
                    bytearray(Path(file).read_bytes()), dtype=torch.uint8
                ).clone()
            typed = storages[file].view(getattr(torch, value["dtype"]))
            arguments[name] = typed.as_strided(value["shape"], value["stride"], value["offset"])
        else:
            arguments[name] = value["value"]
    kernel[tuple(job["grid"])](**arguments)
    for file, flat in storages.items():
        Path(file).write_bytes(flat.numpy().tobytes())
    print(json.dumps({"done": True}))


if __name__ == "__main__":
    main()
