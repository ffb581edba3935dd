"""What a run did: counts of the whole output, and what this run computed of it."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from gte_vectorize.batch import Status
from gte_vectorize.store.manifest import Totals

LOUD_TRUNCATION = 0.05

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Rows, tokens, truncated rows and rows by status of the whole output; of this run tokens that were computed, rows
    that took the vector of an equal passage, and seconds.
    """

    output: str
    rows: int
    tokens: int
    truncated: int
    status: dict[str, int]
    computed_tokens: int
    duplicates: int
    seconds: float

    @classmethod
    def of(cls, totals: Totals, *, output: str | Path, computed: int, duplicates: int, seconds: float) -> Self:
        return cls(
            output=str(output),
            rows=totals.rows,
            tokens=totals.tokens,
            truncated=totals.truncated,
            status=totals.status,
            computed_tokens=computed,
            duplicates=duplicates,
            seconds=round(seconds, 3),
        )

    @property
    def failed(self) -> int:
        return sum(self.status.get(status.name.lower(), 0) for status in Status if status.failed)

    @property
    def failures(self) -> str:
        return self._counts(lambda status: status.failed) or "none"

    @property
    def exit_code(self) -> int:
        """0, or 3 when some rows failed within the allowed limit."""
        return 3 if self.failed else 0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "failed": self.failed, "exit_code": self.exit_code}

    def log(self) -> None:
        rate = f", {self.computed_tokens / self.seconds:,.0f} tokens/s" if self.computed_tokens else ""
        log.info("%s: %d rows, %d tokens in %.1f s%s", self.output, self.rows, self.tokens, self.seconds, rate)
        if self.duplicates:
            log.info("rows that are the same as another to the model, and took its vector: %d", self.duplicates)
        others = self._counts(lambda status: status is not Status.OK)
        if others:
            (log.warning if self.failed else log.info)("rows without a vector: %s", others)
        if self.truncated:
            share = self.truncated / self.rows
            say = log.warning if share > LOUD_TRUNCATION else log.info
            say(
                "%d documents (%.1f %%) are longer than the model's limit: their ends were cut and cannot be found",
                self.truncated,
                100 * share,
            )

    def _counts(self, wanted: Any) -> str:
        names = [status.name.lower() for status in Status if wanted(status)]
        return ", ".join(f"{self.status[name]} {name}" for name in names if self.status.get(name))
