"""Is each vector its own text's? A sample of rows is read, tokenized and embedded again, among other neighbours.

On the same kind of device and versions of the libraries, a packed encoder must give the same bits; anywhere else, the
same direction. This finds what no checksum can: rows that were exchanged, and arithmetic that went wrong.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from importlib.metadata import version
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gte_vectorize.batch import Bool, EncodedWindow, Int64, Passages, Status
from gte_vectorize.check.difference import Ranges
from gte_vectorize.check.restore import restore_config
from gte_vectorize.check.sample import Drawn, draw
from gte_vectorize.check.verify import Verification, name_of
from gte_vectorize.encoder.encoder import (
    Encoder,
    batches_for,
    describe_device,
    open_encoder,
    resolve_device,
    resolve_dtype,
)
from gte_vectorize.encoder.mean import averaged
from gte_vectorize.errors import InputError, ModelError
from gte_vectorize.job import load_job_model, windowings
from gte_vectorize.store.plan import Plan
from gte_vectorize.tokens.pieces import join
from gte_vectorize.tokens.tokenizer import TextTokenizer
from gte_vectorize.writer.schema import CHUNK_COLUMNS, is_chunked

LEAST_COSINE = 0.9999
MIXED_PASSAGES = 4096


def reembed(found: Verification, rate: Fraction, *, model: str | None, device: str) -> None:
    """Embed a share of the documents again, at least one, always the same ones, and add what differs to `found`.

    A document is embedded with all its windows. Left out are rows of broken files, of inputs that are gone, and those
    that no process can be trusted with. Raises ModelError for another model than the output's, InputError where no
    input is left as it was, ConfigError where what cut the windows is not installed.
    """
    plan, config = found.plan, restore_config(found, model)
    if plan is None or config is None:
        found.notes.append("nothing was embedded again: no file can be read")
        return
    files = list(found.sound_files())
    uris = {task.shard.uri for _, tasks in files for task in tasks if task.num_rows}
    if uris and uris <= found.gone_inputs:
        raise InputError("no input is there as it was, so nothing can be embedded again; run without --reembed")
    spec, device = load_job_model(config), resolve_device(device)
    (windowing,) = windowings(config, spec)
    if spec.fingerprint(dtype=config.dtype, long_documents=windowing.description()) != plan.fingerprint:
        raise ModelError(
            f"the output was made with {plan.fingerprint_fields['model']!r}, and {spec.name!r} is not the same; "
            "say where the right model is with --model"
        )
    exact = spec.layout == "packed" and _is_alike(plan, device)
    dtype = resolve_dtype(config.dtype if device == "cuda" else "auto", device)
    documents = draw(
        files,
        rate,
        seed=int(plan.sha256[:16], 16),
        gone=found.gone_inputs,
        column=config.text_column,
        tokenizer=TextTokenizer(spec.tokenizer),
        windowing=windowing,
    )
    wrong: dict[tuple[int, str], Ranges] = defaultdict(Ranges)
    is_mean = windowing.mode == "mean"
    with open_encoder(spec, device=device, dtype=dtype, graphs=False, late=windowing.late) as encoder:
        for some, encoded in _encoded(_comparable(documents, wrong, is_mean=is_mean), encoder, is_mean=is_mean):
            found.reembedded += len(encoded.status)
            _compare(some, encoded, wrong, exact=exact)
    for (index, what), ranges in sorted(wrong.items()):
        path = found.layout.output if found.layout.single and found.finished else found.layout.part(index)
        found.differences += ranges.differences(name_of(path, found.layout), what, plan.tasks[index])


def _is_alike(plan: Plan, device: str) -> bool:
    """Whether what computes here is what computed the output."""
    here = {"device": describe_device(device)} | {name: version(name) for name in ("torch", "tokenizers")}
    return all(plan.compute.get(name) == value for name, value in here.items())


def _compare(
    documents: list[Drawn], encoded: EncodedWindow, wrong: dict[tuple[int, str], Ranges], *, exact: bool
) -> None:
    owners = [(document.task, document.row) for document in documents for _ in range(len(document.stored))]
    for bad, what in _problems(encoded, pa.concat_tables([document.stored for document in documents]), exact):
        for at in np.flatnonzero(bad).tolist():
            task, row = owners[at]
            wrong[task, what].add(np.array([row]))


def _comparable(documents: Iterable[Drawn], wrong: dict[tuple[int, str], Ranges], *, is_mean: bool) -> Iterator[Drawn]:
    """The documents whose passages can be held against their rows one by one; the others are added to `wrong`."""
    for document in documents:
        if is_mean or len(document.stored) == len(document.passages.lengths):
            yield document
        else:
            wrong[document.task, "has other windows than its text gives"].add(np.array([document.row]))


def _encoded(
    documents: Iterable[Drawn], encoder: Encoder, *, is_mean: bool
) -> Iterator[tuple[list[Drawn], EncodedWindow]]:
    """Documents, or parts of some, with what their rows should hold."""
    most = min(encoder.window_rows, MIXED_PASSAGES // 2)
    pending: deque[list[Drawn]] = deque()

    def gathered() -> Iterator[Passages]:
        for some in _gathered(documents, most):
            pending.append(some)
            parts = [document.passages for document in some]
            rows = sum(part.window.num_rows for part in parts)
            yield join(replace(parts[0].window, num_rows=rows), parts)

    encoded = _encode_mixed(gathered(), encoder)
    for window in (means for _, means in averaged(encoded)) if is_mean else encoded:
        some = pending.popleft()
        if len(window.status):
            yield some, window


def _gathered(documents: Iterable[Drawn], most: int) -> Iterator[list[Drawn]]:
    """In pieces of about `most` passages at most, as many together as it takes for that number."""
    together: list[Drawn] = []
    passages = 0
    for document in documents:
        for piece in document.pieces(most):
            together.append(piece)
            passages += len(piece.passages.lengths)
            if passages >= most:
                yield together
                together, passages = [], 0
    if together:
        yield together


def _encode_mixed(windows: Iterable[Passages], encoder: Encoder) -> Iterator[EncodedWindow]:
    """Each window with its vectors, though its contexts were shuffled and dealt out, to meet others than in the run."""
    pending: deque[tuple[Passages, list[Int64]]] = deque()

    def dealt() -> Iterator[Passages]:
        rng = np.random.default_rng(0)
        for passages in windows:
            first = passages.contexts[0]
            contexts = np.split(np.arange(len(passages.lengths)), first[1:])
            dealt_out = np.array_split(rng.permutation(len(first)), 2)
            hands = [np.concatenate([contexts[one] for one in hand.tolist()]) for hand in dealt_out if len(hand)]
            pending.append((passages, hands))
            yield from (_pick(passages, hand) for hand in hands)

    encoded = encoder.stream(batches_for(encoder, dealt()))
    for first in encoded:
        passages, hands = pending.popleft()
        parts = [first, *islice(encoded, len(hands) - 1)]
        order = np.argsort(np.concatenate(hands))
        vectors = np.concatenate([part.vectors for part in parts])[order]
        yield EncodedWindow(passages, vectors, np.concatenate([part.status for part in parts])[order])


def _pick(passages: Passages, places: Int64) -> Passages:
    """Some of a window's passages, in the order of `places`, for an encoder."""
    ends = np.cumsum(passages.lengths, dtype=np.int64)
    return Passages(
        window=passages.window,
        ids=np.concatenate([passages.ids[ends[at] - passages.lengths[at] : ends[at]] for at in places.tolist()]),
        lengths=passages.lengths[places],
        status=passages.status[places],
        truncated=passages.truncated[places],
        text_hash=passages.text_hash[places],
        row=passages.row[places],
        continues=None if passages.continues is None else passages.continues[places],
    )


def _problems(encoded: EncodedWindow, stored: pa.Table, exact: bool) -> Iterator[tuple[Bool, str]]:
    passages = encoded.passages
    status = np.array([Status(value).name.lower() for value in encoded.status])
    hashes = np.array([row.tobytes().hex() for row in passages.text_hash])
    names, kept = (stored[name].to_numpy() for name in ("status", "text_hash"))
    yield (passages.status != Status.NULL) & (kept != hashes), "has the text_hash of another text"
    yield names != status, "has another status than its text gives"
    counts = (stored["n_tokens"].to_numpy() == passages.lengths) & (
        stored["truncated"].to_numpy() == passages.truncated
    )
    yield ~counts, "counts other tokens than its text has"
    if passages.chunk is not None and is_chunked(stored.schema):
        given = passages.chunk.copy()
        given[passages.lengths == 0, 1:] = -1
        places = np.stack([pc.fill_null(stored[name], -1).to_numpy() for name in CHUNK_COLUMNS], axis=1)
        yield (places != given).any(axis=1), "is of other characters than its text gives"
    both = (names == "ok") & (status == "ok")
    vectors = stored["embedding"].combine_chunks().drop_null()
    before = np.zeros_like(encoded.vectors)
    before[names == "ok"] = vectors.flatten().to_numpy(zero_copy_only=False).reshape(-1, before.shape[1])
    if exact:
        same = (before.view(np.uint32) == encoded.vectors.view(np.uint32)).all(axis=1)
    else:
        same = np.einsum("ij,ij->i", before.astype(np.float64), encoded.vectors.astype(np.float64)) >= LEAST_COSINE
    yield both & ~same, f"has a vector that its text does not give ({'bits' if exact else 'cosine'})"
