"""Storage that fails, lies, or holds something else than was written to it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pyarrow.parquet as pq
from faults import tracer
from faults.case import AGAIN, BUG, DONE, KILLED, REFUSED, Case
from faults.harness import NAMES, Harness

# Where the code calls the storage; the other failpoints lie between two such calls.
STORAGE = (
    *("lock", "folder.make", "part.create", "part.write", "part.close", "part.readback"),
    *("publish.write", "publish.sync", "publish.link", "publish.syncdir", "assemble.write"),
)
FOREIGN = b"not ours"


def errors_at_failpoints(harness: Harness) -> None:
    """ENOSPC and EIO at each failpoint that touches the storage, for every n: exit 75"""
    for error in ("enospc", "eio") if harness.full else ("enospc",):
        for name in NAMES:
            for point in STORAGE if harness.full else STORAGE[NAMES.index(name) :: 2]:
                for nth in range(1, 100 if harness.full else 2):
                    with harness.case(f"{error.upper()} at a failpoint", f"{point}@{nth}", name) as case:
                        if case.end(case.start(f"{point}={error}@{nth}"), {AGAIN, DONE}) == DONE:
                            case.outcome.faults = 0
                            break


def errors_at_system_calls(harness: Harness) -> None:
    """ENOSPC or EIO from every other system call: exit 75, or 0 where only a removal failed"""
    for name in NAMES:
        with harness.case("error of a system call", "none", name) as case:
            found = tracer.calls(case)
            case.outcome.faults = 0
        for call in found[NAMES.index(name) :: 2] if harness.full else found[9::150]:
            error = "ENOSPC" if call.name in ("write", "mkdir", "link", "linkat") else "EIO"
            with harness.case("error of a system call", f"{error} from {call.name} {call.nth}", name) as case:
                _, log = tracer.run(case, [f"{call.name}:error={error}:when={call.nth}"], {AGAIN, DONE})
                if not tracer.injected(log, case.folder):
                    case.outcome.faults = 0


def fsync_fails_once(harness: Harness) -> None:
    """the n-th fsync fails once with EIO and drops its data: exit 75, the file is made anew, never synced again"""
    for name in NAMES:
        for nth in range(1, 100) if harness.full else (1, 8):
            with harness.case("fsync fails once", f"fsync {nth}", name) as case:
                if case.end(case.start("", f"power:{nth}"), {AGAIN, DONE}) == DONE:
                    if any(case.log.parent.glob("*.shadow/failed")):
                        case.wrong("a failed fsync has been overlooked")
                    case.outcome.faults = 0
                    break


def links_that_lie(harness: Harness) -> None:
    """a link that is made and reported as failed: adopted by the next run"""
    for name in NAMES:
        for nth in range(1, 100 if harness.full else 3):
            with harness.case("link made, reported as failed", f"link {nth}", name) as case:
                if case.end(case.start("", f"link_lies:{nth}"), {AGAIN, DONE}) == DONE:
                    case.outcome.faults = 0
                    break


def names_already_taken(harness: Harness) -> None:
    """EEXIST: other bytes under the final name are refused (2) and kept, the same bytes adopted (0)"""
    for name in NAMES:
        for nth in range(1, 100) if harness.full else (1, 2):
            with harness.case("final name taken", f"other bytes, link {nth}", name) as case:
                if not _taken(case, nth, None, REFUSED):
                    break
            with harness.case("final name taken", f"same bytes, link {nth}", name) as case:
                _taken(case, nth, harness.references[name].known, DONE)


def bits_flipped(harness: Harness) -> None:
    """a bit of a page flips before the file is read back, or in a published part before it is assembled: exit 75"""
    for nth in (1, 2, 3, 5, 6) if harness.full else (1,):  # the fourth part has no rows, and so no page
        for name in NAMES:
            with harness.case("bit flipped", f"before read-back {nth}", name) as case:
                process = case.start(f"part.readback=stop@{nth}")
                if case.await_stop(process):
                    _flip(next(case.state.glob("tmp/*/*.parquet")))
                    os.kill(process.pid, signal.SIGCONT)
                case.end(process, {AGAIN})
        with harness.case("bit flipped", f"in part {nth - 1}, before it is assembled", "out.parquet") as case:
            case.end(case.start("manifest.write=kill@1"), {KILLED})
            part = case.state / f"parts/part-{nth - 1:06d}.parquet"
            _flip(part)
            case.foreign.add(part)
            case.end(case.start(), {AGAIN})


def vectors_not_finite(harness: Harness) -> None:
    """vectors that are not finite reach the writer as ok: the part is discarded (1)"""
    for name in NAMES:
        with harness.case("vectors not finite", "all rows", name) as case:
            case.end(case.start(nan=True), {BUG})


def _taken(case: Case, nth: int, known: dict[str, bytes] | None, code: int) -> bool:
    """Put a file under the name that the n-th link is about to make; whether there was such a link."""
    process = case.start(f"publish.link=stop@{nth}")
    if not case.await_stop(process):
        case.outcome.faults = 0
        case.end(process, {DONE})
        return False
    temp = next(path for path in case.state.glob("tmp/*/*") if path.is_file())
    final = _final(case, temp.name)
    final.write_bytes(FOREIGN if known is None else known[str(final.relative_to(case.folder))])
    final.chmod(0o600)
    if known is None:
        case.foreign.add(final)
    os.kill(process.pid, signal.SIGCONT)
    case.end(process, {code})
    if known is None:
        if final.read_bytes() != FOREIGN:
            case.wrong(f"{final.name} was another's and is replaced")
        final.unlink()
        case.foreign.clear()
    return True


def _final(case: Case, name: str) -> Path:
    """The final name of the file that is called so in tmp/."""
    if name == case.output.name:
        return case.output
    single = case.output.suffix == ".parquet"
    folders = {
        "plan.json": case.state,
        "manifest.json": case.state,
        "_manifest.json": case.output,
        "_SUCCESS": case.output,
    }
    if name in folders:
        return folders[name] / name
    if name.startswith("part-"):
        return (case.state / "parts" if single else case.output) / name
    return case.state / "records" / name


def _flip(path: Path) -> None:
    """One bit in the middle of the first page of vectors."""
    group = pq.ParquetFile(path).metadata.row_group(0)
    columns = [group.column(index) for index in range(group.num_columns)]
    vectors = next(column for column in columns if column.path_in_schema.startswith("embedding"))
    data = bytearray(path.read_bytes())
    data[vectors.data_page_offset + vectors.total_compressed_size // 2] ^= 1
    path.write_bytes(data)
