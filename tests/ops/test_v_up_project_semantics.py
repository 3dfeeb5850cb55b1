"""v_up_project on every backend against float64 and by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mlacast
from tests import oracles
from tests.format_cases import FAMILIES, FormatCase, assert_buffer_holds, case_id, poisoned_buffer
from tests.oracles import FLOAT32_UNIT, same_bits


def draw(tokens: int, heads: int) -> tuple[Tensor, Tensor]:
    """A latent output and weights of about the size a model has."""
    latent = torch.randn(tokens, heads, 512).bfloat16()
    return latent, (torch.randn(heads, 512, 128) / 22).bfloat16()


def exact(latent: Tensor, w_uv: Tensor) -> tuple[Tensor, Tensor]:
    """The product in float64, and the error a float32 sum of 512 products may have.

    By the probabilistic bound of Higham and Mary (2019), lambda * sqrt(512) * u * sum|x w| with
    lambda = 4 is not exceeded at these sizes.
    """
    out = torch.zeros(latent.shape[0], latent.shape[1], 128, dtype=torch.float64)
    error = torch.zeros_like(out)
    for head in range(latent.shape[1]):
        rows, weight = latent[:, head].double(), w_uv[head].double()
        out[:, head] = (rows[:, :, None] * weight).sum(1)
        error[:, head] = (
            4 * 512**0.5 * FLOAT32_UNIT * (rows.abs()[:, :, None] * weight.abs()).sum(1)
        )
    return out, error


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_every_head_has_its_own_matrix(tokens: int, heads: int, backend: str) -> None:
    latent, w_uv = draw(tokens, heads)
    out = oracles.plain(mlacast.v_up_project(latent, w_uv, backend=backend))
    assert (out.shape, out.dtype) == ((tokens, heads, 128), torch.bfloat16)
    assert out.is_contiguous()
    expected, error = exact(latent, w_uv)
    allowed = error + oracles.BF16_HALF_ULP * (expected.abs() + error)
    assert bool(((out.double() - expected).abs() <= allowed).all())


def test_the_reference_computes_in_the_dtype_asked_for() -> None:
    latent, w_uv = draw(3, 2)
    expected, error = exact(latent, w_uv)
    for dtype, allowed in ((torch.float32, error), (torch.float64, 1e-10)):
        out = mlacast.reference.v_up_project(latent, w_uv, compute_dtype=dtype)
        assert out.dtype == dtype
        assert bool(((out.double() - expected).abs() <= allowed).all())


def test_latent_dimension_by_value_dimension_by_hand(backend: str) -> None:
    latent, w_uv = torch.zeros(1, 2, 512), torch.zeros(2, 512, 128)
    latent[0, 0, 3], latent[0, 1, 3], latent[0, 1, 511] = 2.0, 2.0, -1.0
    w_uv[0, 3, 7], w_uv[1, 3, 7], w_uv[1, 511, 127] = 5.0, 0.5, 4.0
    out = oracles.plain(mlacast.v_up_project(latent.bfloat16(), w_uv.bfloat16(), backend=backend))
    found = {tuple(at): out[tuple(at)].item() for at in out.nonzero().tolist()}
    assert found == {(0, 0, 7): 10.0, (0, 1, 7): 1.0, (0, 1, 127): -4.0}


def test_rows_do_not_depend_on_the_others(backend: str) -> None:
    latent, w_uv = draw(7, 2)
    together = oracles.plain(mlacast.v_up_project(latent, w_uv, backend=backend))
    for first, last in ((0, 1), (3, 5), (6, 7)):
        alone = mlacast.v_up_project(latent[first:last], w_uv, backend=backend)
        assert same_bits(alone, together[first:last])


def test_strided_inputs_equal_their_contiguous_copies(backend: str) -> None:
    latent, w_uv = draw(3, 2)
    expected = mlacast.v_up_project(latent, w_uv, backend=backend)
    turned = latent.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.cat((latent, latent), -1)[..., :512]
    for other in (turned, wide):
        assert same_bits(mlacast.v_up_project(other, w_uv, backend=backend), expected)


def test_the_weight_may_be_a_view_of_that_of_the_kv_up_projection(backend: str) -> None:
    latent, _ = draw(3, 2)
    weight = (torch.randn(2 * 256, 512) / 22).bfloat16()
    view = weight.view(2, 256, 512)[:, 128:].transpose(1, 2)
    out = oracles.plain(mlacast.v_up_project(latent, view, backend=backend))
    for head in range(2):
        rows = weight[256 * head + 128 : 256 * head + 256].double()
        expected = latent[:, head].double() @ rows.T
        error = 4 * 512**0.5 * FLOAT32_UNIT * (latent[:, head].abs().double() @ rows.abs().T)
        allowed = error + oracles.BF16_HALF_ULP * (expected.abs() + error)
        assert bool(((out[:, head].double() - expected).abs() <= allowed).all())


def test_a_plain_output_is_written_through_its_strides(backend: str) -> None:
    latent, w_uv = draw(3, 2)
    parent = torch.full((5, 3, 136), 7.0, dtype=torch.bfloat16)
    view = parent[1:4, 1:, 5:133]
    assert mlacast.v_up_project(latent, w_uv, out=view, backend=backend) is view
    fresh = mlacast.v_up_project(latent, w_uv, backend=backend)
    assert same_bits(view.contiguous(), fresh)
    view.fill_(7.0)
    assert bool((parent == 7.0).all())


@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_quantised_output_has_the_bytes_of_the_quantised_reference(
    case: FormatCase, backend: str
) -> None:
    latent, w_uv = draw(5, 8)
    out = mlacast.v_up_project(latent, w_uv, out_format=case.build(), num_groups=2, backend=backend)
    assert isinstance(out, mlacast.QuantizedTensor)
    values = mlacast.reference.v_up_project(latent, w_uv)
    assert_buffer_holds(out, case.expect(values.view(5, 2, 512)), case)


@pytest.mark.parametrize("first", [0, 3, 127])
@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_a_range_of_a_shared_buffer(case: FormatCase, first: int, backend: str) -> None:
    """Rows of another writer before and behind, in the same tile of 128 rows, keep their bytes."""
    latent, w_uv = draw(5, 4)
    total = first + 5 + 2
    filler = torch.randn(total, 512)
    buffer = poisoned_buffer(case, total, 1, 512)
    mlacast.quantize_output(filler, case.build(), out=buffer, backend=backend)
    view = buffer[first : first + 5]
    assert mlacast.v_up_project(latent, w_uv, out=view, backend=backend) is view
    whole = filler.view(total, 1, 512).clone()
    whole[first : first + 5] = mlacast.reference.v_up_project(latent, w_uv).view(5, 1, 512)
    assert_buffer_holds(buffer, case.expect(whole), case)


def test_no_tokens(backend: str) -> None:
    _, w_uv = draw(1, 2)
    empty = torch.empty(0, 2, 512).bfloat16()
    out = oracles.plain(mlacast.v_up_project(empty, w_uv, backend=backend))
    assert (out.shape, out.dtype) == ((0, 2, 128), torch.bfloat16)
    buffer = mlacast.v_up_project(empty, w_uv, out_format=mlacast.Nvfp4(1.0), backend=backend)
    assert len(buffer) == 0
