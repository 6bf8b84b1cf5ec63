"""The poison test: whether code touches only what is claimed for it, by running it twice. It needs no knowledge of the
code, so it also covers tensor memory accesses and a library's binaries.

The first run works on the given bytes. For the second every byte outside the claimed reads is changed beforehand.
Then every byte in a must-write must come out as in the first run (the poison vanished, and nothing outside the reads
mattered), every byte outside the claimed writes must still hold what was put there (the canary survived), and a byte
in a may-write must be either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tessera_core.program.boxes import Box

Boxes = Sequence[Box] | None
"""Bytes of one buffer; None: all of it."""

Contents = Mapping[int, torch.Tensor]
"""The bytes of each buffer, as tensors of ``uint8``."""

# One bit of each byte's exponent side and one of its low side: floats change much, and no byte keeps its value.
POISON = 0x41


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What the code is said to touch, by buffer: a buffer that is missing isn't touched in that way. ``must`` lies
    within ``writes``."""

    reads: Mapping[int, Boxes]
    writes: Mapping[int, Boxes]
    must: Mapping[int, Boxes]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoisonResult:
    """Counts of bytes, over all buffers. ``lost_canaries``: changed outside the claimed writes. ``kept_poison``:
    in a must-write, but differing from the first run: not written, or dependent on a byte outside the reads.
    ``strange``: in a may-write, neither as in the first run nor left alone. ``poisoned`` and ``must``: bytes that
    were changed, and must-written ones among them. ``deterministic``: two equal runs gave equal bytes; if not,
    bytes that differed between these runs are left out."""

    lost_canaries: int
    kept_poison: int
    strange: int
    poisoned: int
    must: int
    deterministic: bool
    where: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether every claim held."""
        return not (self.lost_canaries or self.kept_poison or self.strange)


def poison_test(
    given: Contents, claims: Claims, run: Callable[[Contents], None], *, ordered: bool = True
) -> PoisonResult:
    """Test ``claims`` of code that ``run`` executes in place on the buffers that it is handed (and waits for).

    ``ordered`` False: what is written depends on the order of threads (atomics), so only canaries are tested.
    """
    first, again = _copies(given), _copies(given)
    run(first)
    run(again)
    poisoned = _copies(given)
    outside = {}
    for buffer, content in poisoned.items():
        outside[buffer] = ~_mask(claims.reads, buffer, content)
        content[outside[buffer]] ^= POISON
    before = _copies(poisoned)
    run(poisoned)
    lost = kept = strange = changed = must_bytes = 0
    deterministic = True
    where: list[str] = []
    for buffer, after in poisoned.items():
        stable = first[buffer] == again[buffer]
        deterministic &= bool(stable.all())
        stable &= ordered
        writes = _mask(claims.writes, buffer, after)
        must = _mask(claims.must, buffer, after) & writes
        untouched, as_first = after == before[buffer], after == first[buffer]
        faults = {
            "canary lost": ~writes & ~untouched,
            "poison kept": must & stable & ~as_first,
            "strange byte": writes & ~must & stable & ~untouched & ~as_first,
        }
        for name, mask in faults.items():
            if mask.any():
                where.append(
                    f"buffer {buffer}: {name}, {int(mask.sum())} bytes from {int(mask.nonzero()[0])}"
                )
        lost += int(faults["canary lost"].sum())
        kept += int(faults["poison kept"].sum())
        strange += int(faults["strange byte"].sum())
        changed += int(outside[buffer].sum())
        must_bytes += int((outside[buffer] & must & stable).sum())
    return PoisonResult(
        lost_canaries=lost,
        kept_poison=kept,
        strange=strange,
        poisoned=changed,
        must=must_bytes,
        deterministic=deterministic,
        where=tuple(where),
    )


def _copies(contents: Contents) -> dict[int, torch.Tensor]:
    return {buffer: content.clone() for buffer, content in contents.items()}


def _mask(claimed: Mapping[int, Boxes], buffer: int, content: torch.Tensor) -> torch.Tensor:
    """One flag per byte of a buffer; bytes past its end (allocation padding) belong to no claim."""
    boxes = claimed.get(buffer, ())
    if boxes is None:
        return torch.ones_like(content, dtype=torch.bool)
    flags: npt.NDArray[np.bool_] = np.zeros(len(content), dtype=np.bool_)
    for box in boxes:
        mark(flags, box)
    return torch.from_numpy(flags).to(content.device)


def mark(flags: npt.NDArray[np.bool_], box: Box) -> None:
    """Set the flags of a box's bytes that lie within the buffer."""
    offsets = np.array([box.start], dtype=np.int64)
    for count, stride in box.dims:
        offsets = (offsets[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
    if len(offsets) * box.run > 4 * len(
        flags
    ):  # many rows upon each other: one by one is cheaper than all at once
        for low in offsets.tolist():
            flags[max(low, 0) : max(low + box.run, 0)] = True
        return
    places = (offsets[:, None] + np.arange(box.run, dtype=np.int64)).ravel()
    flags[places[(places >= 0) & (places < len(flags))]] = True
