"""What can go wrong, and the exit code each kind means.

VectorizeError
├── Refused (2)               nothing was done; the message says what to change
│   ├── ConfigError           option, environment variable or config file
│   ├── InputError            corpus, shard or column
│   ├── ModelError            model folder that is missing, incomplete or cannot be run faithfully
│   └── OutputError           an output that is in the way or belongs to another run
├── LimitExceeded (4)         the work was done, but too many rows failed
│   └── DamagedInput          a shard turned out to be damaged while it was read; it is an InputError too
├── VerificationFailed (5)    an output is not what its run published
├── TemporaryError (75)       running the same command again may help: locked, storage
│   └── DeviceError           the GPU failed, hangs or computes wrongly; only a fresh process may use it again
└── WorkerError (1)           a worker process died or raised; a bug

Messages name files, columns and counts, never document text and never a secret.
"""

from __future__ import annotations


class VectorizeError(Exception):
    """Base of every error gte-vectorize raises on purpose."""

    exit_code = 1


class Refused(VectorizeError):
    """Refused before any work."""

    exit_code = 2


class ConfigError(Refused):
    """A usage or configuration error."""


class InputError(Refused):
    """The corpus cannot be used as it is."""


class ModelError(Refused):
    """The model is missing, incomplete or cannot be run faithfully."""


class OutputError(Refused):
    """The output exists, belongs to another run, or cannot be written."""


class LimitExceeded(VectorizeError):
    """More rows failed than the caller allows; the output is not complete."""

    exit_code = 4


class DamagedInput(LimitExceeded, InputError):
    """A shard's footer was sound, but not its pages; what was published before it was read is kept."""

    exit_code = 4


class VerificationFailed(VectorizeError):
    """An output is not what its run published, or holds other vectors than its texts give."""

    exit_code = 5


class TemporaryError(VectorizeError):
    """Running the same command again may help."""

    exit_code = 75


class DeviceError(TemporaryError):
    """The GPU cannot be used by this process any more."""


class WorkerError(VectorizeError):
    """A worker process died or raised while it worked on a window."""
