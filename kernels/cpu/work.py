"""How the attention of a step is cut into items."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagemesh.kernels.cpu.jit import kernel


@kernel
def attention_work(
    query_start: NDArray[np.int32], seq_lens: NDArray[np.int32], most: int, work: NDArray[np.int64]
) -> int:
    """Fill `work` (see program.Rows) with pieces of at most `most` tokens; how many there are.

    Chunks come before decodes and their last pieces, which see most keys, first: so that no thread
    is left with a long one at the end. Padding rows have none.
    """
    n = 0
    for single in (False, True):
        for row in range(len(seq_lens)):
            count = int(query_start[row + 1] - query_start[row])
            if (count == 1) != single or seq_lens[row] < count:
                continue
            first = seq_lens[row] - count
            for offset in range((count - 1) // most * most, -1, -most):
                work[n, 0] = row
                work[n, 1] = query_start[row] + offset
                work[n, 2] = first + offset
                work[n, 3] = min(most, count - offset)
                n += 1
    return n
