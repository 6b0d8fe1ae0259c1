"""The name of a user's own model, `package.module:factory:name=value,...`: read, written and checked.

What is checked here takes no import of the user's code: whether there is such a module, and such a function in it.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from tilewright.errors import UserError

_HIDING = {"*", "__getattr__", "globals", "vars", "exec", "setattr"}  # what defines names that no source shows


def check_name(text: str) -> tuple[str, str]:
    """The module and the name in it that a text means; nothing is imported.

    >>> check_name("my_project.model:small")
    ('my_project.model', 'small')
    """
    where, _, rest = text.partition(":")
    name, _, given = rest.partition(":")
    if not re.fullmatch(r"\w+(\.\w+)*", where) or where.endswith(".py") or not name.isidentifier():
        such = "my_project.model:small"
        if re.fullmatch(r"(\./)?(\w+/)*\w+\.py:\w+", f"{where}:{name}"):
            such = f"{where.removeprefix('./').removesuffix('.py').replace('/', '.')}:{name}"
        raise UserError(f"The model is {text!r}; write package.module:factory, such as {such}.")
    _parse(text, given)
    return where, name


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments that a text has for its factory, behind a second colon.

    >>> arguments_of("my_project.model:build:layers=2,name=a%2Cb")
    {'layers': 2, 'name': 'a,b'}
    """
    return _parse(text, text.split(":", 2)[2] if text.count(":") > 1 else "")


def with_arguments(text: str, arguments: Sequence[str]) -> str:
    """A model's text with more arguments, each `name=value`.

    >>> with_arguments("my_project.model:build", ["layers=2", "name=a,b"])
    'my_project.model:build:layers=2,name=a%2Cb'
    """
    for each in arguments:
        text += (":" if text.count(":") < 2 else ",") + "=".join(quote(part) for part in each.split("=", 1))
    check_name(text)
    return text


def _parse(text: str, given: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in filter(None, given.split(",")):
        name, equals, value = each.partition("=")
        if not name.isidentifier() or not equals or name in found:
            raise UserError(f"The model is {text!r} and {each!r} is no argument; write name=value, each name once.")
        found[name] = _value(unquote(value))
    return found


def _value(text: str) -> Any:
    """An argument as its text says it: a whole number, a number, true, false, null, or the text.

    >>> [_value(each) for each in ("12", "1e-3", "true", "null", "010", "a: b #c")]
    [12, 0.001, True, None, '010', 'a: b #c']
    """
    words = {"true": True, "false": False, "null": None}
    if text in words:
        return words[text]
    if re.fullmatch(r"-?(0|[1-9][0-9]{0,17})", text):
        return int(text)
    is_number = re.fullmatch(r"-?(0|[1-9][0-9]{0,17})?(\.[0-9]{1,18})?(e[-+]?[0-9]{1,3})?", text) and text.strip("-e+")
    return float(text) if is_number and text.strip("-")[0] in "0123456789." else text


def name_of(factory: Callable[[], Any]) -> tuple[str, list[str]]:
    """The `package.module:factory` that a function has, and the folders to look for it in beside `sys.path`.

    A trial is a process of its own that imports the function by this name.

    >>> name_of(check_name)
    ('tilewright.tune.model_name:check_name', [])
    """
    where, name, folders = getattr(factory, "__module__", None), getattr(factory, "__qualname__", ""), list[str]()
    main = sys.modules["__main__"]
    if where == "__main__":
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        where = spec.name if spec is not None else Path(file).stem if file else None
        folders = [str(Path(file).resolve().parent)] if file and spec is None else []
    if not where or not name.isidentifier() or not re.fullmatch(r"\w+(\.\w+)*", where):
        raise UserError(
            f"The model is {str(factory)[:80]}, which other processes cannot import; define a function at the top of a "
            "module, such as my_model.py, and give that."
        )
    return f"{where}:{name}", folders


def say_not_importable(text: str, why: str) -> UserError:
    """The refusal of a model whose module cannot be imported."""
    where, _ = check_name(text)
    return UserError(
        f"The model is {text!r} and {where} cannot be imported ({why}); check its name, install it, or run where it is."
    )


def say_no_factory(text: str, known: Sequence[str]) -> UserError:
    """The refusal of a model whose module has no function of that name, but the `known` ones."""
    where, name = check_name(text)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else "give the name of a function of it."
    return UserError(f"The model is {text!r} and {where} has no {name!r}; {hint}")


def check_source(text: str, path: Sequence[str] = ()) -> None:
    """Refuse a model whose module's source does not define it, without running the module.

    Args:
        text: package.module:factory.
        path: folders to look in before `sys.path`.

    >>> check_source("this:make")
    Traceback (most recent call last):
    tilewright.errors.UserError: The model is 'this:make' and this has no 'make'; give the name of a function of it.
    """
    where, name = check_name(text)
    if where in sys.modules:
        return
    spec = _spec(text, where, [*path, *sys.path])
    file = spec.origin if spec is not None else None
    if file is None or not file.endswith(".py"):
        return  # compiled, or in an archive: who imports it will see
    try:
        tree = ast.parse(Path(file).read_bytes(), file)
    except (SyntaxError, ValueError) as error:
        at = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise say_not_importable(text, f"{type(error).__name__}: {getattr(error, 'msg', error)}{at}") from error
    except OSError:
        return
    names = _names(tree)
    if names is None or name in names:
        return _check_arguments(text, tree, name)
    raise say_no_factory(text, sorted(names))


def _spec(text: str, where: str, path: Sequence[str]) -> ModuleSpec | None:
    """The spec of a module, found without importing the packages around it; None where nobody can say."""
    first, *others = where.split(".")
    spec = PathFinder.find_spec(first, path) or importlib.util.find_spec(first)
    dotted = first
    for name in others:
        if spec is None:
            break
        if spec.origin and spec.origin.endswith(".py") and b"__path__" in Path(spec.origin).read_bytes():
            return None  # it says itself where its modules are
        dotted += f".{name}"
        spec = PathFinder.find_spec(dotted, spec.submodule_search_locations or [])
    if spec is None:
        there = [each.stem for each in Path(path[0] if path else ".").glob("*.py")]
        near = difflib.get_close_matches(where, there, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise say_not_importable(text, f"ModuleNotFoundError: No module named {dotted!r}{hint}")
    return spec


def _names(tree: ast.Module) -> set[str] | None:
    """Return the names that a module defines; None where only running it can tell."""
    found, todo = set[str](), list[ast.AST](tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(each.asname or each.name).partition(".")[0] for each in node.names}
        elif isinstance(node, ast.Name) and (isinstance(node.ctx, ast.Store) or node.id in _HIDING):
            found.add(node.id)
        todo += ast.iter_child_nodes(node)
    return None if found & _HIDING else found


def _check_arguments(text: str, tree: ast.Module, name: str) -> None:
    """Refuse arguments that a factory does not take, and a factory that needs others; where it is a plain function."""
    defined = [each for each in ast.walk(tree) if getattr(each, "name", None) == name]
    factory = defined[0] if len(defined) == 1 else None
    if not isinstance(factory, ast.FunctionDef) or factory.decorator_list or factory.args.posonlyargs:
        return
    given, takes = arguments_of(text), factory.args
    names = [each.arg for each in (*takes.args, *takes.kwonlyargs)]
    for each in given if takes.kwarg is None else ():
        if each not in names:
            near = difflib.get_close_matches(each, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(names) or 'none'}."
            raise UserError(f"The factory {_short(text)} takes no argument {each!r}; {hint}")
    optional = takes.args[len(takes.args) - len(takes.defaults) :]
    needed = [each for each in takes.args if each not in optional]
    needed += [each for each, value in zip(takes.kwonlyargs, takes.kw_defaults, strict=True) if value is None]
    for argument in needed:
        if argument.arg not in given:
            raise UserError(
                f"The factory {_short(text)} needs {argument.arg!r}; give --model-arg {argument.arg}=VALUE, or give it "
                "a default."
            )


def _short(text: str) -> str:
    return ":".join(text.split(":", 2)[:2])
