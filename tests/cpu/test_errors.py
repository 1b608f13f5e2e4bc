"""Errors: each is also the built-in type one would catch, and every message has one form."""

import inspect

import pytest

from megamoe import errors


def test_every_error_is_ours_and_a_builtin_type():
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__]
    assert len(classes) >= 7
    for c in classes:
        assert issubclass(c, errors.MegaMoEError)
        assert c is errors.MegaMoEError or issubclass(c, (ValueError, TypeError, RuntimeError))
        assert c.__doc__


@pytest.mark.parametrize(
    "error,builtin",
    [
        (errors.MegaMoEValueError, ValueError),
        (errors.MegaMoETypeError, TypeError),
        (errors.MegaMoERuntimeError, RuntimeError),
        (errors.BackendUnavailable, RuntimeError),
        (errors.CapacityError, RuntimeError),
        (errors.MegaMoETimeout, RuntimeError),
    ],
)
def test_can_be_caught_as_the_builtin(error, builtin):
    with pytest.raises(builtin, match="why"):
        raise error("why")


def test_messages():
    assert errors.expected("x", "bf16", "fp32") == "x: expected bf16, got fp32."
    assert errors.expected("x", "bf16", 3, "Convert it.") == "x: expected bf16, got 3. Convert it."
