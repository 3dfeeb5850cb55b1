"""Reference of ``merge_attention_states``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mlacast.reference.attention import merge_states


def merge_attention_states(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    *,
    lse_layout: str = "ht",
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over disjoint sets of keys.

    Args:
        outs: Parts [T, h, d], normalised.
        lses: Natural-log sums, [h, T] for "ht" or [T, h] for "th"; -inf and +inf both mark an empty
            part.
        lse_layout: Layout of ``lses`` and of the result.
        compute_dtype: torch.float32, or torch.float64 on request.

    Returns:
        out [T, h, d] in ``compute_dtype`` and lse in ``lse_layout``; zeros and -inf where every
        part is empty.
    """
    token_major = [lse.T if lse_layout == "ht" else lse for lse in lses]
    out, lse = merge_states(
        [part.to(compute_dtype) for part in outs], [part.to(compute_dtype) for part in token_major]
    )
    return out, lse.T.contiguous() if lse_layout == "ht" else lse
