"""How many tokens a packed batch should have on this GPU: what fits by a formula; on a small card, what is fastest.

Large matrix products run faster, up to some tens of thousands of rows on a large card and far fewer on a small one;
more only takes memory. The budget changes no bits, so it may follow what is measured. The curve is kept in the user's
cache, by GPU, model, dtype and version of PyTorch.
"""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from gte_vectorize.encoder.bucket import Bucket
from gte_vectorize.encoder.forward import PackedForward
from gte_vectorize.model.spec import ModelSpec

BUDGETS = (8192, 16384, 24576, 32768, 49152)

BIG_CARD = 40 << 30
"""Bytes of memory of a card for which BIG_BUDGET is known to be good, so that nothing is measured there.

BERT-large on an H200 at its power limit: 851, 848 and 837 thousand tokens/s with 16,384, 24,576 and 32,768.
"""

BIG_BUDGET = 24576

SECONDS = 0.3
"""Per budget, after as much warm-up."""

RESERVE = 512 << 20
"""Bytes for what does not grow with the budget: staging, windows, the libraries' workspaces."""

PASSAGE = 128
"""Tokens of a passage while measuring."""

log = logging.getLogger(__name__)


def activation_bytes(spec: ModelSpec, tokens: int, item_bytes: int) -> int:
    """Device memory that a packed batch of `tokens` needs beside the weights.

    At its widest a layer holds the hidden states, their residual and a product's operand and result: three times the
    hidden size and the inner size, or the hidden size and three times it for the fused query, key and value. Twice: the
    graphs' pool keeps one for good, and a bucket that runs before it is captured takes another.
    """
    hidden, inner = int(spec.config["hidden_size"]), int(spec.config["intermediate_size"])
    return 2 * tokens * item_bytes * (3 * hidden + max(inner, 3 * hidden))


def choose_budget(forward: PackedForward, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> int:
    """The fastest of BUDGETS that fit into the free memory."""
    free, total = torch.cuda.mem_get_info(device)
    fitting = [
        tokens for tokens in BUDGETS if activation_bytes(spec, tokens, dtype.itemsize) + RESERVE <= free
    ] or list(BUDGETS[:1])
    if total >= BIG_CARD and BIG_BUDGET in fitting:
        return BIG_BUDGET
    path, key = _cache_file(), _key(spec, device, dtype)
    curve = _read(path).get(key, {})
    if missing := [tokens for tokens in fitting if tokens not in curve]:
        for tokens in missing:
            try:
                curve[tokens] = _rate(forward, spec, tokens, device)
            except torch.OutOfMemoryError:  # something else took it meanwhile
                fitting.remove(tokens)
        torch.cuda.empty_cache()  # what was freed belongs to this stream alone until then
        _write(path, _read(path) | {key: curve})
    log.debug("tokens per second by batch: %s", {tokens: round(curve[tokens]) for tokens in fitting})
    return max(fitting, key=lambda tokens: curve[tokens], default=BUDGETS[0])


def _rate(forward: PackedForward, spec: ModelSpec, tokens: int, device: torch.device) -> float:
    """Tokens per second of the forward on random ids: a card at its power limit runs faster on zeros."""
    length = min(PASSAGE, spec.tokenizer.max_length)
    count = tokens // length
    bucket = Bucket(tokens, length, count, count + tokens // length + 1)
    ids = np.random.default_rng(0).integers(0, int(spec.config["vocab_size"]), count * length, dtype=np.int32)
    laid_out = forward.lay_out(ids, np.full(count, length, np.int32), bucket)
    inputs = torch.from_numpy(laid_out).to(device)
    rate = 0.0
    with torch.inference_mode():
        for _ in ("to warm up", "to measure"):
            started, calls = time.monotonic(), 0
            while (passed := time.monotonic() - started) < SECONDS:
                forward(inputs, bucket)
                torch.cuda.synchronize(device)
                calls += 1
            rate = calls * tokens / passed
    return rate


def _key(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> str:
    found = torch.cuda.get_device_properties(device)
    gpu = f"{found.name}, {found.total_memory >> 30} GiB"
    return f"{gpu}, {dtype}, torch {torch.__version__}, {spec.weights_sha256[:16]}"


def _cache_file() -> Path:
    try:
        folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # a user without a home, as in a container: nothing is kept
        folder = os.devnull
    return Path(folder) / "gte-vectorize" / "budgets.json"


def _read(path: Path) -> dict[str, dict[int, float]]:
    """What was measured before; nothing where the file is missing or not ours."""
    with suppress(OSError, ValueError, AttributeError, TypeError):
        return {
            str(key): {int(tokens): float(rate) for tokens, rate in curve.items()}
            for key, curve in json.loads(path.read_bytes()).items()
        }
    return {}


def _write(path: Path, curves: dict[str, dict[int, float]]) -> None:
    """At most, the next run measures again."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        temporary.write_text(json.dumps(curves, indent=1))
        temporary.replace(path)
