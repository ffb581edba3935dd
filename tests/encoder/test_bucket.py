"""Every batch finds a bucket, and is laid out in it whole."""

from __future__ import annotations

from functools import partial

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import as_batch, as_passages, random_passages

from gte_vectorize.encoder.bucket import Bucket, choose, exact_bucket, max_rows, packed_buckets, padded_buckets
from gte_vectorize.encoder.forward import PackedForward, PaddedForward
from gte_vectorize.tokens.batcher import token_batches

lengths_of_a_window = st.lists(st.integers(3, 100), min_size=1, max_size=300)


def packed() -> PackedForward:
    return PackedForward(None, ("cls",), lambda pooled: pooled)  # type: ignore[arg-type]


def padded() -> PaddedForward:
    return PaddedForward(None, ("cls",), lambda pooled: pooled, 1)


@settings(deadline=None, max_examples=60)
@given(lengths_of_a_window, st.sampled_from([128, 1000, 16384]))
def test_packed_batches_fit_a_bucket_and_fill_it(lengths: list[int], budget: int) -> None:
    buckets = packed_buckets(budget, 100)
    windows = [as_passages(random_passages(lengths))]
    for batch in token_batches(windows, layout="packed", budget=budget, max_rows=partial(max_rows, buckets)):
        for bucket in (choose(buckets, batch), exact_bucket(batch)):
            laid_out = packed().lay_out(batch.ids, batch.lengths, bucket)
            ids, positions, bounds = np.split(laid_out, [bucket.tokens, 2 * bucket.tokens])
            sizes = np.diff(bounds)
            assert np.array_equal(ids[: len(batch.ids)], batch.ids)
            assert np.array_equal(sizes[: len(batch.rows)], batch.lengths)
            assert sizes.min() >= 0
            assert sizes.max() <= bucket.max_length
            assert bounds[-1] == bucket.tokens
            for start, size in zip(bounds[: len(batch.rows)], batch.lengths, strict=True):
                assert np.array_equal(positions[start : start + size], np.arange(size))


@settings(deadline=None, max_examples=60)
@given(lengths_of_a_window, st.sampled_from([128, 1000, 16384]))
def test_padded_batches_fit_a_bucket_and_keep_a_visible_token_in_every_row(lengths: list[int], budget: int) -> None:
    buckets = padded_buckets(budget, 100)
    windows = [as_passages(random_passages(lengths))]
    for batch in token_batches(windows, layout="padded", budget=budget, max_rows=partial(max_rows, buckets)):
        bucket = choose(buckets, batch)
        laid_out = padded().lay_out(batch.ids, batch.lengths, bucket)
        ids, visible = np.split(laid_out, [bucket.tokens])
        assert visible.min() >= 1
        grid = ids.reshape(bucket.rows, bucket.max_length)
        real = np.concatenate([row[:size] for row, size in zip(grid, batch.lengths, strict=False)])
        assert np.array_equal(real, batch.ids)
        assert (grid[len(batch.rows) :] == 1).all()


def test_a_bucket_of_fillers_alone_is_valid() -> None:
    nothing = np.empty(0, np.int32)
    for bucket in packed_buckets(32768, 512):
        bounds = packed().lay_out(nothing, nothing, bucket)[2 * bucket.tokens :]
        assert bounds[-1] == bucket.tokens
        assert np.diff(bounds).max() <= bucket.max_length


def test_largest_bucket_comes_first() -> None:
    for buckets in (packed_buckets(32768, 512), padded_buckets(32768, 512)):
        assert [b.tokens for b in buckets] == sorted((b.tokens for b in buckets), reverse=True)
        assert max(b.max_length for b in buckets) == 512


def test_smallest_sufficient_bucket_is_chosen() -> None:
    buckets = [Bucket(64, 32, 8, 8), Bucket(64, 16, 8, 8), Bucket(32, 32, 8, 8), Bucket(32, 16, 8, 8)]
    assert choose(buckets, as_batch(random_passages([16, 16]))) == Bucket(32, 16, 8, 8)
    assert choose(buckets, as_batch(random_passages([17, 15]))) == Bucket(32, 32, 8, 8)
    assert choose(buckets, as_batch(random_passages([17, 16]))) == Bucket(64, 32, 8, 8)
