"""Samples of a profile are added up by role."""

from __future__ import annotations

import pytest

from tools.role_stalls import roles

HEADER = '"Address","Source","# Samples","stall_long_sb","stall_wait","stall_wait (Not Issued)"'
LINES = [
    '"Kernel Name","some_kernel",',
    HEADER,
    '"0x0","LDC R1, c[0x0][0x28]","1","0","1","1"',
    '"0x1","USETMAXREG.DEALLOC.CTAPOOL 0x20","0","0","0","0"',
    '"0x2","@!P0 LDGSTS.E.BYPASS.128 [R1], desc[UR2][R4.64]","30","30","0","9"',
    '"0x3","@P1 BRA 0x2","30","0","30","9"',
    '"0x4","USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xa0","2","","2","2"',
    '"0x5","HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], R24","37","37","","0"',
    '"0x6","HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], R24","3","3","0","0"',
]


def test_roles_are_what_lies_between_changes_of_registers() -> None:
    copies, products = roles(LINES)
    assert (copies.instructions, copies.samples, copies.kinds) == (3, 60, {"LDGSTS": 1})
    assert copies.reasons == {"long_sb": 0.5, "wait": 0.5}
    assert (products.instructions, products.samples, products.kinds) == (3, 42, {"HGMMA": 2})
    assert products.reasons == {"long_sb": pytest.approx(40 / 42), "wait": pytest.approx(2 / 42)}


def test_a_page_without_a_header_is_an_error() -> None:
    with pytest.raises(StopIteration):
        roles(LINES[:1])
