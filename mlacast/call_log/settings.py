"""The environment variables of call logging."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LEVEL_VARIABLE = "MLACAST_LOGLEVEL"
DESTINATION_VARIABLE = "MLACAST_LOGDEST"
DIRECTORY_VARIABLE = "MLACAST_DUMP_DIR"
SIZE_VARIABLE = "MLACAST_DUMP_MAX_SIZE_GB"
COUNT_VARIABLE = "MLACAST_DUMP_MAX_COUNT"
INCLUDE_VARIABLE = "MLACAST_DUMP_INCLUDE"
EXCLUDE_VARIABLE = "MLACAST_DUMP_EXCLUDE"

LOGGING_VARIABLES = (
    LEVEL_VARIABLE,
    DESTINATION_VARIABLE,
    DIRECTORY_VARIABLE,
    SIZE_VARIABLE,
    COUNT_VARIABLE,
    INCLUDE_VARIABLE,
    EXCLUDE_VARIABLE,
)
DEFAULT_DIRECTORY = "mlacast_dumps"
LEVELS = (0, 1, 3, 5, 10)
_GIB = 2**30


@dataclass(frozen=True)
class Settings:
    """What is logged, and where to.

    Attributes:
        level: 0 nothing, 1 names, 3 arguments and results, 5 statistics, 10 dumps.
        destination: ``"stdout"``, ``"stderr"`` or the path of a file, where ``%i`` is the process.
        dump_dir: Folder of the dumps.
        max_bytes: Bytes that the dumps of this process may have in all.
        max_count: Number of dumps of this process.
        include: Patterns; without any, every function is included.
        exclude: Patterns, applied to what is included.
    """

    level: int = 0
    destination: str = "stdout"
    dump_dir: Path = Path(DEFAULT_DIRECTORY)
    max_bytes: int = 20 * _GIB
    max_count: int = 1000
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def selects(self, name: str) -> bool:
        """Whether more than the name of this function is logged.

        A pattern may name the whole dotted name or any end of it: ``"prefill"``,
        ``"flash_mla.*"``, ``"mlacast.kv_cache_*"``.
        """
        parts = name.split(".")
        ends = [".".join(parts[start:]) for start in range(len(parts))]

        def matches(patterns: tuple[str, ...]) -> bool:
            return any(fnmatch.fnmatchcase(end, pattern) for pattern in patterns for end in ends)

        return (not self.include or matches(self.include)) and not matches(self.exclude)


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Read the variables; an empty one counts as not set.

    The variables of dumps are read at level 10 only, so a bad one disturbs nobody else.

    Raises:
        ValueError: A level, size or count that is no number or is out of range.
    """
    level = _level(environment.get(LEVEL_VARIABLE, ""))
    destination = environment.get(DESTINATION_VARIABLE, "") or "stdout"
    include = _patterns(environment.get(INCLUDE_VARIABLE, ""))
    exclude = _patterns(environment.get(EXCLUDE_VARIABLE, ""))
    if level < 10:
        return Settings(level, destination, include=include, exclude=exclude)
    return Settings(
        level,
        destination,
        Path(environment.get(DIRECTORY_VARIABLE, "") or DEFAULT_DIRECTORY),
        int(_number(SIZE_VARIABLE, environment.get(SIZE_VARIABLE, "") or "20") * _GIB),
        _count(environment.get(COUNT_VARIABLE, "") or "1000"),
        include,
        exclude,
    )


def _level(text: str) -> int:
    """Round a level down to the nearest one that means something."""
    try:
        wanted = int(text or "0")
    except ValueError:
        wanted = -1
    if wanted < 0:
        levels = ", ".join(str(level) for level in LEVELS)
        raise ValueError(f"{LEVEL_VARIABLE} must be one of {levels}, got {text!r}")
    return max(level for level in LEVELS if level <= wanted)


def _number(variable: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    # Not NaN and not infinite either, which int() would refuse with another sentence.
    if not 0 <= number < 2**53:
        raise ValueError(f"{variable} must be a number of at least 0, got {text!r}")
    return number


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{COUNT_VARIABLE} must be a whole number of at least 0, got {text!r}")
    return int(text)


def _patterns(text: str) -> tuple[str, ...]:
    return tuple(pattern.strip() for pattern in text.split(",") if pattern.strip())
