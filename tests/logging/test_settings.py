"""The environment variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlacast.call_log.settings import Settings, read_settings

ROOT = Path(__file__).resolve().parents[2]


def test_nothing_set_is_level_0() -> None:
    assert read_settings({}) == Settings(level=0)
    assert read_settings({"MLACAST_LOGLEVEL": ""}).level == 0


@pytest.mark.parametrize(
    ("text", "level"),
    [("0", 0), ("1", 1), ("2", 1), ("3", 3), ("4", 3), ("5", 5), ("9", 5), ("10", 10), ("99", 10)],
)
def test_levels_between_the_named_ones_count_as_the_lower(text: str, level: int) -> None:
    assert read_settings({"MLACAST_LOGLEVEL": text}).level == level


@pytest.mark.parametrize("text", ["all", "-1", "1.5"])
def test_a_level_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="MLACAST_LOGLEVEL must be one of 0, 1, 3, 5, 10, got"):
        read_settings({"MLACAST_LOGLEVEL": text})


def test_defaults_of_dumps() -> None:
    settings = read_settings({"MLACAST_LOGLEVEL": "10"})
    assert settings.destination == "stdout"
    assert settings.dump_dir == Path("mlacast_dumps")
    assert settings.max_bytes == 20 * 1024**3
    assert settings.max_count == 1000
    assert settings.include == settings.exclude == ()


def test_every_variable_is_read() -> None:
    settings = read_settings(
        {
            "MLACAST_LOGLEVEL": "10",
            "MLACAST_LOGDEST": "log_%i.txt",
            "MLACAST_DUMP_DIR": "/d",
            "MLACAST_DUMP_MAX_SIZE_GB": "0.5",
            "MLACAST_DUMP_MAX_COUNT": "7",
            "MLACAST_DUMP_INCLUDE": "sparse_*, dense_*",
            "MLACAST_DUMP_EXCLUDE": "dense_mla_decode",
        }
    )
    assert settings == Settings(
        10,
        "log_%i.txt",
        Path("/d"),
        2**29,
        7,
        ("sparse_*", "dense_*"),
        ("dense_mla_decode",),
    )


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("MLACAST_DUMP_MAX_SIZE_GB", "much"),
        ("MLACAST_DUMP_MAX_SIZE_GB", "-1"),
        ("MLACAST_DUMP_MAX_SIZE_GB", "nan"),
        ("MLACAST_DUMP_MAX_SIZE_GB", "inf"),
        ("MLACAST_DUMP_MAX_COUNT", "1.5"),
        ("MLACAST_DUMP_MAX_COUNT", "-1"),
    ],
)
def test_a_limit_that_is_none_is_refused_at_level_10_only(variable: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"{variable} must be .*, got '{text}'"):
        read_settings({"MLACAST_LOGLEVEL": "10", variable: text})
    assert read_settings({"MLACAST_LOGLEVEL": "5", variable: text}).level == 5


@pytest.mark.parametrize(
    ("include", "exclude", "selected"),
    [
        ((), (), True),
        (("kv_cache_append",), (), True),
        (("kv_cache_*",), (), True),
        (("mlacast.kv_cache_append",), (), True),
        (("kv_cache",), (), False),
        (("quantize_output",), (), False),
        ((), ("kv_*",), False),
        (("kv_*",), ("*_gather",), True),
        (("kv_*",), ("*_append",), False),
    ],
)
def test_include_then_exclude(
    include: tuple[str, ...], exclude: tuple[str, ...], selected: bool
) -> None:
    settings = Settings(10, include=include, exclude=exclude)
    assert settings.selects("mlacast.kv_cache_append") is selected


@pytest.mark.parametrize(
    "pattern", ["prefill", "fused_norm_rope_attn_rope_cast.prefill", "*fused*"]
)
def test_a_pattern_may_name_any_end_of_a_dotted_name(pattern: str) -> None:
    name = "mlacast.compat.flash_mla.fused_norm_rope_attn_rope_cast.prefill"
    assert Settings(10, include=(pattern,)).selects(name)
    assert not Settings(10, include=(pattern,)).selects("mlacast.sparse_mla_prefill")


def test_a_bad_level_stops_the_import() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import mlacast"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "MLACAST_LOGLEVEL": "loud"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "MLACAST_LOGLEVEL must be one of 0, 1, 3, 5, 10, got 'loud'" in done.stderr
