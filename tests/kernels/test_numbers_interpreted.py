"""Number formats of the kernels, interpreted: every code and every rounding boundary."""

from __future__ import annotations

import pytest

from tests.kernels import number_cases, probes
from tests.quantizers import E2M1_MAGNITUDES, E4M3_MAGNITUDES


@pytest.mark.parametrize(
    ("helper", "count"), [("decode_e4m3", 256), ("decode_e2m1", 16), ("decode_ue8m0", 256)]
)
def test_every_code_decodes_like_the_library(helper: str, count: int) -> None:
    number_cases.assert_decodes_like_the_library(helper, count, "cpu")


def test_e4m3_encodes_like_the_library() -> None:
    number_cases.check_encode_e4m3("cpu")


def test_e2m1_encodes_like_the_library() -> None:
    number_cases.check_encode_e2m1("cpu")


def test_ue8m0_encodes_like_the_library() -> None:
    number_cases.check_encode_ue8m0("cpu")


def test_a_negative_zero_has_its_sign() -> None:
    """Written as a number it would not, on the device as little as here."""
    zero = probes.stored_negative_zero()
    assert bool(zero == 0) and bool(zero.signbit())


def test_the_boundaries_are_among_the_inputs() -> None:
    """448 and 464 (halfway to the code that does not exist), and the tie 2**-10 below the least."""
    values = set(number_cases.boundary_values(E4M3_MAGNITUDES).tolist())
    assert {2.0**-10, 448.0, 2.0**-6, 0.0} <= values
    assert {0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0} <= set(
        number_cases.boundary_values(E2M1_MAGNITUDES).tolist()
    )
