"""Problems of packed sequences with their own keys and values, and a float64 oracle in loops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.oracles import FLOAT32_UNIT, AttentionOracle

D_QK, D_V = 192, 128


@dataclass(frozen=True)
class PackedCase:
    """Lengths and heads of a batch.

    Attributes:
        id: Readable name.
        q_lens, k_lens: Query tokens and keys of each sequence.
        heads, kv_heads: Of q, and of k and v.
        causal: Bottom-right aligned mask.
        q_tail, k_tail: Rows past the last sequence.
    """

    id: str
    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    heads: int = 2
    kv_heads: int = 2
    causal: bool = True
    q_tail: int = 0
    k_tail: int = 0


CASES = (
    PackedCase("one_token", (1,), (1,), heads=1, kv_heads=1),
    PackedCase("equal", (5, 5), (5, 5)),
    PackedCase("equal_full", (5, 3), (5, 3), causal=False),
    PackedCase("more_keys", (2, 4), (7, 5), heads=4),
    PackedCase("fewer_keys", (5, 3), (2, 3)),
    PackedCase("fewer_keys_full", (5, 3), (2, 0), causal=False),
    PackedCase("empty_on_either_side", (0, 3, 0, 2), (4, 0, 0, 6)),
    PackedCase("no_sequences", (), (), q_tail=3, k_tail=2),
    PackedCase("only_empty_sequences", (0, 0), (3, 0), q_tail=2),
    PackedCase("padded_batch", (3, 2), (3, 4), q_tail=4, k_tail=3),
    PackedCase("three_heads_per_key_head", (3, 4), (5, 4), heads=6, kv_heads=2),
    PackedCase("one_key_head", (4, 1), (4, 9), heads=5, kv_heads=1, causal=False),
)


@dataclass(frozen=True)
class Packed:
    """Tensors of a batch; ``v`` is a view into wider rows, as an up-projection leaves it."""

    case: PackedCase
    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the operation, the output apart."""
        return {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "cu_seqlens_q": self.cu_seqlens_q,
            "cu_seqlens_k": self.cu_seqlens_k,
            "max_seqlen_q": max(self.case.q_lens, default=0),
            "max_seqlen_k": max(self.case.k_lens, default=0),
            "causal": self.case.causal,
        }

    def to(self, device: str) -> Packed:
        """The same batch on another device, with the strides of ``v``."""
        wide = torch.empty(*self.v.shape[:2], D_V * 2, dtype=self.v.dtype, device=device)
        v = wide[..., D_V:]
        v.copy_(self.v)
        others = (self.q, self.k, self.cu_seqlens_q, self.cu_seqlens_k)
        q, k, cu_q, cu_k = (tensor.to(device) for tensor in others)
        return Packed(self.case, q, k, v, cu_q, cu_k)


def packed_id(case: PackedCase) -> str:
    """Readable parametrisation id."""
    return case.id


def cumulative(lengths: Sequence[int]) -> Tensor:
    """[B + 1] int32 bounds of packed sequences."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def draw(case: PackedCase, dtype: torch.dtype = torch.bfloat16) -> Packed:
    """Random tensors. NaN: keys that no token sees, tokens of no sequence, the gaps in ``v``."""
    tokens, keys = sum(case.q_lens) + case.q_tail, sum(case.k_lens) + case.k_tail
    q = torch.randn(tokens, case.heads, D_QK)
    q[tokens - case.q_tail :] = float("nan")
    k = torch.randn(keys, case.kv_heads, D_QK)
    wide = torch.full((keys, case.kv_heads, 2 * D_V), float("nan"))
    wide[..., D_V:] = torch.randn(keys, case.kv_heads, D_V)
    cu_q, cu_k = cumulative(case.q_lens), cumulative(case.k_lens)
    seen = torch.zeros(keys, dtype=torch.bool)
    for sequence, q_len in enumerate(case.q_lens):
        seen[int(cu_k[sequence]) : int(cu_k[sequence + 1])] = q_len > 0
    k[~seen], wide[~seen] = float("nan"), float("nan")
    return Packed(case, q.to(dtype), k.to(dtype), wide.to(dtype)[..., D_V:], cu_q, cu_k)


def visible_keys(case: PackedCase) -> list[range]:
    """Keys that each token of q sees."""
    seen = []
    first_key = 0
    for q_len, k_len in zip(case.q_lens, case.k_lens, strict=True):
        for token in range(q_len):
            hidden = q_len - 1 - token if case.causal else 0
            seen.append(range(first_key, max(first_key, first_key + k_len - hidden)))
        first_key += k_len
    return seen + [range(0)] * case.q_tail


def attend(packed: Packed, softmax_scale: float = D_QK**-0.5) -> AttentionOracle:
    """Attend every (token, head) in float64; the bounds are those of ``tests.oracles.attend``."""
    q, k, v = (tensor.double() for tensor in (packed.q, packed.k, packed.v))
    tokens, heads = q.shape[:2]
    per_key_head = heads // packed.case.kv_heads
    out = torch.zeros(tokens, heads, D_V, dtype=torch.float64)
    lse = torch.full((tokens, heads), -math.inf, dtype=torch.float64)
    max_logits, logit_error, out_error = lse.clone(), torch.zeros_like(lse), torch.zeros_like(lse)
    for token, seen in enumerate(visible_keys(packed.case)):
        for head in range(heads):
            query, key_head = q[token, head], head // per_key_head
            logits = [softmax_scale * float(torch.dot(query, k[key, key_head])) for key in seen]
            if not logits:
                continue
            peak = max(logits)
            weights = [math.exp(logit - peak) for logit in logits]
            total = math.fsum(weights)
            for weight, key in zip(weights, seen, strict=True):
                out[token, head] += weight / total * v[key, key_head]
            lse[token, head] = peak + math.log(total)
            max_logits[token, head] = peak
            keys = k[seen.start : seen.stop, key_head]
            norms = float(query.norm()) * float(keys.norm(dim=1).max())
            error = 4 * (math.sqrt(D_QK) + 4) * FLOAT32_UNIT * abs(softmax_scale) * norms
            error += FLOAT32_UNIT * (4 * abs(peak) + len(seen) + 8)
            logit_error[token, head] = error
            largest = float(v[seen.start : seen.stop, key_head].abs().max())
            out_error[token, head] = (2 * error + (len(seen) + 8) * FLOAT32_UNIT) * largest
    return AttentionOracle(out, max_logits, lse, logit_error, out_error)
