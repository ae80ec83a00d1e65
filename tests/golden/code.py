"""Records what is public of the code itself: Python's names and signatures, log events, and SQL functions."""

import ast
import dataclasses
import enum
import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final, LiteralString, cast, get_args, get_type_hints, is_typeddict

from pydantic.fields import FieldInfo

from postbus.config import Settings
from postbus.errors import CODES, PostbusError, exit_code, http_status
from postbus.http.wire import PROBLEMS, problem_of
from postbus.spark.source import ReadOptions
from tests.contract.stores import Site
from tests.postgres.server import query

__all__ = ["documented_functions", "record_logs", "record_python", "record_sql"]

ROOT: Final = Path(__file__).parents[2]
MODULES: Final = ("postbus", "postbus.http", "postbus.spark", "postbus.testing")
ONLY: Final = {
    "Breaker": (),
    "DeadLetters": ("get", "list", "purge", "retry", "retry_all"),
    "Follower": ("__enter__", "__exit__", "has_passed", "is_idle", "leads", "open", "run", "start", "stop"),
    "RetryPolicy": ("attempts", "delay"),
    "Subscriptions": ("create", "delete", "get", "list", "pause", "resume", "rewind"),
    "Transaction": ("execute",),
}
"""Of these classes only so many methods are documented; the others are for the bus itself."""
INTERNAL: Final = frozenset({"DeadFilter", "Entry", "Handler", "Log", "Queue"})
"""What public signatures mention, and users only hand on."""
HOME: Final = re.compile(r"\b(?:[a-z_][a-z_0-9]*\.)+(?=[A-Z])")
UNPACKED: Final = re.compile(r"\*<class '(\w+)'>")
SPECIAL: Final = frozenset({"__init__", "__enter__", "__exit__", "__aenter__", "__aexit__", "__iter__", "__len__"})
UNION: Final = re.compile(r"\bUnion\[((?:[^\[\]]|\[[^\[\]]*\])*)\]")
"""As Python writes it up to 3.13; later ones write `|`."""
PRIVATE: Final = re.compile(r"\b_[A-Z]")
UNPACKED_IN_LOGS: Final = {"**lease._asdict()": {"event_id", "subscription", "epoch"}}
STREAMS: Final = ("events", "audit", "deliveries")
"""What Spark's source reads, as the page on the pipeline has it."""
LEVELS: Final = ("debug", "info", "warning", "error", "critical")


# ── Python ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def record_python() -> dict[str, Any]:
    """Return all public names, and what is known of each: signatures, methods, fields, members."""
    known = {f"{name}.{each}": getattr(import_module(name), each) for name in MODULES for each in _exported(name)}
    known |= {name: found for name in _documented() if (found := _found(name)) not in known.values()}
    values = {each.__name__: each for each in _mentioned([*known.values()]) if each not in known.values()}
    return {
        "modules": {name: _exported(name) for name in MODULES},
        "names": {name: _told(each) for name, each in known.items()},
        "values": {name: _told(each) for name, each in values.items()},
        "settings": [_setting(name, each) for name, each in Settings.model_fields.items()],
        "errors": {each.__name__: _codes(each()) for each in CODES if each is not PostbusError},
        "problems": {name: each.title for name, each in PROBLEMS.items()},
        "spark source": {
            "options": [_field(each) for each in dataclasses.fields(ReadOptions)],
            "columns": {name: _columns(name) for name in STREAMS},
        },
    }


def _setting(name: str, field: FieldInfo) -> str:
    return _bare(f"{name}: {_typed(field.annotation)} = {field.default!r}")


def _codes(error: PostbusError) -> dict[str, Any]:
    return {"status": http_status(error), "exit code": exit_code(error), "problem": problem_of(error)["type"]}


def _columns(stream: str) -> dict[str, str]:
    return {each.name: each.dataType.simpleString() for each in ReadOptions("", stream).schema}


def _exported(module: str) -> list[str]:
    return sorted(import_module(module).__all__)


def _documented() -> list[str]:
    """Return what the reference names beside what is exported: classes and functions in modules of their own."""
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    found = re.findall(r"^::: (postbus\.[\w.]+)", page, re.MULTILINE)
    return [name for name in found if not isinstance(_found(name), ModuleType)]


def _found(name: str) -> Any:
    """Return what goes by a dotted name: as much of it as there is a module for, then attributes."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    except AttributeError:
        return import_module(name)


def _mentioned(public: list[Any]) -> list[type]:
    """Return the classes of ours that public signatures and fields mention, and what those mention in turn."""
    found: dict[type, None] = {}
    pending = [*public]
    while pending:
        for each in _classes(pending.pop()):
            if each not in found and each.__name__ not in INTERNAL and not each.__name__.startswith("_"):
                found[each] = None
                pending.append(each)
    return sorted(found, key=lambda each: each.__name__)


def _classes(public: Any) -> Iterator[type]:
    parts = [public, *(each for _, each in _members(public))] if inspect.isclass(public) else [public]
    for part in parts:
        target = part.fget if isinstance(part, property) else part
        try:
            hints = get_type_hints(target)
        except (NameError, TypeError):
            continue
        yield from (each for hint in hints.values() for each in _parts(hint))


def _parts(hint: Any) -> Iterator[type]:
    origin = getattr(hint, "__origin__", hint)
    if inspect.isclass(origin) and origin.__module__.partition(".")[0] == "postbus":
        yield origin
    for each in get_args(hint):
        yield from _parts(each)


def _told(public: Any) -> Any:
    """Return what is known of a class, a function, or a module."""
    if not inspect.isclass(public):
        return _signature(public) if callable(public) else f"<{type(public).__name__}>"
    bases = [each.__name__ for each in public.__bases__ if each is not object]
    told: dict[str, Any] = {"bases": [each for each in bases if not each.startswith("_")]}
    if issubclass(public, enum.Enum):
        return told | {"members": {each.name: each.value for each in public}}
    if is_typeddict(public):
        return told | {"fields": {name: _typed(each) for name, each in public.__annotations__.items()}}
    if dataclasses.is_dataclass(public):
        told["fields"] = [_field(each) for each in dataclasses.fields(public) if not each.name.startswith("_")]
    elif issubclass(public, tuple):
        told["fields"] = list(getattr(public, "_fields", ()))
    methods = {name: _member(each) for name, each in _members(public)}
    return told | {"methods": {name: each for name, each in methods.items() if not PRIVATE.search(each)}}


def _members(public: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that a class, or one of our classes that it extends, defines."""
    ours = [each for each in public.__mro__ if each.__module__.partition(".")[0] == "postbus"]
    names = {name: each for base in reversed(ours) for name, each in vars(base).items()}
    made = (
        dataclasses.is_dataclass(public)
        or issubclass(public, tuple | enum.Enum)
        or getattr(public, "_is_protocol", False)
    )
    wanted = {name for name in names if not name.startswith("_")} | (SPECIAL - {"__init__"} if made else SPECIAL)
    for name in sorted(wanted & names.keys() & set(ONLY.get(public.__name__, names))):
        if isinstance(names[name], property | staticmethod | classmethod) or inspect.isfunction(names[name]):
            yield name, names[name]


def _member(member: Any) -> str:
    if isinstance(member, property):
        assert member.fget is not None
        return f"property -> {_typed(inspect.signature(member.fget).return_annotation)}"
    kind = "classmethod " if isinstance(member, classmethod) else ""
    function: Any = getattr(member, "__func__", member)
    return kind + _signature(function)


def _signature(function: Callable[..., Any]) -> str:
    prefix = "async " if inspect.iscoroutinefunction(function) else ""
    return prefix + _bare(str(inspect.signature(function)))


def _field(field: dataclasses.Field[Any]) -> str:
    default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
    made = " = …" if field.default_factory is not dataclasses.MISSING else ""
    return _bare(f"{field.name}: {_typed(field.type)}{default}{made}")


def _typed(annotation: Any) -> str:
    return _bare(inspect.formatannotation(annotation))


def _bare(text: str) -> str:
    """Return a signature without the modules in which its types are: they may move."""
    text = UNPACKED.sub(r"Unpack[\1]", HOME.sub("", re.sub(r" at 0x[0-9a-f]+", "", text)))
    text = re.sub(r"(->|:) '(\w+)'", r"\1 \2", text)
    return UNION.sub(lambda found: re.sub(r", (?![^\[]*\])", " | ", found[1]), text)


# ── logs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def record_logs() -> dict[str, Any]:
    """Return every event that the source can log, with its levels and the names of its fields."""
    told: dict[str, dict[str, set[str]]] = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for function in (each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)):
            unpacked = UNPACKED_IN_LOGS | _dicts(function)
            for call in (each for each in ast.walk(function) if isinstance(each, ast.Call)):
                for name, level, fields in _logged(call):
                    known = told.setdefault(name, {"levels": set(), "fields": set()})
                    known["levels"].add(level)
                    known["fields"] |= {part for each in fields for part in unpacked.get(each, (each,))}
    return {name: {part: sorted(each) for part, each in known.items()} for name, known in told.items()}


def _dicts(function: ast.AST) -> dict[str, set[str]]:
    """Return the keys of the dictionaries that a function's variables hold, by `**variable`."""
    told: dict[str, set[str]] = {}
    for each in ast.walk(function):
        match each:
            case ast.Assign(targets=[ast.Name(name)], value=value):
                pass
            case ast.AnnAssign(target=ast.Name(name), value=ast.expr() as value):
                pass
            case ast.AugAssign(target=ast.Name(name), value=value):
                pass
            case _:
                continue
        keys = {key for part in ast.walk(value) if isinstance(part, ast.Dict) for key in _keys(part)}
        told.setdefault(f"**{name}", set()).update(keys)
    return {name: keys for name, keys in told.items() if keys}


def _logged(call: ast.Call) -> Iterator[tuple[str, str, set[str]]]:
    """Yield what a call logs: `tell(logging.INFO, name, …)`, `logger.info(name, extra=…)`, `self._tell(name, {…})`."""
    match call:
        case ast.Call(args=[ast.Attribute(ast.Name("logging"), level), name]):
            fields = {each.arg or f"**{ast.unparse(each.value)}" for each in call.keywords}
        case ast.Call(func=ast.Attribute(ast.Name("logger"), method), args=[name]) if method in LEVELS:
            extra = (each.value for each in call.keywords if each.arg == "extra")
            level, fields = method.upper(), {key for each in extra for key in _keys(each)}
        case ast.Call(func=ast.Attribute(attr="_tell"), args=[name, ast.Dict() as extra]):
            level, fields = "INFO", _keys(extra)
        case _:
            return
    for each in (name.body, name.orelse) if isinstance(name, ast.IfExp) else (name,):
        if isinstance(each, ast.Constant):
            yield str(each.value), level, fields


def _keys(extra: ast.expr) -> set[str]:
    if not isinstance(extra, ast.Dict):
        return {f"**{ast.unparse(extra)}"}
    pairs = zip(extra.keys, extra.values, strict=True)
    return {str(key.value) if isinstance(key, ast.Constant) else f"**{ast.unparse(value)}" for key, value in pairs}


# ── SQL ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

FUNCTIONS: Final = """
SELECT p.proname, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid)
  FROM pg_proc AS p WHERE p.pronamespace = 'postbus'::regnamespace ORDER BY 1, 2
"""


def documented_functions() -> set[str]:
    """Return which SQL functions the page on PostgreSQL tells users to call."""
    return set(re.findall(r"\bpostbus\.([a-z_]+)\(", (ROOT / "docs" / "postgresql.md").read_text(encoding="utf-8")))


def record_sql(site: Site) -> dict[str, Any]:
    """Return the arguments, with their defaults, and the result of every documented SQL function."""
    rows = query(site.url, cast("LiteralString", FUNCTIONS))
    known = documented_functions()
    return {f"{name}({arguments})": result for name, arguments, result in rows if name in known}
