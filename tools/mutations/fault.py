"""One fault that is planted by hand: where, what it becomes, and which tests should notice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """A piece of source text and the wrong text that takes its place.

    Attributes:
        id: Short name, unique in all lists.
        subject: Operation or part of the project, for example "sparse_mla_decode" or "call_log".
        kind: What is wrong, in a few words.
        file: Path from the root of the repository.
        old: Text that occurs exactly once in the file.
        new: What it becomes.
        tests: Arguments of pytest that name the tests to run first. Files that end in
            ``_interpreted.py`` run under Triton's interpreter, all of one fault or none.
    """

    id: str
    subject: str
    kind: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def problem(self, root: Path) -> str:
        """Say why the fault cannot be planted in the tree at ``root``; "" if it can."""
        path = root / self.file
        if not path.is_file():
            return f"{self.id}: {self.file} does not exist"
        count = path.read_text(encoding="utf-8").count(self.old)
        if count != 1:
            return f"{self.id}: the old text occurs {count} times in {self.file}, not once"
        if self.old == self.new:
            return f"{self.id}: the new text is the old one"
        return ""

    def plant(self, root: Path) -> None:
        """Replace the text in the tree at ``root``; ``problem`` must have been empty."""
        path = root / self.file
        source = path.read_text(encoding="utf-8")
        path.write_text(source.replace(self.old, self.new), encoding="utf-8")
