"""Every error the runtime raises on purpose: all are ``lfdata.errors.LfdataError``, so one except clause takes both packages'."""

from __future__ import annotations

from lfdata.errors import FormatError, LfdataError, OptionError


class ConfigError(OptionError):
    """A configuration that cannot be used; the message names file and key, and what would do."""


class NonFiniteError(LfdataError):
    """Too many steps in a row had gradients that are not finite; the message names rank, parameter and samples of the last, and what to try."""


class LossError(LfdataError):
    """What a loss returns cannot be used, or nothing counted in too many steps in a row; the message names step, rank and micro-batch."""


class CheckpointError(LfdataError):
    """No checkpoint could be written or found; the message says where and why."""


class DamagedCheckpointError(FormatError):
    """A checkpoint whose bytes are not those that were written: ``file`` and the tensor in the reason."""


class DivergenceError(LfdataError):
    """Ranks that should hold the same parameters do not; the message names the ranks and the first parameter that differs."""


class PeerError(LfdataError):
    """A rank is gone or does not take part; the message names it and where it was last."""


class RanksError(LfdataError):
    """Ranks were started with things that must be equal and are not."""
