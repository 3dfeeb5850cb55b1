"""Requests with different numbers of query tokens, laid end to end: which token is whose."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from mlacast.errors import check_tensor, check_type, fail
from mlacast.ops.known_calls import more_than_launches


@dataclass(frozen=True)
class RaggedTokens:
    """Where each of T query tokens belongs; tensors on the device, made without a sync.

    Attributes:
        request: [T] int64, request of the token, the last one for tokens past the end.
        after: [T] int32, query tokens of its request that come after it.
        is_real: [T] bool, False for tokens past the last request.
    """

    request: torch.Tensor
    after: torch.Tensor
    is_real: torch.Tensor

    def per_token(self, per_request: torch.Tensor) -> torch.Tensor:
        """Give each token the int32 value of its request, 0 to tokens past the last request."""
        return torch.where(self.is_real, per_request[self.request], 0)

    def causal_lengths(self, seq_lens: torch.Tensor) -> torch.Tensor:
        """Cached tokens that each token sees, of [B] int32 tokens of its request."""
        return torch.where(self.is_real, seq_lens[self.request] - self.after, 0)


def check_cum_seq_lens(
    op: str,
    cum_seq_lens_q: torch.Tensor,
    max_q_len: int | None,
    total_q: int,
    batch: int | None,
    device: torch.device,
) -> None:
    """Check the starts of the requests [B + 1] int32.

    Without ``max_q_len`` their values are read on the host and checked too, which synchronises.

    Args:
        op: Name that opens the message.
        cum_seq_lens_q: The starts, from 0 to total_q.
        max_q_len: Most query tokens of a request, or None.
        total_q: Query tokens of the call.
        batch: Requests, where another argument says it.
        device: Where the query is.
    """
    dims, argument = "requests+1", "cum_seq_lens_q"
    check_tensor(op, argument, cum_seq_lens_q, dims, {}, dtype=torch.int32, device=device)
    if cum_seq_lens_q.shape[0] < 1:
        fail(op, argument, "have at least one element", "none")
    if batch is not None and cum_seq_lens_q.shape[0] != batch + 1:
        fail(
            op, argument, f"have {batch + 1} elements for {batch} requests", cum_seq_lens_q.shape[0]
        )
    if cum_seq_lens_q.shape[0] == 1 and total_q:
        fail(op, argument, f"have requests for {total_q} query tokens", "none")
    if max_q_len is not None:
        check_type(op, "max_q_len", max_q_len, int, "an int or None")
        if max_q_len < 1:
            fail(op, "max_q_len", "be at least 1", max_q_len)
        return
    more_than_launches()
    starts = cum_seq_lens_q.tolist()
    if starts[0] != 0:
        fail(op, argument, "start with 0", starts[0])
    if any(start > following for start, following in pairwise(starts)):
        fail(op, argument, "not decrease", starts)
    if starts[-1] != total_q:
        fail(op, argument, f"end with the {total_q} query tokens", starts[-1])


def ragged_tokens(cum_seq_lens_q: torch.Tensor, total_q: int) -> RaggedTokens:
    """Find the request of every token.

    Args:
        cum_seq_lens_q: [B + 1] int32, checked; B at least 1 unless total_q is 0.
        total_q: Query tokens.
    """
    token = torch.arange(total_q, dtype=torch.int32, device=cum_seq_lens_q.device)
    stops = cum_seq_lens_q[1:].contiguous()
    request = torch.searchsorted(stops, token, right=True)
    is_real = request < stops.shape[0]
    request = request.clamp(max=max(stops.shape[0] - 1, 0))
    return RaggedTokens(request, stops[request] - 1 - token, is_real)
