"""Every error the project raises on purpose.

    FastDeployError
    +-- ConfigError                a flag, file, variable or model config that cannot be served
    |   +-- UnsupportedModel       an architecture, format or dtype that nothing installed can run
    |   +-- WeightError            a checkpoint that is missing, malformed or of an unsafe format
    +-- PluginError                something about a plugin; names its distribution
    |   +-- PluginNotFound         nothing installed provides that name
    |   +-- PluginConflict         two distributions provide the same name
    |   +-- PluginLoadError        importing or constructing it failed
    |   +-- ContractMismatch       it was written for a contract this core does not speak
    |   +-- CapabilityError        it is asked for something it declares it cannot do
    +-- RequestError               ends one request, never the engine
    |   +-- InvalidRequest         a field is missing, malformed or out of range
    |   |   +-- RequestTooLong     prompt (plus max_tokens) exceeds what the model or KV pool holds
    |   +-- QueueFull              the bounded queue refuses; retry after `retry_after_s`
    |   +-- RequestTimeout         its deadline or its time in the queue ran out
    |   +-- Aborted                the client left or asked to stop
    +-- ResourceError              this process has too little memory or too few blocks
    |   +-- OutOfBlocks            the KV pool cannot supply the blocks asked for
    +-- WorkerError                a worker or the engine died, hung or failed; ends all requests
        +-- Unavailable            it starts, ends or cannot be reached; clients may ask again

Messages say, in this order: what failed; what was asked; what is possible; what to run next.
They start in lower case and carry no full stop at the end.
"""

from __future__ import annotations


class FastDeployError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(FastDeployError):
    """A flag, file, variable or model configuration cannot be served."""


class UnsupportedModel(ConfigError):
    """Nothing installed can run this architecture, format or dtype."""


class WeightError(ConfigError):
    """A checkpoint is missing, malformed or of an unsafe format."""


class PluginError(FastDeployError):
    """Something is wrong with a plugin."""


class PluginNotFound(PluginError):
    """Nothing installed provides the driver asked for."""


class PluginConflict(PluginError):
    """Two distributions provide the same driver name."""


class PluginLoadError(PluginError):
    """Importing or constructing a driver failed."""


class ContractMismatch(PluginError):
    """A plugin was written for a contract this core does not speak."""


class CapabilityError(PluginError):
    """A driver is asked for something it declares it cannot do."""


def needs_trace(error: BaseException) -> bool:
    """Whether where it was raised tells more than its words: not of what this project refuses."""
    return not isinstance(error, FastDeployError) or isinstance(error, PluginLoadError)


def error_named(name: str, message: str) -> FastDeployError:
    """The error that crossed a process border as the name of a class here and a message. After the
    name may stand the field that is at fault."""
    name, _, param = name.partition(":")
    kind = globals().get(name)
    if not (isinstance(kind, type) and issubclass(kind, FastDeployError)):
        kind = FastDeployError
    error: FastDeployError = kind(message)
    if param and isinstance(error, RequestError):
        error.param = param
    return error


class RequestError(FastDeployError):
    """Ends one request and never the engine. `param` names the offending field, if one does."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError, ValueError):
    """A field of a request is missing, malformed or out of range."""


class RequestTooLong(InvalidRequest):
    """The prompt, or prompt plus max_tokens, exceeds what can ever fit."""


class QueueFull(RequestError):
    """The bounded request queue refuses one more."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestTimeout(RequestError):
    """A deadline, or the time a request may wait in the queue, ran out."""


class Aborted(RequestError):
    """The client left, or asked for the request to be stopped."""


class ResourceError(FastDeployError):
    """This process has too little memory."""


class OutOfBlocks(ResourceError):
    """The KV pool cannot supply the blocks asked for."""


class WorkerError(FastDeployError):
    """A worker or the engine process died, hung or failed."""


class Unavailable(WorkerError):
    """The engine or its queue starts, ends or cannot be reached. Clients are shown the message."""
