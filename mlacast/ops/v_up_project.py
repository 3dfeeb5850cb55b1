"""``v_up_project``: the matrix product after absorbed attention, whose result is quantised."""

from __future__ import annotations

from typing import Any

import torch

from mlacast.descriptors.out_format import OutFormat
from mlacast.dispatch.arch import arch_of
from mlacast.dispatch.select import load, requested_backend, select
from mlacast.errors import check_tensor, fail
from mlacast.ops.known_calls import PUBLIC, call_operator
from mlacast.ops.output import Output, features_of, from_arguments, prepare_output
from mlacast.ops.overlap import check_no_overlap
from mlacast.ops.query import check_backend

OP = "v_up_project"
LATENT = 512
D_V = 128


def v_up_project(
    latent_out: torch.Tensor,
    w_uv: torch.Tensor,
    *,
    out: Output | None = None,
    out_format: OutFormat | None = None,
    num_groups: int = 1,
    backend: str | None = None,
) -> Output:
    """Project the latent output of absorbed attention to value heads; optionally quantise.

    ``out[t, h] = latent_out[t, h] @ w_uv[h]``, summed in float32 and rounded once, to the output's
    format. What a model's output projection reads is this product, so this is where a decode
    quantises.

    Args:
        latent_out: [T, h, 512] bfloat16, last dimension contiguous: what the decode operations
            return as bfloat16.
        w_uv: [h, 512, 128] bfloat16, one of its last two dimensions contiguous. For ``weight`` of a
            ``kv_b_proj``, [h * (128 + 128), 512], it is the view
            ``weight.view(h, 256, 512)[:, 128:].transpose(1, 2)``.
        out: Buffer to fill: a bfloat16 tensor [T, h, 128], or a QuantizedTensor with T tokens.
        out_format: Format of the output; None means bfloat16, or that of ``out``.
        num_groups: Groups of the QuantizedTensor allocated when ``out`` is None.
        backend: "reference", "triton", "hopper", or None for the best that covers the call.

    Returns:
        ``out`` itself if given, else a bfloat16 tensor [T, h, 128] or a QuantizedTensor. No tokens
        give an empty one.

    Raises:
        TypeError: An argument is not of the Python type above.
        ValueError: A shape, dtype, stride, device or value breaks the contract; nothing has been
            written.
        UnsupportedError: No (or not the named) backend covers the call.

    Determinism: The same call gives the same bits, and a row does not depend on the others.

    Source: the product with W_UV that vLLM's MLA layer makes after an absorbed decode.
    """
    values = (latent_out, w_uv, out, out_format, num_groups, backend)
    repeated: Output | None = PUBLIC.repeat(OP, values)
    if repeated is not None:
        return repeated
    known = PUBLIC.find(OP, values)
    if known is None:
        _check(latent_out, w_uv, backend)
    shape = (latent_out.shape[0], latent_out.shape[1], D_V)
    result, target = prepare_output(
        OP, out, out_format, num_groups, shape=shape, device=latent_out.device, known=known
    )
    arguments = (
        latent_out,
        w_uv,
        target.data,
        target.sf,
        target.out_format,
        target.scale,
        target.row_start,
        target.total_tokens,
        backend or "",
    )
    operator = torch.ops.mlacast.v_up_project
    call_operator(operator, OP, known, values, arguments, target.fresh, result)
    return result


def _check(latent_out: torch.Tensor, w_uv: torch.Tensor, backend: str | None) -> None:
    """Check the arguments of ``v_up_project``, those about its output apart."""
    sizes: dict[str, Any] = {}
    dims, dtype = f"T h {LATENT}", torch.bfloat16
    check_tensor(OP, "latent_out", latent_out, dims, sizes, dtype=dtype, last_dim_contiguous=True)
    if sizes["h"] < 1:
        fail(OP, "latent_out", "have at least one head", sizes["h"])
    dims, device = f"h {LATENT} {D_V}", latent_out.device
    check_tensor(OP, "w_uv", w_uv, dims, sizes, dtype=dtype, device=device)
    if 1 not in w_uv.stride()[1:]:
        actual = f"strides {list(w_uv.stride())}"
        fail(OP, "w_uv", "have stride 1 on one of its last two dimensions", actual)
    check_backend(OP, backend)


def required_features(out_format: str) -> frozenset[str]:
    """Features that a backend needs for this call."""
    return features_of(out_format)


def run(
    latent_out: torch.Tensor,
    w_uv: torch.Tensor,
    out_data: torch.Tensor,
    out_sf: torch.Tensor | None,
    out_format: str,
    out_scale: torch.Tensor | None,
    row_start: int,
    total_tokens: int,
    backend: str,
) -> Any:
    """Eager body of ``torch.ops.mlacast.v_up_project``."""
    arch = arch_of(latent_out.device)
    impl = select(OP, required_features(out_format), arch, requested_backend(OP, backend))
    if latent_out.shape[0] == 0:
        return None
    check_no_overlap(
        OP,
        [("out", out_data), ("out.sf", out_sf)],
        [("latent_out", latent_out), ("w_uv", w_uv)],
    )
    return load(impl.target)(
        latent_out,
        w_uv,
        out=from_arguments(out_data, out_sf, out_format, out_scale, row_start, total_tokens),
    )
