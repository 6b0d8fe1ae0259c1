"""An op over one launch function: the registered op that compilers see, and the light eager one.

    class Inputs(NamedTuple): ...                               the arguments by name, from which the schema follows
    def _launch(inputs: Inputs) -> Tensor: ...                  starts the kernels
    def _fake(inputs: Inputs) -> Tensor: ...                    the same outputs, without values
    def _save(ctx, inputs, output) -> None: ...                 keeps what backward needs
    def _differentiate(ctx, backward, *upstream) -> ...         the gradients of the inputs, in their order

    OP = register.Op("rope", _launch, _fake)
    eager = OP.differentiate(_save, _differentiate)

`OP.registered` is the `torch.library` op, `eager` the light `torch.autograd.Function`. Both take the fields of the
inputs one by one, as `eager(*inputs)`: autograd follows only tensors that are arguments themselves.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewright.runtime import dispatch

Save = Callable[[Any, Any, Any], None]  # of the context, the inputs and the output
Formula = Callable[..., Sequence[Any]]

_TYPES = {torch.Tensor: "Tensor", torch.dtype: "ScalarType", bool: "bool", int: "SymInt", float: "float", str: "str"}


class Op:
    """A launch function, registered with `torch.library` as ``tilewright::name``.

    Its one argument is a NamedTuple. A field with a default is for the eager op alone, and no part of the schema. An
    output may be None; of the registered op, which cannot return that, it is an empty tensor.
    """

    def __init__(self, name: str, launch: Callable[[Any], Any], fake: Callable[[Any], Any]) -> None:
        self.inputs, returned = _types(launch)
        self.launch = launch
        self.arguments = len(self.inputs._fields) - len(self.inputs._field_defaults)  # of the registered op

        def run(*values: Any) -> Any:
            return _without_none(launch(self.inputs(*values)), values)

        schema = _schema(self.inputs, returned)
        self.registered: Any = torch.library.custom_op(f"tilewright::{name}", run, mutates_args=(), schema=schema)
        dispatch.fake_of(self.registered)(lambda *values: _without_none(fake(self.inputs(*values)), values))

    def call_registered(self, inputs: Any) -> Any:
        """Call the registered op; of one that computes gradients, those that its `needs` leave out are None."""
        outputs = self.registered(*inputs[: self.arguments])
        if not hasattr(inputs, "needs"):
            return outputs
        return [output if need else None for output, need in zip(outputs, inputs.needs, strict=True)]

    def differentiate(
        self,
        save: Save,
        formula: Formula,
        backward: Op | None = None,
        foresee: Save | None = None,
        outputs: int | None = None,
    ) -> Any:
        """Give the registered op its gradient, and return the light eager op, which differentiates by the same formula.

        The arguments are those of `make_eager`.
        """
        self.register_gradient(save, formula, backward)
        return make_eager(self.launch, save, formula, backward, foresee, outputs)

    def register_gradient(self, save: Save, formula: Formula, backward: Op | None = None) -> None:
        """Give the registered op alone its gradient: for one whose eager backward overwrites what forward computed."""
        rest = (None,) * self.arguments
        call = (backward or self).call_registered

        def gradients(ctx: Any, *upstream: Any) -> tuple[Any, ...]:
            known = formula(ctx, call, *upstream)
            return *known, *rest[len(known) :]

        def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            save(ctx, self.inputs(*inputs), output)

        self.registered.register_autograd(gradients, setup_context=setup)


def make_eager(
    launch: Callable[[Any], Any],
    save: Save,
    formula: Formula,
    backward: Op | None = None,
    foresee: Save | None = None,
    outputs: int | None = None,
) -> Any:
    """Return the light eager op over a launch function, which takes the fields of its inputs one by one.

    By itself it is for a function that compilers see as PyTorch's own ops, or as other ops of ours.

    Args:
        launch: the launch function.
        save: ``save(ctx, inputs, output)`` keeps what the formula needs.
        formula: ``formula(ctx, backward, *upstream)`` returns the gradients of the first inputs; those of the others
            are None. ``backward(inputs)`` runs the op that computes gradients.
        backward: that op; left out, it is this one, which then has derivatives of every order.
        foresee: ``foresee(ctx, inputs, output)`` launches what backward will, on little data: the first eager call
            compiles it so in the background, by `dispatch.rehearse`.
        outputs: how many outputs the eager op returns, where the others are for backward alone: `formula` is then
            called without their gradients.
    """
    kind, _ = _types(launch)
    make, nothing = kind._make, (None,) * len(kind._fields)

    class _Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *values: Any) -> Any:
            inputs, launches = make(values), dispatch.Launch.firsts
            output = launch(inputs)
            save(ctx, inputs, output)
            if foresee is not None and dispatch.Launch.firsts != launches and any(ctx.needs_input_grad):
                dispatch.rehearse(foresee, ctx, inputs, output)
            return output if outputs is None else output[:outputs]

        @staticmethod
        def backward(ctx: Any, *upstream: Any) -> Any:
            known = formula(ctx, run_backward, *upstream)
            return *known, *nothing[len(known) :]

    eager = dispatch.eager(_Function)
    run_backward = backward.launch if backward is not None else lambda inputs: eager(*inputs)
    return eager


def refuse_second_derivative(op: str, instead: str = "its `reference`") -> None:
    """Raise where autograd would record an op's backward, whose launches it cannot differentiate."""
    if torch.is_grad_enabled() and not dispatch.is_compiling():
        raise RuntimeError(f"{op} has no second derivative: leave out create_graph=True, or use {instead}.")


def _types(launch: Callable[[Any], Any]) -> tuple[Any, Any]:
    """The NamedTuple that a launch function takes, and the type of its result."""
    hints = typing.get_type_hints(launch)
    returned = hints.pop("return")
    (inputs,) = hints.values()
    return inputs, returned


def _without_none(outputs: Any, values: Sequence[Any]) -> Any:
    """The outputs as a registered op returns them: an empty tensor like the first input for each None."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    kind = list if isinstance(outputs, list) else tuple
    return kind(values[0].new_empty(0) if output is None else output for output in outputs)


def _schema(inputs: Any, returned: Any) -> str:
    """The schema of an op with these inputs, a NamedTuple, and this type of its result.

    >>> class Inputs(typing.NamedTuple):
    ...     x: torch.Tensor
    ...     seed: torch.Tensor | int | None
    ...     dtype: torch.dtype | None
    ...     needs: Sequence[bool]
    ...     inplace: bool = False
    >>> _schema(Inputs, tuple[torch.Tensor, torch.Tensor | None])
    '(Tensor x, Tensor? seed, ScalarType? dtype, bool[] needs) -> (Tensor, Tensor)'
    """
    hints = typing.get_type_hints(inputs)
    arguments = [f"{_type(hints[name])} {name}" for name in inputs._fields if name not in inputs._field_defaults]
    kind, parts = typing.get_origin(returned), typing.get_args(returned)
    outputs = "Tensor[]" if kind is list else f"({', '.join('Tensor' for _ in parts)})" if kind is tuple else "Tensor"
    return f"({', '.join(arguments)}) -> {outputs}"


def _type(hint: Any) -> str:
    """An argument's type in a schema. A number that may stand for a tensor does so in the eager op only."""
    parts = typing.get_args(hint)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        kinds = [part for part in parts if part is not types.NoneType]
        kind = torch.Tensor if torch.Tensor in kinds else kinds[0]
        return _TYPES[kind] + "?" * (types.NoneType in parts)
    return f"{_TYPES[parts[0]]}[]" if parts else _TYPES[hint]
