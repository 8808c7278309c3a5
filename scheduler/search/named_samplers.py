"""Optuna samplers by name, for the command line and jobs."""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Union

from search_spaces import value_of

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

# The cost model's order, then a surrogate: `samplers.ModelSampler`.
MODEL = "model"
# Optuna samplers: name -> class.
SAMPLERS: Mapping[str, str] = {
    "tpe": "TPESampler",
    "gp": "GPSampler",
    "cmaes": "CmaEsSampler",
    "nsgaii": "NSGAIISampler",
    "qmc": "QMCSampler",
    "random": "RandomSampler",
}
# Packages in addition to Optuna that a class of samplers imports when it proposes.
_NEEDS: Mapping[str, Sequence[str]] = {
    "GPSampler": ("torch", "scipy"),
    "CmaEsSampler": ("cmaes",),
    "QMCSampler": ("scipy",),
}
Sampler = Union[str, "BaseSampler"]


def sampler_of(named: Sampler, seed: int) -> BaseSampler | None:
    """Returns the sampler of a search; None stands for `samplers.ModelSampler`.

    Args:
      named: an Optuna sampler; "model"; a key of `SAMPLERS`; or ``module:NAME``, which refers to a sampler, a sampler
        class or a function that returns a sampler. A class or a function is called with ``seed=seed`` if it has that
        parameter, else without arguments.

    Raises:
      TypeError, ValueError: `named` is not a sampler, or the sampler needs a package that is not installed.
    """
    if named == MODEL:
        return None
    made = _made(named, seed)
    _require_packages(made)
    return made


def _made(named: Sampler, seed: int) -> BaseSampler:
    import optuna

    if isinstance(named, optuna.samplers.BaseSampler):
        return named
    if not isinstance(named, str):
        raise TypeError(f"sampler must be an Optuna sampler or the name of one, found {named!r}")
    if ":" in named:
        try:
            made = value_of(named)
        except (ImportError, AttributeError, OSError) as error:
            raise ValueError(f"the sampler {named} cannot be loaded: {error}") from error
        if callable(made):
            try:
                made = made(seed=seed) if "seed" in inspect.signature(made).parameters else made()
            except Exception as error:  # a class or a function of the user's own
                raise ValueError(
                    f"a call of {named} with the seed alone makes no sampler: {type(error).__name__}: {error}; write a "
                    "function that returns the sampler, and name that function"
                ) from error
        if not isinstance(made, optuna.samplers.BaseSampler):
            raise ValueError(f"{named} must be or return an Optuna sampler, found {type(made).__name__}")
        return made
    if named not in SAMPLERS:
        raise ValueError(f"unknown sampler {named!r}: use {', '.join([MODEL, *SAMPLERS])}, or module:NAME")
    options = {"warn_independent_sampling": False} if named in ("cmaes", "qmc") else {}
    if named == "qmc":
        options["scramble"] = True  # otherwise the points are the same for every seed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler: BaseSampler = getattr(optuna.samplers, SAMPLERS[named])(seed=seed, **options)
    return sampler


def _require_packages(sampler: BaseSampler) -> None:
    """Raises a ValueError if the sampler, or one within it as in `PartialFixedSampler`, needs a missing package."""
    from optuna.samplers import BaseSampler

    several = [sampler]
    for each in several:
        several += [inner for inner in vars(each).values() if isinstance(inner, BaseSampler) and inner not in several]
        for name in (of.__name__ for of in type(each).__mro__):
            if missing := [one for one in _NEEDS.get(name, ()) if importlib.util.find_spec(one) is None]:
                raise ValueError(f"{name} needs {' and '.join(missing)}: pip install {' '.join(missing)}")
