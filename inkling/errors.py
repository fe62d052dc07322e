"""Exceptions, and the Triton error code each one answers with.

    InklingError                INTERNAL
    ├── SettingsError           INVALID_ARG   a setting is unknown, mistyped or out of range
    ├── CheckpointError         INVALID_ARG   a checkpoint breaks a rule; names file, key, value and bound
    ├── RequestError            INVALID_ARG   a request breaks a rule; names field, value and bound
    ├── QueueFullError          UNAVAILABLE   the bounded queue has no place
    ├── DrainingError           UNAVAILABLE   the server is about to stop
    ├── CancelledError          CANCELLED     the client went away
    ├── ProtocolError           INTERNAL      a step message breaks the contract between the models
    │   ├── StepGapError                      a step number is missing: the engine reopens every sequence
    │   └── GenerationError                   the target restarted: the whole server must
    ├── AccessError             INVALID_ARG   a private model was called from outside
    ├── ModelError              INTERNAL      a model process failed a step
    └── ModelLostError          UNAVAILABLE   a model process ended, hangs or was stopped

To add one: it needs a caller that treats it differently from its parent.
"""

from __future__ import annotations


class InklingError(Exception):
    """Base class. ``code`` is the name of a ``pb_utils.TritonError`` code; ``reason`` stands in metrics and logs."""

    code = "INTERNAL"
    reason = "error"


class SettingsError(InklingError, ValueError):
    code = "INVALID_ARG"


class CheckpointError(InklingError, ValueError):
    code = "INVALID_ARG"

    def __init__(self, file: object, key: str, value: object, rule: str):
        self.file, self.key, self.value, self.rule = str(file), key, value, rule
        super().__init__(f"{file}: {key} is {value!r}; {rule}")


class RequestError(InklingError, ValueError):
    code = "INVALID_ARG"
    reason = "invalid"


class QueueFullError(InklingError):
    code = "UNAVAILABLE"
    reason = "queue_full"


class DrainingError(InklingError):
    code = "UNAVAILABLE"
    reason = "draining"


class CancelledError(InklingError):
    code = "CANCELLED"
    reason = "cancelled"


class ProtocolError(InklingError):
    pass


class StepGapError(ProtocolError):
    pass


class GenerationError(ProtocolError):
    pass


class AccessError(InklingError):
    code = "INVALID_ARG"


class ModelError(InklingError):
    pass


class ModelLostError(InklingError):
    code = "UNAVAILABLE"
