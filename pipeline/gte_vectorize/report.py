"""What a run did: counts of the whole output, and what this run computed of it."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from gte_vectorize.batch import Passages, Status
from gte_vectorize.store.manifest import Totals

LOUD_TRUNCATION = 0.05

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Work:
    """What a run computes: see Report."""

    tokens: int = 0
    duplicates: int = 0
    reused: int = 0
    cut_tokens: int = 0
    read_tokens: int = 0
    """Of all texts that were tokenized, equal ones too, as far as the limit."""

    def add(self, passages: Passages) -> None:
        """Count a window whose vectors are there."""
        self.tokens += int(passages.lengths[passages.encoded].sum())
        self.cut_tokens += passages.cut_tokens
        self.read_tokens += len(passages.ids)
        if passages.same_as is not None:
            self.duplicates += int(np.count_nonzero(passages.same_as >= 0))
        if passages.reused is not None:
            self.reused += int(np.count_nonzero(passages.reused >= 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Rows, tokens, truncated rows and rows by status of the whole output. Of this run: tokens that were computed,
    passages that took the vector of an equal one, or of an earlier output, tokens of the texts that were tokenized,
    those behind the model's limit (estimated), and seconds. `documents` is the second output's report.
    """

    output: str
    rows: int
    tokens: int
    truncated: int
    status: dict[str, int]
    computed_tokens: int
    duplicates: int
    reused: int
    cut_tokens: int
    read_tokens: int
    seconds: float
    documents: Report | None = None

    @classmethod
    def of(
        cls, totals: Totals, *, output: str | Path, work: Work, seconds: float, documents: Report | None = None
    ) -> Self:
        return cls(
            output=str(output),
            rows=totals.rows,
            tokens=totals.tokens,
            truncated=totals.truncated,
            status=totals.status,
            computed_tokens=work.tokens,
            duplicates=work.duplicates,
            reused=work.reused,
            cut_tokens=work.cut_tokens,
            read_tokens=work.read_tokens,
            seconds=round(seconds, 3),
            documents=documents,
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
        return 3 if self.failed or (self.documents and self.documents.failed) else 0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "failed": self.failed, "exit_code": self.exit_code}

    def log(self) -> None:
        rate = f", {self.computed_tokens / self.seconds:,.0f} tokens/s" if self.computed_tokens else ""
        log.info("%s: %d rows, %d tokens in %.1f s%s", self.output, self.rows, self.tokens, self.seconds, rate)
        if self.documents:
            log.info("%s: %d rows, the means", self.documents.output, self.documents.rows)
        if self.duplicates:
            log.info("rows that are the same as another to the model, and took its vector: %d", self.duplicates)
        if self.reused:
            log.info("rows whose text is unchanged, and whose vector was reused: %d", self.reused)
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
            share = self.cut_tokens / (self.cut_tokens + self.read_tokens or 1)
            if share > LOUD_TRUNCATION:
                log.warning(
                    "about %.0f %% OF ALL TOKENS%s ARE BEHIND THAT LIMIT, in no vector; --long windows embeds them all",
                    100 * share,
                    " OF CHANGED TEXTS" if self.reused else "",
                )

    def _counts(self, wanted: Any) -> str:
        names = [status.name.lower() for status in Status if wanted(status)]
        return ", ".join(f"{self.status[name]} {name}" for name in names if self.status.get(name))
