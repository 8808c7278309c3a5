"""Search spaces: operations, their problems, and their kernels with the schedules to search."""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tile_scheduler

if TYPE_CHECKING:
    from search_spaces.footprint import Footprint, Operand, Phase
    from search_spaces.kernel import Kernel, Library, LibraryKernel
    from search_spaces.operation import Operation
    from search_spaces.problem import Problem, Tolerance
    from search_spaces.space import Columns, DeclarationError, Space
    from search_spaces.target import Target


__all__ = [
    "OPERATIONS",
    "Columns",
    "DeclarationError",
    "Footprint",
    "Kernel",
    "Library",
    "LibraryKernel",
    "Operand",
    "Operation",
    "Phase",
    "Problem",
    "Space",
    "Target",
    "Tolerance",
    "load",
]

tile_scheduler.warn()

# Formulas of one row; each has further operations for its derivative.
_FORMULAS = (
    "softmax",
    "softmax_with_lse",
    "log_softmax",
    "cross_entropy",
    "rms_norm",
    "add_rms_norm",
    "layer_norm",
    "silu_and_mul",
    "quantize_rows",
)
_ROWS = tuple(f"{name}{part}" for name in _FORMULAS for part in ("", "_saving", "_jvp", "_backward"))
_OWN = {
    "matmul": "search_spaces.matmul:MATMUL",
    **{name: f"search_spaces.rows.formulas:{name.upper()}" for name in _ROWS},
    "rows": "search_spaces.rows.operation:ROWS",
    "rows_jvp": "search_spaces.rows.operation:ROWS_JVP",
    "rows_along": "search_spaces.rows.operation:ROWS_ALONG",
    "rows_along_jvp": "search_spaces.rows.operation:ROWS_ALONG_JVP",
    "group_norm": "search_spaces.rows.channels:GROUP_NORM",
    "gated_matmul": "search_spaces.gated_matmul:GATED_MATMUL",
    "ragged_dot": "search_spaces.ragged_dot:RAGGED_DOT",
    "ragged_dot_weights": "search_spaces.ragged_dot:RAGGED_DOT_WEIGHTS",
    "gated_ragged_dot": "search_spaces.ragged_dot:GATED_RAGGED_DOT",
    "scaled_matmul": "search_spaces.scaled_matmul:SCALED_MATMUL",
    "flash_attention": "search_spaces.flash_attention:FLASH_ATTENTION",
    "flash_attention_backward": "search_spaces.flash_attention_backward:FLASH_ATTENTION_BACKWARD",
}
OPERATIONS = tuple(_OWN)


def __getattr__(name: str) -> Any:
    # Loaded on first use: reading, listing and copying records must not pay the half second that importing JAX takes.
    if name not in __all__:
        raise AttributeError(f"module 'search_spaces' has no attribute {name!r} (it has: {', '.join(__all__)})")
    places = {"Columns": "space", "Space": "space", "DeclarationError": "space"}
    places |= dict.fromkeys(("Footprint", "Operand", "Phase"), "footprint")
    places |= {"Problem": "problem", "Tolerance": "problem", "Operation": "operation"}
    module = importlib.import_module(f"search_spaces.{places.get(name, 'kernel')}")
    value = globals()[name] = getattr(module, name)
    return value


def load(name: str) -> Operation[Any]:
    """Loads an operation by its own name ("matmul"), as ``package.module:NAME``, or as ``path/to/file.py:NAME``.

    NAME is an operation, or a function that runs one.

    Raises:
      ValueError: no such operation exists. The message contains the name and lists the operations of this package.
    """
    place = _OWN.get(name, name)
    if not place.rpartition(":")[0]:
        raise ValueError(f"no operation {_unknown(name)}; your own: package.module:NAME or file.py:NAME")
    try:
        operation = run_by(value := value_of(place))
    except Exception as error:  # a user's file may raise anything; one bad problem of a job must not stop the others
        said = str(error).replace(_file_module(Path(place.rpartition(":")[0])), place.rpartition(":")[0])
        raise ValueError(f"cannot load operation {name!r}: {type(error).__name__}: {said}") from error
    if operation is None:
        raise ValueError(f"{name!r} is a {type(value).__name__}, not an Operation, nor a function that runs one")
    _loaded[operation.name] = operation
    return operation


def value_of(place: str) -> Any:
    """Returns the object named ``package.module:NAME`` or ``path/to/file.py:NAME``; raises what the module raises."""
    module_name, _, attribute = place.rpartition(":")
    module = _load_file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
    if not hasattr(module, attribute):
        from search_spaces.space import unknown

        public = {each: value for each, value in vars(module).items() if each[:1] != "_"}
        held = [each for each, value in public.items() if run_by(value) is not None]
        held = held or [each for each, value in public.items() if isinstance(value, types.FunctionType)]
        raise AttributeError(f"{module_name} has no attribute {unknown(attribute, held)}")
    return getattr(module, attribute)


def _unknown(name: str) -> str:
    """Returns the end of an error message about an operation that this package does not have."""
    from search_spaces.space import unknown

    return f"{name!r} in this package" if "." in name else unknown(name, _OWN)


def run_by(value: Any) -> Operation[Any] | None:
    """Returns the operation that `value` is or that the function `value` runs; None if there is none."""
    from search_spaces.operation import Operation

    found = vars(value).get("operation") if isinstance(value, types.FunctionType) else value
    return found if isinstance(found, Operation) else None


_loaded: dict[str, Operation[Any]] = {}


def load_known(name: str) -> Operation[Any]:
    """Loads an operation by a name from untrusted text: one of this package, or one that was loaded before.

    Such a name never runs code. Only a name given in a command may name code.

    Raises:
      ValueError: the name is neither.
    """
    if name in _OWN:
        return load(name)
    if name in _loaded:
        return _loaded[name]
    if ":" in name:
        raise ValueError(f"operation {name!r} is code, and text that names code runs none: name it in the command, too")
    raise ValueError(f"no operation {_unknown(name)}")


def format_problem(operation: str, canonical: str) -> str:
    """Formats the problem of a key as it is typed, ``m=64 n=64 k=64 dtype=bfloat16``, as `Problem` itself does.

    The defaults of an operation that is neither in this package nor loaded are unknown: its text has the fields of the
    key. Text that is no problem is returned unchanged.
    """
    with contextlib.suppress(ValueError):
        known = load(operation) if operation in _OWN else _loaded.get(operation)
        if known is not None:
            return str(known.problem.from_canonical(canonical))
    with contextlib.suppress(ValueError, RecursionError):  # a store may hold any text
        values = json.loads(canonical)
        if isinstance(values, dict):
            return " ".join(f"{name}={value}" for name, value in values.items())
    return canonical


def locate(operation: Operation[Any]) -> str | None:
    """Returns the name by which another process can `load` this operation, or None (if defined in a notebook, say).

    An operation is found as a global of the module that created it, or by a function there that runs it.
    """
    module = sys.modules.get(operation.module)
    # A copy, because other threads may import meanwhile.
    held = [name for name, value in vars(module).copy().items() if run_by(value) is operation] if module else []
    if not held:
        return None
    if operation.module not in SCRIPT and not operation.module.startswith(LOADED_FILE):
        return f"{operation.module}:{held[0]}"
    file = getattr(module, "__file__", None)
    return f"{Path(file).resolve()}:{held[0]}" if file and file.endswith(".py") else None


# Module names of the script that a process runs: multiprocessing uses a name of its own.
SCRIPT = ("__main__", "__mp_main__")
# Prefix of the names of modules that were loaded by their file paths.
LOADED_FILE = "tile_scheduler_file_"
_loading = contextvars.ContextVar("loading", default=False)


class _EndOfLoad(BaseException):
    """Ends the execution of a file that is loaded for its operation.

    It is not an Exception, so that no handler in the file catches it.
    """


def stop_script_import() -> None:
    """Stops the execution of a script that is being loaded, keeping its definitions so far; does nothing otherwise.

    Workers load the script that defines an operation. A script without a `__main__` guard would go on to the call that
    started the workers. The same holds for the command that the message of a cache miss suggests. Code that would
    search, or raise a cache miss, calls this function first.
    """
    if _loading.get():
        raise _EndOfLoad


def _file_module(path: Path) -> str:
    """Returns the module name of a file that is loaded by its path."""
    return f"{LOADED_FILE}{path.resolve().as_posix().replace('/', '_').replace('.', '_')}"


def _load_file(path: Path) -> Any:
    name = _file_module(path)
    if name in sys.modules:
        return sys.modules[name]
    if path.exists() and not path.is_file():
        raise ImportError(f"{path} is no file")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    token = _loading.set(True)
    try:
        spec.loader.exec_module(module)
    except _EndOfLoad:
        pass
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        _loading.reset(token)
    return module
