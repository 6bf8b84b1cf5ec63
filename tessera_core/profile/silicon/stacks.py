"""How far the user's own kernel may lie from a published one: as far as two serving frameworks' tables of one GPU lie
apart, since either is to the other what both are to a third.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tessera_core.profile.silicon.tables import SiliconTable

QUANTILE = 0.9

BETWEEN_STACKS: Mapping[str, float] = {
    "products": 0.09,
    "attention-prefill": 0.51,
    "attention-decode": 0.46,
    "attention-encoder": 0.22,
    "experts": 0.52,
    "latent-prefill": 1.17,
    "latent-decode": 0.20,
    "latent-keys": 0.12,
    "latent-values": 0.06,
    "convolution-prefill": 0.52,
    "convolution-decode": 0.52,
}
"""Half a 90% interval, as a logarithm, of a kernel around its family's table.

Per GPU :func:`apart` of the two preferred frameworks' newest tables in bfloat16, and of that the median over the GPUs
(aiconfigurator-core 0.12.0, 2026-12-01; tests/profile/silicon/test_installed.py measures them again). Only one
framework has convolutions; they are given the experts' figure. It holds where the frameworks run kernels alike: on L40S
and RTX PRO 6000, where SGLang's attention is Triton's, they lie 1.1 to 1.4 apart, and L40S's products 0.24.
"""

COLD_START_US = 2.0
"""By how much a product's interval reaches further up: in tables even its first rows wait in L2.

Of 17 products of small weights (up to 10 MB and 40 us) on one H200 (fixtures/profiles), 9 took up to 0.5 us longer
within iterations than in the table, and 8 took 1.1 to 2.6 us longer.
"""


def apart(first: SiliconTable, second: SiliconTable) -> float | None:
    """The 90% quantile of the logarithm of two tables' ratio, without sign, over sizes in both; None without any."""
    names = sorted(first.sizes)
    held = dict(zip(zip(*(first.sizes[name].tolist() for name in names)), first.time_us.tolist()))
    other = zip(zip(*(second.sizes[name].tolist() for name in names)), second.time_us.tolist())
    ratios = [abs(np.log(time / held[sizes])) for sizes, time in other if sizes in held]
    return float(np.quantile(ratios, QUANTILE)) if ratios else None
