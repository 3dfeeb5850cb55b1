"""Expected bytes of RoPE and FP8 casts, computed in double precision and rounded step by step.

A product or a sum of two float32 numbers, computed in double precision and rounded to float32, is
the float32 result (double has more than twice the bits), so every step of the contract has one
right answer and no kernel of the library is involved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.quantizers import e4m3_codes, nearest_code

E5M2_MAGNITUDES = [
    (mantissa / 4.0) * 2.0**-14
    if exponent == 0
    else (1.0 + mantissa / 4.0) * 2.0 ** (exponent - 15)
    for exponent in range(31)
    for mantissa in range(4)
]
"""Values of the codes 0x00..0x7B, the finite ones."""

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def _single(values: Tensor) -> Tensor:
    """Round double to float32, and go on in double."""
    return values.float().double()


def rotated(x: Tensor, table: Tensor, positions: Tensor, pairing: str) -> Tensor:
    """``x`` [n, h, r] rotated pair by pair in float32 steps, as float64."""
    half = x.shape[-1] // 2
    result = x.double().clone()
    for token, position in enumerate(positions.tolist()):
        line = table[min(max(position, 0), table.shape[0] - 1)].double()
        for pair in range(half):
            at = (2 * pair, 2 * pair + 1) if pairing == "interleaved" else (pair, pair + half)
            first, second = (x[token, :, index].double() for index in at)
            cosine, sine = line[pair], line[half + pair]
            result[token, :, at[0]] = _single(_single(first * cosine) - _single(second * sine))
            result[token, :, at[1]] = _single(_single(second * cosine) + _single(first * sine))
    return result


def codes(values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Bytes of float64 ``values`` times a float32 scale."""
    product = _single(values.double() * _single(torch.tensor(scale, dtype=torch.float64)))
    if dtype == E4M3:
        return e4m3_codes(product.float())
    return nearest_code(product.float(), E5M2_MAGNITUDES, 0x80, 0x7F)


@dataclass(frozen=True)
class RopeQuantizeCase:
    """One problem: sizes, dtypes and pairing.

    Attributes:
        kv_heads: 0 for keys without a head axis.
        rope: Rotated dimensions.
        nope: Other dimensions.
        pairing: How dimensions pair.
        dtype: Of the output.
        inputs: Dtype of queries and keys.
        table: Dtype of the table.
        index: Dtype of the positions.
    """

    kv_heads: int = 0
    rope: int = 64
    nope: int = 512
    pairing: str = "half"
    dtype: torch.dtype = E4M3
    inputs: torch.dtype = torch.bfloat16
    table: torch.dtype = torch.float32
    index: torch.dtype = torch.int64

    @property
    def id(self) -> str:
        names = [str(one).removeprefix("torch.") for one in (self.dtype, self.inputs, self.table)]
        sizes = f"kv{self.kv_heads}_{self.rope}_{self.nope}"
        index = str(self.index).removeprefix("torch.")
        return "-".join([sizes, self.pairing, *names, index])


CASES = (
    RopeQuantizeCase(),
    RopeQuantizeCase(pairing="interleaved", index=torch.int32, table=torch.bfloat16),
    RopeQuantizeCase(dtype=E5M2, inputs=torch.float16),
    RopeQuantizeCase(kv_heads=2, rope=12, nope=20, pairing="interleaved", dtype=E5M2),
    RopeQuantizeCase(kv_heads=1, rope=2, nope=0, inputs=torch.float32),
    RopeQuantizeCase(kv_heads=3, rope=32, nope=96, inputs=torch.float16, index=torch.int32),
)


def case_id(case: RopeQuantizeCase) -> str:
    """Readable parametrisation id."""
    return case.id


@dataclass(frozen=True)
class RopeQuantizeInputs:
    """q [n, h, nope + rope] and k [n, (h_kv,) nope + rope], nope first; table and positions."""

    q: Tensor
    k: Tensor
    table: Tensor
    positions: Tensor


def draw(case: RopeQuantizeCase, tokens: int = 7, heads: int = 3) -> RopeQuantizeInputs:
    """Random rows with huge, tiny and non-finite elements; positions inside and outside."""
    width = case.rope + case.nope
    keys = (tokens, case.kv_heads, width) if case.kv_heads else (tokens, width)
    q, k = torch.randn(tokens, heads, width) * 3, torch.randn(keys)
    if tokens > 3:
        q[0, 0, 0], q[1, 1, -1], q[2, 0, 1] = float("nan"), float("inf"), -60000.0
        q[3, 2, 0], k[0, ..., -1], k[1, ..., 0] = 1e-6, -float("inf"), -0.0
    table = torch.randn(9, case.rope).to(case.table)
    positions = torch.randint(-3, 14, (tokens,)).to(case.index)
    return RopeQuantizeInputs(q.to(case.inputs), k.to(case.inputs), table, positions)


def expected(
    case: RopeQuantizeCase, inputs: RopeQuantizeInputs, q_scale: float, k_scale: float
) -> tuple[Tensor, Tensor]:
    """Bytes of q and k, nope first, with the shapes of the inputs."""
    results = []
    for x, scale in ((inputs.q, q_scale), (inputs.k, k_scale)):
        heads = x if x.dim() == 3 else x.unsqueeze(1)
        turned = rotated(heads[..., case.nope :], inputs.table, inputs.positions, case.pairing)
        whole = torch.cat((heads[..., : case.nope].double(), turned), -1)
        results.append(codes(whole, scale, case.dtype).view(x.shape))
    return results[0], results[1]
