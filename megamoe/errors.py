"""Errors that a user of the layer can meet; each is also the built-in type that one would catch."""

from __future__ import annotations


class MegaMoEError(Exception):
    """Base of all errors of this package."""


class MegaMoEValueError(MegaMoEError, ValueError):
    """An argument has a value, a shape or a layout that the contract excludes."""


class MegaMoETypeError(MegaMoEError, TypeError):
    """An argument has a type or dtype that the contract excludes."""


class MegaMoERuntimeError(MegaMoEError, RuntimeError):
    """A call cannot be carried out in the present state of a workspace, a group or a machine."""


class BackendUnavailable(MegaMoERuntimeError):
    """The backend asked for does not run here; the message says why and what would."""


class CapacityError(MegaMoERuntimeError):
    """A rank received more rows than its pool holds; all ranks raise it for the same call."""


class MegaMoETimeout(MegaMoERuntimeError):
    """A rank waited longer than the watchdog allows; the message names rank, role and awaited value."""


def expected(argument: str, contract: str, got: object, next_step: str = "") -> str:
    """One message in the house form.

    Args:
        argument: the argument as the user spelled it.
        contract: what it must be.
        got: what it is.
        next_step: what to do about it, a sentence, or "".

    Returns:
        `<argument>: expected <contract>, got <got>. <next_step>`
    """
    return f"{argument}: expected {contract}, got {got}." + (f" {next_step}" if next_step else "")
